#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "common/base/random.h"
#include "compressors/registry.h"
#include "tests/fuzz/fuzz_target.h"

// One target for each compressor that the registry knows. An input says by itself what it is for:
//   topk(k=5)\n20\ndecode\n<payload>         refused by all decoders, or read by all alike
//   topk(k=5)\n20\nencode\n<f32[n], f32[n]>  gradient and residual; what is missing is 0
// The first three lines are those of a golden file's .spec.

namespace gradwire::fuzz {
namespace {

namespace fs = std::filesystem;

using Bytes = std::vector<std::byte>;

/// Beyond one block of codecs and of the sums.
constexpr std::size_t kMaxElements = 5000;

/// Those that send values as they are, NaN and infinity too; a decoder of any other compressor
/// gives finite values or refuses.
constexpr std::array<std::string_view, 6> kCarryValues = {"none", "fp16",      "bf16",
                                                          "topk", "threshold", "randomk"};

bool CarriesValues(std::string_view name) {
  return std::find(kCarryValues.begin(), kCarryValues.end(), name) != kCarryValues.end();
}

// ---- Inputs ------------------------------------------------------------------------------------

struct Input {
  std::string spec;
  std::size_t n = 0;
  bool encode = false;
  ByteView bytes;
};

std::optional<std::string_view> TakeLine(ByteView& bytes) {
  const std::string_view text = AsText(bytes);
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  bytes = bytes.subspan(end + 1);
  return text.substr(0, end);
}

/// Nothing if it is no input for the compressor of this name.
std::optional<Input> ParseInput(const std::string& name, ByteView bytes) {
  const auto spec = TakeLine(bytes);
  const auto n = TakeLine(bytes);
  const auto what = TakeLine(bytes);
  if (!what || (*what != "decode" && *what != "encode")) return std::nullopt;
  Input input{std::string(*spec), 0, *what == "encode", bytes};
  const auto [end, error] = std::from_chars(n->data(), n->data() + n->size(), input.n);
  if (error != std::errc() || end != n->data() + n->size() || input.n > kMaxElements) {
    return std::nullopt;
  }
  const bool is_name = input.spec == name || input.spec.rfind(name + "(", 0) == 0;
  return is_name ? std::optional(input) : std::nullopt;
}

Bytes WriteInput(const Input& input) {
  const std::string head =
      fmt::format("{}\n{}\n{}\n", input.spec, input.n, input.encode ? "encode" : "decode");
  const ByteView view = AsBytes(head);
  Bytes bytes(view.begin(), view.end());
  bytes.insert(bytes.end(), input.bytes.begin(), input.bytes.end());
  return bytes;
}

// ---- Rules -------------------------------------------------------------------------------------

CodecContext ContextOf(std::size_t n) {
  CodecContext context;
  context.stream_seed = Mix64(n);
  context.shared_seed = Mix64(n + 1);
  context.alpha = n % 3 == 0 ? 0.5F : 1.0F;
  return context;
}

/// The same bits, or both NaN.
bool Same(float a, float b) {
  return std::memcmp(&a, &b, sizeof(float)) == 0 || (std::isnan(a) && std::isnan(b));
}

/// Bytes that end where their memory ends, at addresses of all alignments.
class ExactBuffer {
 public:
  ExactBuffer(std::size_t size, std::size_t shift)
      : storage_(new std::byte[size + shift]), bytes_(storage_.get() + shift, size) {}
  MutableBytes bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> storage_;
  MutableBytes bytes_;
};

void CheckDecode(const Compressor& codec, const Input& input) {
  const std::size_t n = input.n;
  const ExactBuffer copy(input.bytes.size(), n % 4);
  std::copy(input.bytes.begin(), input.bytes.end(), copy.bytes().begin());
  const ByteView payload = copy.bytes();
  const CodecContext context = ContextOf(n);
  std::vector<float> decoded(n, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> from_zero(n, 0.0F);
  const Status validated = codec.Validate(payload, n);
  const Status decode = codec.Decode(payload, context, decoded);
  const Status add = codec.DecodeAdd(payload, context, from_zero);
  for (const Status& status : {validated, decode, add}) {
    if (status.ok() != validated.ok()) {
      Fail(fmt::format("Validate says {}, Decode {}, DecodeAdd {}", validated.ToString(),
                       decode.ToString(), add.ToString()));
    }
    if (!status.ok() && (status.code() != StatusCode::kCorruptData || status.message().empty())) {
      Fail(fmt::format("a payload is refused with '{}', expected CorruptData and a reason",
                       status.ToString()));
    }
  }
  if (!validated.ok()) return;
  if (payload.size() > codec.MaxEncodedSize(n)) {
    Fail(fmt::format("{} bytes are a payload, but at most {} are ever written", payload.size(),
                     codec.MaxEncodedSize(n)));
  }

  std::vector<float> sum(n);
  for (std::size_t i = 0; i < n; ++i) sum[i] = static_cast<float>(i % 7) - 3;
  std::vector<float> by_blocks = sum;
  std::vector<float> expected = sum;
  for (std::size_t i = 0; i < n; ++i) {
    if (!CarriesValues(codec.name()) && !std::isfinite(decoded[i])) {
      Fail(fmt::format("element {} decodes to {}", i, decoded[i]));
    }
    if (!Same(from_zero[i], 0.0F + decoded[i])) {
      Fail(fmt::format("element {} decodes to {}, added to 0 it is {}", i, decoded[i],
                       from_zero[i]));
    }
    expected[i] += decoded[i];
  }
  if (!codec.DecodeAdd(payload, context, sum).ok()) Fail("DecodeAdd refuses what it has read");
  if (codec.traits().block_access) {
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      codec.DecodeAddRange(payload, n, context, offset,
                           std::span(by_blocks).subspan(offset, count));
    });
  } else {
    by_blocks = expected;
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (!Same(sum[i], expected[i]) || !Same(by_blocks[i], expected[i])) {
      Fail(fmt::format("element {} is {} added at once and {} added by blocks, expected {}", i,
                       sum[i], by_blocks[i], expected[i]));
    }
  }
}

/// Values [from, from + n) of the bytes, 0 beyond their end.
std::vector<float> FloatsOf(ByteView bytes, std::size_t from, std::size_t n) {
  std::vector<float> values(n, 0.0F);
  const std::size_t begin = std::min(from * sizeof(float), bytes.size());
  const std::size_t count = std::min(n, (bytes.size() - begin) / sizeof(float));
  if (count > 0) std::memcpy(values.data(), bytes.data() + begin, count * sizeof(float));
  return values;
}

struct Outcome {
  Bytes payload;
  bool finite = true;
  std::vector<float> decoded;  // if finite
};

/// Encodes q with whatever residual, and decodes what that gives.
Outcome RoundTrip(const Compressor& codec, std::span<const float> input, std::span<const float> q,
                  Residual* residual) {
  const std::size_t n = input.size();
  const CodecContext context = ContextOf(n);
  const std::size_t most = codec.MaxEncodedSize(n);
  const ExactBuffer output(most, n % 4);
  SpanSource source(input);
  const Result<Encoded> encoded = codec.Encode(source, n, context, residual, output.bytes());
  if (!encoded.ok()) Fail("Encode fails: " + encoded.status().ToString());
  Outcome outcome;
  outcome.finite = std::all_of(q.begin(), q.end(), [](float v) { return std::isfinite(v); });
  if (encoded->finite != outcome.finite) {
    Fail(fmt::format("Encode says finite = {}, expected {}", encoded->finite, outcome.finite));
  }
  if (!outcome.finite) return outcome;
  if (encoded->payload_bytes > most ||
      (codec.traits().fixed_size && encoded->payload_bytes != most)) {
    Fail(fmt::format("a payload has {} bytes of {}", encoded->payload_bytes, most));
  }
  const ByteView payload = output.bytes().first(encoded->payload_bytes);
  outcome.payload.assign(payload.begin(), payload.end());
  const Status valid = codec.Validate(outcome.payload, n);
  if (!valid.ok()) Fail("a payload of ours is refused: " + valid.ToString());
  outcome.decoded.resize(n);
  if (!codec.Decode(outcome.payload, context, outcome.decoded).ok()) Fail("it is not decoded");
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isfinite(outcome.decoded[i])) {
      Fail(fmt::format("element {} is {} and decodes to {}", i, q[i], outcome.decoded[i]));
    }
  }
  return outcome;
}

