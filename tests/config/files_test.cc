#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/config/config.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

/// A function, since g++ 12 warns of uninitialized members in `Config{}`, which it inlines badly.
Config DefaultConfig() {
  Config config;
  return config;
}

std::string PathOf(const std::string& name) {
  return std::string(GRADWIRE_SOURCE_DIR) + "/" + name;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file.is_open());
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Config Loaded(const std::string& name) {
  auto config = LoadConfig(PathOf("configs/" + name));
  CAPTURE(name);
  INFO(config.status().ToString());
  REQUIRE(config.ok());
  return *config;
}

/// The lines of a YAML file that set a key, as paths: "partition.credit".
std::vector<std::string> PathsIn(const std::string& text) {
  std::vector<std::string> paths;
  std::vector<std::pair<std::size_t, std::string>> open;  // indentation and path
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t indent = line.find_first_not_of(' ');
    if (indent == std::string::npos || line[indent] == '#') continue;
    const std::size_t colon = line.find(':', indent);
    REQUIRE(colon != std::string::npos);
    while (!open.empty() && open.back().first >= indent) open.pop_back();
    const std::string name = line.substr(indent, colon - indent);
    const std::string path = open.empty() ? name : open.back().second + "." + name;
    open.emplace_back(indent, path);
    if (line.find_first_not_of(' ', colon + 1) != std::string::npos) paths.push_back(path);
  }
  return paths;
}

TEST_CASE("the reference has every key and is the default configuration", "[config][unit]") {
  CHECK(Loaded("reference.yaml") == DefaultConfig());
  std::vector<std::string> expected;
  for (const auto& entry : DescribeConfig(DefaultConfig())) expected.push_back(entry.first);
  CHECK(PathsIn(ReadFile(PathOf("configs/reference.yaml"))) == expected);
}

TEST_CASE("the documentation has every key", "[config][unit]") {
  const std::string text = ReadFile(PathOf("docs/configuration.md"));
  for (const auto& [path, value] : DescribeConfig(DefaultConfig())) {
    CAPTURE(path);
    CHECK(text.find("| `" + path + "` |") != std::string::npos);
  }
}

TEST_CASE("the ready files say what their names say", "[config][unit]") {
  const Config quickstart = Loaded("quickstart.yaml");
  CHECK(quickstart.job.workers == 2);
  CHECK(quickstart.job.servers == 1);
  CHECK(ToString(quickstart.compression.uplink.compressor) == "onebit");
  CHECK(ToString(quickstart.compression.downlink.compressor) == "onebit");

  const Config plain = Loaded("plain.yaml");
  CHECK(ToString(plain.compression.uplink.compressor) == "none");
  CHECK(ToString(plain.compression.downlink.compressor) == "none");

  const Config onebit = Loaded("onebit.yaml");
  CHECK(onebit.compression.uplink.compressor.name == "onebit");
  CHECK(onebit.compression.downlink.compressor.name == "onebit");
  CHECK(onebit.compression.uplink.feedback == FeedbackMode::kEf);
  CHECK(onebit.compression.rules.size() == 1);

  const Config topk = Loaded("topk.yaml");
  CHECK(ToString(topk.compression.uplink.compressor) == "topk(ratio=0.01)");
  CHECK(ToString(topk.compression.downlink.compressor) == "topk(ratio=0.01)");
  CHECK(topk.compression.warmup_steps == 100);

  const Config sgd = Loaded("sgd.yaml");
  CHECK(sgd.compression.uplink == onebit.compression.uplink);
  CHECK(sgd.compression.downlink == onebit.compression.downlink);
  CHECK(sgd.compression.rules == onebit.compression.rules);

  for (const char* name : {"sgd_momentum.yaml", "adam.yaml"}) {
    const Config rounded = Loaded(name);
    CHECK(ToString(rounded.compression.uplink.compressor) == "bf16");
    CHECK(rounded.compression.uplink.feedback == FeedbackMode::kEf);
    CHECK(rounded.compression.downlink == rounded.compression.uplink);
  }
}

TEST_CASE("a file that cannot be read is refused by name", "[config][unit]") {
  const auto missing = LoadConfig("/nonexistent/job.yaml");
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.status().message() ==
        "cannot read configuration '/nonexistent/job.yaml': No such file or directory");
  const auto directory = LoadConfig("/");
  REQUIRE_FALSE(directory.ok());
  CHECK(directory.status().message() == "cannot read configuration '/': Is a directory");
}

TEST_CASE("a damaged file never crashes, it loads or is refused with its name", "[config][fuzz]") {
  const std::string original =
      ReadFile(PathOf("configs/reference.yaml")) + "extra: {a: [b, *c], ? d : &e f}\n";
  CounterRng random(20240611);
  int refused = 0;
  constexpr int kTrials = 500;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::string text = original;
    for (std::uint64_t change = 0; change < 1 + random.NextBelow(8); ++change) {
      const std::size_t at = random.NextBelow(text.size());
      switch (random.NextBelow(3)) {
        case 0:
          text[at] = static_cast<char>(random.NextBelow(256));
          break;
        case 1:
          text.erase(at, random.NextBelow(40));
          break;
        default:
          text.insert(at, 1, "{}[]:&*!|>'\"%@`,#-?\n\t "[random.NextBelow(23)]);
      }
    }
    const auto config = ParseConfig(text, "job.yaml");
    if (config.ok()) continue;
    ++refused;
    CAPTURE(trial, config.status().message());
    CHECK(config.status().message().find("job.yaml") == 0);
  }
  CHECK(refused > kTrials / 2);
}

}  // namespace
}  // namespace gradwire
