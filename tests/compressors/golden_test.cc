#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "common/base/bytes.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace gradwire::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> ReadBytes(const fs::path& path) {
  INFO(path.string());
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file.good());
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const ByteView bytes = AsBytes(text);
  return {bytes.begin(), bytes.end()};
}

std::vector<float> ReadFloats(const fs::path& path) {
  const std::vector<std::byte> bytes = ReadBytes(path);
  REQUIRE(bytes.size() % sizeof(float) == 0);
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

struct GoldenCase {
  fs::path base;  // without extension
  std::string spec;
  std::size_t n = 0;
  std::string kind;        // encode, refuse, feedback
  std::size_t rounds = 0;  // feedback
  std::uint64_t seed = 0;
  std::uint64_t shared = 0;
  bool same_choice = false;

  std::string codec() const { return base.parent_path().filename().string(); }
  /// Of a round of a feedback case, counted from 0; encode cases are round 0.
  CodecContext Context(std::uint64_t round) const {
    return {.stream_seed = seed + round,
            .alpha = 1.0F,
            .shared_seed = shared + round,
            .of_same_choice = same_choice};
  }
  fs::path File(const char* extension) const { return fs::path(base).concat(extension); }
};

GoldenCase ReadCase(const fs::path& spec_file) {
  GoldenCase golden;
  golden.base = fs::path(spec_file).replace_extension();
  std::ifstream file(spec_file);
  std::string n;
  std::string what;
  REQUIRE(std::getline(file, golden.spec));
  REQUIRE(std::getline(file, n));
  REQUIRE(std::getline(file, what));
  golden.n = std::stoull(n);
  std::istringstream words(what);
  words >> golden.kind;
  for (std::string word; words >> word;) {
    CAPTURE(word);
    const std::size_t equals = word.find('=');
    REQUIRE(equals != std::string::npos);
    const std::string name = word.substr(0, equals);
    const std::uint64_t value = std::stoull(word.substr(equals + 1));
    if (name == "rounds") {
      golden.rounds = value;
    } else if (name == "seed") {
      golden.seed = value;
    } else if (name == "shared") {
      golden.shared = value;
    } else if (name == "same_choice") {
      golden.same_choice = value == 1;
    } else {
      FAIL("unknown word");
    }
  }
  REQUIRE((golden.kind == "feedback") == (golden.rounds > 0));
  return golden;
}

std::vector<GoldenCase> ReadCases() {
  const fs::path folder = fs::path(GRADWIRE_SOURCE_DIR) / "tests/golden/compressors";
  std::vector<GoldenCase> cases;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() == ".spec") cases.push_back(ReadCase(entry.path()));
  }
  std::sort(cases.begin(), cases.end(),
            [](const GoldenCase& a, const GoldenCase& b) { return a.base < b.base; });
  return cases;
}

/// Decode, and decode-add onto ones, of a payload that must be valid.
std::vector<float> DecodeGolden(const Compressor& codec, ByteView payload, std::size_t n,
                                const CodecContext& context) {
  std::vector<float> output(n, 12345.0F);
  const Status status = codec.Decode(payload, context, output);
  INFO(status.ToString());
  REQUIRE(status.ok());
  std::vector<float> sum(n, 1.0F);
  REQUIRE(codec.DecodeAdd(payload, context, sum).ok());
  std::vector<float> expected(n, 1.0F);
  for (std::size_t i = 0; i < n; ++i) expected[i] += output[i];
  CHECK(Bits(sum) == Bits(expected));
  return output;
}

void CheckEncode(const GoldenCase& golden) {
  const auto codec = Make(golden.spec);
  const std::vector<float> input = ReadFloats(golden.File(".in"));
  const std::vector<std::byte> payload = ReadBytes(golden.File(".bin"));
  REQUIRE(input.size() == golden.n);
  const CodecContext context = golden.Context(0);
  const Coded coded = Encode(*codec, input, nullptr, context);
  CHECK(coded.finite);
  CHECK(coded.payload == payload);
  CHECK(Bits(DecodeGolden(*codec, payload, golden.n, context)) ==
        Bits(ReadFloats(golden.File(".out"))));
}