/// Nothing was delivered: the residual is q, or what it was where q is not finite.
void CheckVoid(const Residual& residual, std::span<const float> q, std::span<const float> before) {
  if (!residual.is_explicit()) Fail("after a void pass the residual is not explicit");
  double square = 0;
  for (const float value : q) {
    if (std::isfinite(value)) square += static_cast<double>(value) * static_cast<double>(value);
  }
  for (std::size_t i = 0; i < q.size(); ++i) {
    const float got = residual.values[i];
    if (!std::isfinite(q[i])) {
      if (got != before[i]) {
        Fail(fmt::format("after a void pass residual {} is {}, it was {}", i, got, before[i]));
      }
      continue;
    }
    // Some take q - C(q) and give C(q) back, which is no larger than all of q.
    const double error = std::fabs(static_cast<double>(got) - static_cast<double>(q[i]));
    if (!(error <= 0x1.0p-22 * std::sqrt(square))) {
      Fail(fmt::format("after a void pass residual {} is {}, expected {}", i, got, q[i]));
    }
  }
}

void CheckEncode(const Compressor& codec, const Input& input) {
  const std::size_t n = input.n;
  const std::vector<float> gradient = FloatsOf(input.bytes, 0, n);
  std::vector<float> before = FloatsOf(input.bytes, n, n);
  for (float& value : before) value = std::isfinite(value) ? value : 0.0F;
  RoundTrip(codec, gradient, gradient, nullptr);

  const CodecContext context = ContextOf(n);
  std::vector<float> q(n);
  for (std::size_t i = 0; i < n; ++i) q[i] = gradient[i] + context.alpha * before[i];
  std::vector<float> values = before;
  Residual residual;
  residual.values = values;
  const Outcome outcome = RoundTrip(codec, gradient, q, &residual);
  if (!outcome.finite) {
    return CheckVoid(residual, q, before);
  }

  std::vector<float> undone_values = values;
  Residual undone = residual;
  undone.values = undone_values;
  codec.Flush(residual);
  codec.Undo(outcome.payload, context, undone);
  codec.Flush(undone);
  if (!residual.is_explicit() || !undone.is_explicit()) Fail("a residual is not explicit");
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isfinite(values[i])) {
      Fail(fmt::format("residual {} is {}: q {}, decoded {}", i, values[i], q[i],
                       outcome.decoded[i]));
    }
    // q - C(q) is rounded once, e + C(q) again.
    const double want = q[i];
    const double sent = outcome.decoded[i];
    const double room = 0x1.0p-23 * (std::fabs(want) + std::fabs(sent));
    if (std::fabs(sent + static_cast<double>(values[i]) - want) > room) {
      Fail(fmt::format("element {} of {} decodes to {} and leaves {}", i, q[i], outcome.decoded[i],
                       values[i]));
    }
    // Half a unit beyond the largest float is infinity.
    if (std::fabs(want) < 1e38 &&
        std::fabs(static_cast<double>(undone_values[i]) - want) > 2 * room) {
      Fail(fmt::format("element {} of {} is {} after Undo", i, q[i], undone_values[i]));
    }
  }
}

