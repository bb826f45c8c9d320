#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "tests/fuzz/fuzz_target.h"

// Runs known inputs without libFuzzer, so that every compiler and sanitizer sees them:
//   <program>_replay CORPUS              for each target its seeds, a few hundred changed ones
//   (always
//                                        the same), and the files in CORPUS/<program>/<target>
//   <program>_replay --run TARGET FILE.. these files, each named before it runs
//   <program>_replay --targets           prints the targets' names
//   <program>_replay --seeds TARGET DIR  writes the target's seeds into DIR

namespace gradwire::fuzz {
namespace {

namespace fs = std::filesystem;

using Bytes = std::vector<std::byte>;

constexpr std::size_t kMutations = 300;
constexpr std::size_t kMaxMutatedBytes = 4096;

Bytes ReadBytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.good()) Fail("cannot read " + path.string());
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const ByteView bytes = AsBytes(text);
  return {bytes.begin(), bytes.end()};
}

/// Changes, adds or removes a byte or two.
std::size_t ChangeBytes(std::uint8_t* data, std::size_t size, std::size_t max_size) {
  static CounterRng rng(1);
  for (std::uint64_t changes = 1 + rng.NextBelow(2); changes > 0; --changes) {
    const auto at = static_cast<std::size_t>(rng.NextBelow(size + 1));
    const auto value = static_cast<std::uint8_t>(rng.Next() & 0xff);
    const std::uint64_t kind = rng.NextBelow(4);
    if (kind == 0 && size < max_size) {
      std::copy_backward(data + at, data + size, data + size + 1);
      data[at] = value;
      ++size;
    } else if (at == size) {
      continue;
    } else if (kind == 1) {
      std::copy(data + at + 1, data + size, data + at);
      --size;
    } else if (kind == 2) {
      data[at] = value;
    } else {
      data[at] = static_cast<std::uint8_t>(data[at] ^ (1U << (value % 8)));
    }
  }
  return size;
}

void RunMutations(const std::string& target, const std::vector<Bytes>& seeds) {
  CounterRng rng(2);
  Bytes buffer(kMaxMutatedBytes);
  std::size_t size = 0;
  for (std::size_t i = 0; i < kMutations; ++i) {
    if (i % 4 == 0) {  // a few changes on top of each other, then another seed
      const Bytes& seed = seeds[rng.NextBelow(seeds.size())];
      size = std::min(seed.size(), buffer.size());
      std::copy_n(seed.begin(), size, buffer.begin());
    }
    size = Mutate(target, buffer, size, rng.Next(), ChangeBytes);
    if (size > buffer.size()) Fail("a changed input is larger than its buffer");
    Run(target, ByteView(buffer).first(size));
  }
}

std::vector<fs::path> Entries(const fs::path& folder) {
  std::vector<fs::path> paths;
  if (!fs::is_directory(folder)) return paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

void Replay(const fs::path& folder) {
  const std::vector<std::string> targets = Targets();
  if (targets.empty()) Fail("the program has no targets");
  for (const fs::path& path : Entries(folder)) {
    const std::string name = path.filename().string();
    if (std::find(targets.begin(), targets.end(), name) == targets.end()) {
      Fail("no target runs the inputs of " + path.string());
    }
  }
  for (const std::string& target : targets) {
    std::cout << target << ": " << std::flush;  // what ran, should the process end here
    const std::vector<Bytes> seeds = Seeds(target);
    if (seeds.empty()) Fail("target " + target + " has no seeds");
    for (const Bytes& seed : seeds) Run(target, seed);
    std::cout << seeds.size() << " seeds, " << std::flush;
    const std::vector<fs::path> files = Entries(folder / target);
    for (const fs::path& file : files) Run(target, ReadBytes(file));
    std::cout << files.size() << " files, " << std::flush;
    RunMutations(target, seeds);
    std::cout << kMutations << " changed seeds" << std::endl;
  }
}

void WriteSeeds(const std::string& target, const fs::path& folder) {
  std::size_t number = 0;
  for (const Bytes& seed : Seeds(target)) {
    std::ofstream file(folder / ("seed_" + std::to_string(number++)), std::ios::binary);
    const std::string_view text = AsText(seed);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    if (!file.flush().good()) Fail("cannot write to " + folder.string());
  }
}

int Main(const std::vector<std::string>& arguments) {
  const std::size_t count = arguments.size();
  if (count == 1 && arguments[0] == "--targets") {
    for (const std::string& target : Targets()) std::cout << target << '\n';
  } else if (count == 3 && arguments[0] == "--seeds") {
    WriteSeeds(arguments[1], arguments[2]);
  } else if (count >= 3 && arguments[0] == "--run") {
    for (std::size_t i = 2; i < count; ++i) {
      std::cout << arguments[i] << std::endl;
      Run(arguments[1], ReadBytes(arguments[i]));
    }
  } else if (count == 1 && fs::is_directory(arguments[0])) {
    Replay(fs::path(arguments[0]) / Program());
  } else {
    std::cerr << "usage: " << Program()
              << "_replay CORPUS | --run TARGET FILE... | --targets | --seeds TARGET DIR\n";
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace gradwire::fuzz

int main(int argc, char** argv) { return gradwire::fuzz::Main({argv + 1, argv + argc}); }
