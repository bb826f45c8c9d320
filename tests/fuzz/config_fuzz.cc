#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "common/base/byte_io.h"
#include "common/config/config.h"
#include "compressors/feedback/residual_store.h"
#include "compressors/registry.h"
#include "tests/fuzz/fuzz_target.h"

// What comes from files and people: a configuration (`config`; the first letter says what it is:
// `f` a file, `a` an assignment of the command line, `s` a compressor's written form) and saved
// residuals
// (`residuals`, without their checksum).

namespace gradwire::fuzz {
namespace {

namespace fs = std::filesystem;

using Bytes = std::vector<std::byte>;

void CheckRefused(const Status& status, StatusCode expected) {
  if (status.code() == expected && !status.message().empty()) return;
  Fail(fmt::format("refused with '{}', expected {} and a reason", status.ToString(),
                   StatusCodeName(expected)));
}

// ---- Configuration -----------------------------------------------------------------------------

/// Every value has a written form, and all of those together mean the same configuration.
void CheckConfig(const Config& config) {
  if (SharedConfig(config).empty()) Fail("a configuration has nothing to share");
  if (DescribeSources(config, {}).empty()) Fail("a configuration is described by nothing");
  std::vector<std::string> assignments;
  for (const auto& [path, value] : DescribeConfig(config))
    assignments.push_back(path + "=" + value);
  Config again;
  const Status status = ApplyAssignments(assignments, again);
  if (!status.ok()) Fail("a configuration's written form is refused: " + status.ToString());
  if (!(again == config)) Fail("a configuration's written form means another one");
}

void RunFile(const std::string& text) {
  Sources sources;
  const Result<Config> config = ParseConfig(text, "job.yaml", &sources);
  if (!config.ok()) return CheckRefused(config.status(), StatusCode::kInvalidArgument);
  CheckConfig(*config);
  const Result<Config> again = ParseConfig(text, "job.yaml");
  if (!again.ok() || !(*again == *config)) Fail("the same text gives another configuration");
}

void RunAssignment(const std::string& text) {
  Config config;
  const Status status = ApplyAssignment(text, config);
  if (status.ok()) return CheckConfig(config);
  CheckRefused(status, StatusCode::kInvalidArgument);
  const Config untouched;
  if (!(config == untouched)) Fail("a refused assignment has changed the configuration");
}

void RunSpec(const std::string& text) {
  const Result<CompressorSpec> spec = ParseCompressorSpec(text);
  if (!spec.ok()) return CheckRefused(spec.status(), StatusCode::kInvalidArgument);
  const Result<CompressorSpec> again = ParseCompressorSpec(ToString(*spec));
  if (!again.ok() || !(*again == *spec)) Fail("a compressor's written form means another one");
  const auto codec = BuiltinCompressors().Create(*spec);
  if (codec.ok()) {
    if ((*codec)->name() != spec->name) Fail("another compressor was made");
    if ((*codec)->MaxEncodedSize(0) != 0) Fail("the payload of no elements is not empty");
    return;
  }
  const bool unknown = BuiltinCompressors().Find(spec->name) == nullptr;
  CheckRefused(codec.status(), unknown ? StatusCode::kNotFound : StatusCode::kInvalidArgument);
}

void RunConfig(ByteView input) {
  if (input.empty()) return;
  const std::string text(AsText(input.subspan(1)));
  switch (std::to_integer<char>(input[0])) {
    case 'f':
      return RunFile(text);
    case 'a':
      return RunAssignment(text);
    case 's':
      return RunSpec(text);
    default:
      return;
  }
}

// ---- Residuals ---------------------------------------------------------------------------------

Bytes WithChecksum(ByteView body) {
  Bytes saved(body.begin(), body.end());
  AppendLe(saved, Checksum(body));
  return saved;
}

void RunResiduals(ByteView body) {
  const Bytes damaged(body.begin(), body.end());
  const Status without = ResidualStore::Check(damaged);
  if (!without.ok()) CheckRefused(without, StatusCode::kCorruptData);

  const Bytes saved = WithChecksum(body);
  const Status checked = ResidualStore::Check(saved);
  ResidualStore store;
  const Status restored = store.Restore(saved);
  if (restored.ok() != checked.ok()) Fail("Restore and Check are not of one mind");
  const std::vector<TensorRange> ranges = {{"a", 2, 5}, {"b", 0, 3}, {"a", 9, 1}};
  const auto selected = ResidualStore::Select({saved}, ranges);
  if (selected.ok() != checked.ok()) Fail("Select and Check are not of one mind");
  if (!checked.ok()) return CheckRefused(checked, StatusCode::kCorruptData);

  // Saved again and restored, nothing changes any more: overlapping pieces are cut the first time.
  const Result<Bytes> again = store.Save();
  if (!again.ok()) Fail("what was restored is not saved: " + again.status().ToString());
  ResidualStore other;
  if (!other.Restore(*again).ok()) Fail("what was saved is refused");
  const Result<Bytes> same = other.Save();
  if (!same.ok() || *same != *again) Fail("what was saved and restored is saved as something else");

  // A unit takes its part over; both ways lead to the same values.
  const auto codec = BuiltinCompressors().Create("onebit");
  if (!codec.ok()) Fail(codec.status().ToString());
  const Result<Residual*> residual = store.Get(1, ranges, **codec);
  if (!residual.ok()) Fail("a unit's residual is refused: " + residual.status().ToString());
  for (const float value : (*residual)->values) {
    if (!std::isfinite(value)) Fail("a restored residual is not finite");
  }
  ResidualStore third;
  if (!selected->empty() && !third.RestoreUnit(1, ranges, **codec, *selected).ok()) {
    Fail("what was selected is refused");
  }
  if (store.UnclaimedTensors().size() > other.UnclaimedTensors().size()) {
    Fail("a tensor is unclaimed that was not there");
  }
}

// ---- Seeds -------------------------------------------------------------------------------------

std::vector<Bytes> ConfigSeeds() {
  std::vector<std::string> texts = {
      "f", "apartition.credit=4MiB", "acompression.uplink.compressor=topk",
      "acompression.rules=[{match: \"*.bias\", compressor: none}]", "alog.level=debug",
      "atimeouts.stall_stop=2m", "snone", "stopk(index=u32,ratio=0.01)", "sonebit(block=4096)",
      // Documents that are not one map, anchors, tags, deep nesting.
      "fjob: {id: a, workers: 2}\n", "f- 1\n- 2\n", "fjob: &x {id: a}\nserver: *x\n", "f!!str a",
      "f---\njob: {}\n---\njob: {}\n", "f[" + std::string(600, '['), "f{" + std::string(600, '{'),
      "fcompression: {uplink: {compressor: topk, ratio: 0.01, k: 3}}\n"};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(fs::path(GRADWIRE_SOURCE_DIR) / "configs")) {
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    std::string& text = texts.emplace_back("f");
    text.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::vector<Bytes> seeds;
  for (const std::string& text : texts) {
    const ByteView bytes = AsBytes(text);
    seeds.emplace_back(bytes.begin(), bytes.end());
  }
  return seeds;
}

std::vector<Bytes> ResidualSeeds() {
  std::vector<Bytes> seeds;
  const auto codec = BuiltinCompressors().Create("none");
  if (!codec.ok()) Fail(codec.status().ToString());
  const std::vector<std::vector<TensorRange>> units = {
      {}, {{"a", 0, 12}}, {{"a", 0, 4}, {"b", 1, 3}}, {{"weight", 4096, 100}}};
  for (const std::vector<TensorRange>& ranges : units) {
    ResidualStore store;
    const Result<Residual*> residual = store.Get(0, ranges, **codec);
    if (!residual.ok()) Fail(residual.status().ToString());
    float next = 1;
    for (float& value : (*residual)->values) value = next++;
    (*residual)->scale = {0.5, 1024};
    const Result<Bytes> saved = store.Save();
    if (!saved.ok()) Fail(saved.status().ToString());
    seeds.emplace_back(saved->begin(), saved->end() - sizeof(std::uint64_t));
  }
  return seeds;
}

}  // namespace

std::string_view Program() { return "config"; }

std::vector<std::string> Targets() { return {"config", "residuals"}; }

std::vector<Bytes> Seeds(const std::string& target) {
  return target == "config" ? ConfigSeeds() : ResidualSeeds();
}

void Run(const std::string& target, ByteView input) {
  if (target == "config") {
    RunConfig(input);
  } else {
    RunResiduals(input);
  }
}

std::size_t Mutate(const std::string&, MutableBytes buffer, std::size_t size, std::uint64_t,
                   ByteMutator mutate_bytes) {
  return mutate_bytes(reinterpret_cast<std::uint8_t*>(buffer.data()), size, buffer.size());
}

}  // namespace gradwire::fuzz