// ---- Making inputs -----------------------------------------------------------------------------

std::string RandomNumber(const ParameterInfo& parameter, CounterRng& rng) {
  double value = 0;
  if (rng.NextBelow(4) == 0) {
    value = rng.NextBelow(2) == 0 ? parameter.min : parameter.max;
  } else if (rng.NextBelow(2) == 0) {
    value = static_cast<double>(std::uint64_t{1} << rng.NextBelow(16));  // 1 to 32768
  } else {
    value = std::ldexp(rng.NextUniform(), static_cast<int>(rng.NextBelow(14)));
  }
  value = std::clamp(value, parameter.min, parameter.max);
  if (parameter.kind == ParameterInfo::Kind::kInteger) return fmt::format("{:.0f}", value);
  return fmt::format("{}", value);
}

/// A spec with some parameters set. The registry may refuse it: parameters may exclude each other.
std::string RandomSpec(const CompressorInfo& info, CounterRng& rng) {
  CompressorSpec spec{info.name, {}};
  for (const ParameterInfo& parameter : info.parameters) {
    if (rng.NextBelow(2) == 0) continue;
    std::string& value = spec.parameters[parameter.name];
    switch (parameter.kind) {
      case ParameterInfo::Kind::kChoice:
        value = parameter.choices[rng.NextBelow(parameter.choices.size())];
        break;
      case ParameterInfo::Kind::kBool:
        value = rng.NextBelow(2) == 0 ? "true" : "false";
        break;
      case ParameterInfo::Kind::kNumber:
      case ParameterInfo::Kind::kInteger:
        value = RandomNumber(parameter, rng);
        break;
    }
  }
  return ToString(spec);
}

std::size_t RandomSize(CounterRng& rng) {
  constexpr std::array<std::size_t, 14> kSizes = {0,   1,   2,   5,    8,    9,    64,
                                                  127, 128, 129, 1000, 4096, 4097, kMaxElements};
  if (rng.NextBelow(2) == 0) return kSizes[rng.NextBelow(kSizes.size())];
  return static_cast<std::size_t>(rng.NextBelow(300));
}

std::vector<float> RandomFloats(std::size_t n, CounterRng& rng) {
  std::vector<float> values(n);
  const auto spread = 1 + rng.NextBelow(60);
  for (float& value : values) {
    if (rng.NextBelow(8) == 0) continue;
    const auto order = static_cast<int>(rng.NextBelow(spread));
    value = static_cast<float>(std::ldexp(rng.NextUniform() - 0.5, -order));
  }
  return values;
}