void CheckFeedback(const GoldenCase& golden) {
  const auto codec = Make(golden.spec);
  const std::size_t n = golden.n;
  const std::vector<float> input = ReadFloats(golden.File(".in"));
  const std::vector<float> output = ReadFloats(golden.File(".out"));
  const std::vector<std::byte> payloads = ReadBytes(golden.File(".bin"));
  REQUIRE(input.size() == golden.rounds * n);
  REQUIRE(output.size() == golden.rounds * n);
  std::vector<float> values(n, 0.0F);
  Residual residual{values, {}};
  std::size_t at = 0;
  for (std::size_t round = 0; round < golden.rounds; ++round) {
    CAPTURE(round);
    REQUIRE(payloads.size() >= at + sizeof(std::uint32_t));
    const std::size_t size = LoadLe<std::uint32_t>(payloads.data() + at);
    at += sizeof(std::uint32_t);
    REQUIRE(payloads.size() >= at + size);
    const auto begin = payloads.begin() + static_cast<std::ptrdiff_t>(at);
    const std::vector<std::byte> payload(begin, begin + static_cast<std::ptrdiff_t>(size));
    at += size;
    const CodecContext context = golden.Context(round);
    const Coded coded = Encode(*codec, std::span(input).subspan(round * n, n), &residual, context);
    CHECK(coded.finite);
    CHECK(coded.payload == payload);
    CHECK(Bits(DecodeGolden(*codec, payload, n, context)) ==
          Bits(std::span(output).subspan(round * n, n)));
  }
  CHECK(at == payloads.size());
  CHECK(Bits(Explicit(*codec, residual)) == Bits(ReadFloats(golden.File(".residual"))));
}

void CheckRefuse(const GoldenCase& golden) {
  const auto codec = Make(golden.spec);
  const std::vector<std::byte> payload = ReadBytes(golden.File(".bin"));
  std::vector<float> output(golden.n);
  CHECK(codec->Validate(payload, golden.n).code() == StatusCode::kCorruptData);
  CHECK(codec->Decode(payload, {}, output).code() == StatusCode::kCorruptData);
  CHECK(codec->DecodeAdd(payload, {}, output).code() == StatusCode::kCorruptData);
}

void Check(const GoldenCase& golden) {
  if (golden.kind == "encode") {
    CheckEncode(golden);
  } else if (golden.kind == "feedback") {
    CheckFeedback(golden);
  } else if (golden.kind == "refuse") {
    CheckRefuse(golden);
  } else {
    FAIL("unknown kind " << golden.kind);
  }
}

TEST_CASE("golden files: codecs make and read the bytes of the reference implementation",
          "[compressors][golden]") {
  const std::vector<GoldenCase> cases = ReadCases();
  REQUIRE_FALSE(cases.empty());
  std::map<std::string, std::set<std::string>> kinds;
  for (const GoldenCase& golden : cases) {
    CAPTURE(golden.base.string(), golden.spec, golden.n);
    // A folder of a compressor that is not there would be read by nobody.
    REQUIRE(BuiltinCompressors().Find(golden.codec()) != nullptr);
    REQUIRE(golden.spec.substr(0, golden.spec.find('(')) == golden.codec());
    kinds[golden.codec()].insert(golden.kind);
    for (const std::int64_t target : kernels::AvailableTargets()) {
      CAPTURE(kernels::TargetName(target));
      kernels::UseTarget(target);
      Check(golden);
      kernels::UseTarget(0);
    }
  }
  for (const CompressorInfo& info : BuiltinCompressors().entries()) {
    CAPTURE(info.name);
    CHECK(kinds[info.name].count("encode") == 1);
    CHECK(kinds[info.name].count("refuse") == 1);
  }
}

}  // namespace
}  // namespace gradwire::testing
