#include "tests/compressors/codec_testing.h"

#include <bit>
#include <map>

#include "common/base/random.h"
#include "compressors/registry.h"
#include "tests/catch.h"

namespace gradwire::testing {
namespace {

std::vector<std::string> Candidates(const ParameterInfo& parameter) {
  switch (parameter.kind) {
    case ParameterInfo::Kind::kChoice:
      return parameter.choices;
    case ParameterInfo::Kind::kBool:
      return {"true", "false"};
    case ParameterInfo::Kind::kInteger:
    case ParameterInfo::Kind::kNumber:
      break;
  }
  std::vector<std::string> texts;
  const bool whole = parameter.kind == ParameterInfo::Kind::kInteger;
  for (const std::string text : {"0", "0.001", "0.01", "0.5", "1", "2", "3", "5", "300", "4096"}) {
    const double value = std::stod(text);
    if (value < parameter.min || value > parameter.max) continue;
    if (whole && text.find('.') != std::string::npos) continue;
    texts.push_back(text);
  }
  return texts;
}

}  // namespace

std::vector<std::string> Variants() {
  std::vector<std::string> variants;
  const CompressorRegistry& registry = BuiltinCompressors();
  for (const CompressorInfo& info : registry.entries()) {
    variants.push_back(info.name);
    // All combinations of choices, and for numbers one value after the other.
    std::vector<CompressorSpec> specs = {{info.name, {}}};
    for (const ParameterInfo& parameter : info.parameters) {
      const bool choice = parameter.kind == ParameterInfo::Kind::kChoice ||
                          parameter.kind == ParameterInfo::Kind::kBool;
      if (!choice) continue;
      std::vector<CompressorSpec> more;
      for (const CompressorSpec& spec : specs) {
        for (const std::string& text : Candidates(parameter)) {
          more.push_back(spec);
          more.back().parameters[parameter.name] = text;
        }
      }
      specs = std::move(more);
    }
    for (const ParameterInfo& parameter : info.parameters) {
      if (parameter.kind == ParameterInfo::Kind::kNumber ||
          parameter.kind == ParameterInfo::Kind::kInteger) {
        for (const std::string& text : Candidates(parameter)) {
          specs.push_back({info.name, {{parameter.name, text}}});
        }
      }
    }
    for (const CompressorSpec& spec : specs) {
      if (spec.parameters.empty()) continue;
      if (registry.Create(spec).ok()) variants.push_back(ToString(spec));
    }
  }
  return variants;
}

std::unique_ptr<const Compressor> Make(const std::string& spec) {
  Result<std::unique_ptr<const Compressor>> codec = BuiltinCompressors().Create(spec);
  INFO(codec.status().ToString());
  REQUIRE(codec.ok());
  return std::move(codec).value();
}

const std::vector<std::size_t>& Sizes() {
  static const std::vector<std::size_t> sizes = [] {
    std::vector<std::size_t> all = {0,   1,   7,   8,    9,    63,   64,  65,
                                    127, 128, 129, 1000, 4096, 4097, 8209};
    // The sanitizers are 10 to 20 times slower, and every kind of end is among these already.
#if !defined(__SANITIZE_THREAD__)
    all.push_back(65537);
#if !defined(__SANITIZE_ADDRESS__)
    all.push_back(524288);
#endif
#endif
    return all;
  }();
  return sizes;
}

std::vector<float> Gradient(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    // A normal number by sums, cheaper than Box-Muller for the large sizes; then spread.
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += rng.NextUniform() - 0.5;
    const auto order = static_cast<int>(rng.NextBelow(8));
    value = static_cast<float>(std::ldexp(sum, -order));
  }
  return values;
}

std::vector<float> AwkwardGradient(std::size_t n, std::uint64_t seed) {
  std::vector<float> values = Gradient(n, seed);
  static constexpr float kAwkward[] = {0.0F,   -0.0F,    1e-40F, -1e-40F, 1.4e-45F,
                                       0.25F,  -0.25F,   0.25F,  7e4F,    -9e9F,
                                       1e-30F, 65519.9F, 3e-8F,  6e-5F,   -1e-20F};
  CounterRng rng(seed + 1);
  for (std::size_t i = 0; i < n; i += 1 + rng.NextBelow(4)) {
    values[i] = kAwkward[rng.NextBelow(std::size(kAwkward))];
  }
  return values;
}

Coded Encode(const Compressor& codec, std::span<const float> input, Residual* residual,
             const CodecContext& context) {
  Coded coded;
  coded.payload.resize(codec.MaxEncodedSize(input.size()));
  SpanSource source(input);
  const Result<Encoded> encoded =
      codec.Encode(source, input.size(), context, residual, coded.payload);
  INFO(encoded.status().ToString());
  REQUIRE(encoded.ok());
  REQUIRE(encoded->payload_bytes <= coded.payload.size());
  coded.finite = encoded->finite;
  coded.payload.resize(encoded->payload_bytes);
  return coded;
}

std::vector<float> Decode(const Compressor& codec, ByteView payload, std::size_t n) {
  std::vector<float> output(n, 12345.0F);
  const Status status = codec.Decode(payload, {}, output);
  INFO(status.ToString());
  REQUIRE(status.ok());
  return output;
}

std::vector<std::uint32_t> Bits(std::span<const float> values) {
  std::vector<std::uint32_t> bits(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) bits[i] = std::bit_cast<std::uint32_t>(values[i]);
  return bits;
}

std::vector<float> Explicit(const Compressor& codec, const Residual& residual) {
  std::vector<float> values(residual.values.begin(), residual.values.end());
  Residual copy{values, residual.pending};
  codec.Flush(copy);
  REQUIRE(copy.is_explicit());
  return values;
}

double SquaredNorm(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return sum;
}

}  // namespace gradwire::testing