/// An input of a header that the registry takes and bytes that fit it.
Bytes RandomInput(const std::string& name, CounterRng& rng) {
  const CompressorInfo& info = *BuiltinCompressors().Find(name);
  Input input;
  input.spec = RandomSpec(info, rng);
  Result<std::unique_ptr<const Compressor>> codec = BuiltinCompressors().Create(input.spec);
  if (!codec.ok()) {
    input.spec = name;
    codec = BuiltinCompressors().Create(name);
    if (!codec.ok()) Fail(name + " with its defaults is refused: " + codec.status().ToString());
  }
  input.n = RandomSize(rng);
  input.encode = rng.NextBelow(4) == 0;
  std::vector<float> values = RandomFloats(input.encode ? 2 * input.n : input.n, rng);
  if (input.encode) {
    input.bytes = AsBytes(std::span<const float>(values));
    return WriteInput(input);
  }
  Bytes payload((*codec)->MaxEncodedSize(input.n));
  const Result<Encoded> encoded = EncodeSpan(**codec, values, ContextOf(input.n), payload);
  if (!encoded.ok()) Fail("Encode fails: " + encoded.status().ToString());
  input.bytes = ByteView(payload).first(encoded->payload_bytes);
  return WriteInput(input);
}

Bytes ReadBytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.good()) Fail("cannot read " + path.string());
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const ByteView bytes = AsBytes(text);
  return {bytes.begin(), bytes.end()};
}

/// The compressor's golden files as inputs: payloads, what they were made of, and what is refused.
std::vector<Bytes> GoldenInputs(const std::string& name) {
  const fs::path folder = fs::path(GRADWIRE_SOURCE_DIR) / "tests/golden/compressors" / name;
  std::vector<fs::path> specs;
  if (fs::is_directory(folder)) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".spec") specs.push_back(entry.path());
    }
  }
  std::sort(specs.begin(), specs.end());
  std::vector<Bytes> inputs;
  for (const fs::path& path : specs) {
    const Bytes text = ReadBytes(path);
    ByteView lines = text;
    Input input;
    const auto spec = TakeLine(lines);
    const auto n = TakeLine(lines);
    if (!n) Fail(path.string() + " is not a golden file's .spec");
    input.spec = *spec;
    input.n = std::stoull(std::string(*n));
    if (input.n > kMaxElements) continue;
    const bool feedback = AsText(lines).rfind("feedback", 0) == 0;
    for (const std::string extension : {".bin", ".in"}) {
      const fs::path data = fs::path(path).replace_extension(extension);
      if (!fs::exists(data) || (feedback && extension == ".bin")) continue;
      const Bytes bytes = ReadBytes(data);
      input.bytes = bytes;
      input.encode = extension == ".in";
      inputs.push_back(WriteInput(input));
    }
  }
  return inputs;
}

}  // namespace

std::string_view Program() { return "decoder"; }

std::vector<std::string> Targets() {
  std::vector<std::string> names;
  for (const CompressorInfo& info : BuiltinCompressors().entries()) names.push_back(info.name);
  return names;
}

std::vector<Bytes> Seeds(const std::string& target) {
  std::vector<Bytes> seeds = GoldenInputs(target);
  CounterRng rng(HashText(target));
  constexpr int kRandomSeeds = 60;
  for (int i = 0; i < kRandomSeeds; ++i) seeds.push_back(RandomInput(target, rng));
  return seeds;
}

void Run(const std::string& target, ByteView bytes) {
  const std::optional<Input> input = ParseInput(target, bytes);
  if (!input) return;
  const auto codec = BuiltinCompressors().Create(input->spec);
  if (!codec.ok()) {
    if (codec.status().message().empty()) Fail("a spec is refused without a reason");
    return;
  }
  if (input->encode) {
    CheckEncode(**codec, *input);
  } else {
    CheckDecode(**codec, *input);
  }
}

/// Leaves the header alone mostly, and often the size: most codecs look no further where it is
/// wrong.
std::size_t Mutate(const std::string& target, MutableBytes buffer, std::size_t size,
                   std::uint64_t seed, ByteMutator mutate_bytes) {
  CounterRng rng(seed);
  const std::optional<Input> input = ParseInput(target, buffer.first(size));
  if (!input || rng.NextBelow(20) == 0) {
    const Bytes fresh = RandomInput(target, rng);
    if (fresh.size() > buffer.size()) return size;
    std::copy(fresh.begin(), fresh.end(), buffer.begin());
    return fresh.size();
  }
  const std::size_t head = size - input->bytes.size();
  const MutableBytes rest = buffer.subspan(head);
  std::size_t now =
      mutate_bytes(reinterpret_cast<std::uint8_t*>(rest.data()), input->bytes.size(), rest.size());
  if (rng.NextBelow(4) != 0) {
    for (; now < input->bytes.size(); ++now) rest[now] = std::byte{0};
    now = input->bytes.size();
  }
  return head + now;
}

}  // namespace gradwire::fuzz
