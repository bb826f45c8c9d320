#include "compressors/plugin/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <system_error>

#include "common/base/random.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kSizes[] = {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 4096, 65537};
constexpr std::size_t kGuard = 64;
constexpr std::byte kGuardByte{0xa5};
constexpr float kGuardFloat = 12345.5F;
constexpr int kDamages = 100;
constexpr std::size_t kMostFaults = 20;  // nobody reads more

/// Magnitudes spread over orders, both signs. The same for the same seed.
std::vector<float> Values(std::size_t n, std::uint64_t seed) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t draw = Mix64(HashCombine(seed, i));
    const float unit = static_cast<float>(draw >> 40) * 0x1p-23F - 1.0F;  // from -1 to 1
    values[i] = std::ldexp(unit, -static_cast<int>(draw % 8));
  }
  return values;
}

/// Zeros of both signs, denormals and the largest values among ordinary ones.
std::vector<float> Extremes(std::size_t n) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float some[] = {0.0F, -0.0F, 0x1p-149F, -0x1p-130F, 1.0F, -3.5F, kMost, -kMost};
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = some[(i * 5 + 6) % std::size(some)];
  return values;
}

bool IsSame(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

double SquaredNorm(std::span<const float> values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * static_cast<double>(v);
  return sum;
}

/// One codec at one size; faults are collected in `faults`.
class SizeCheck {
 public:
  SizeCheck(const Compressor& codec, std::size_t n, std::vector<std::string>& faults)
      : codec_(codec), n_(n), most_(codec.MaxEncodedSize(n)), faults_(faults) {}

  void Run() {
    const std::vector<float> zeros(n_, 0.0F);
    if (const auto decoded = RoundTrip(zeros, "zeros"); decoded) {
      if (SquaredNorm(*decoded) != 0) Fault("zeros do not decode to zeros");
    }
    RoundTrip(Extremes(n_), "extreme values");
    const std::vector<float> values = Values(n_, n_);
    const auto decoded = RoundTrip(values, "ordinary values");
    if (!decoded) return;
    std::vector<float> off(n_);
    for (std::size_t i = 0; i < n_; ++i) off[i] = (*decoded)[i] - values[i];
    switch (codec_.traits().compressor_class) {
      case CompressorClass::kExact:
        if (!IsSame(*decoded, values)) Fault("its class is exact, but what it decodes differs");
        break;
      case CompressorClass::kContractive:
        if (SquaredNorm(off) >= SquaredNorm(values)) {
          Fault(
              fmt::format("its class is contractive, but |C(x) - x|^2 is {:.4g} with |x|^2 {:.4g}",
                          SquaredNorm(off), SquaredNorm(values)));
        }
        break;
      default:
        break;
    }
    Damage();
  }

 private:
  void Fault(std::string_view fault) {
    faults_.push_back(fmt::format("with {} elements: {}", n_, fault));
  }

  std::optional<std::vector<std::byte>> Encode(std::span<const float> values,
                                               std::string_view what) {
    std::vector<std::byte> output(most_ + kGuard, kGuardByte);
    const auto encoded = EncodeSpan(codec_, values, context_, MutableBytes(output).first(most_));
    if (!encoded.ok()) {
      Fault(fmt::format("{}: {}", what, encoded.status().message()));
      return std::nullopt;
    }
    if (std::any_of(output.begin() + std::ptrdiff_t(most_), output.end(),
                    [](std::byte b) { return b != kGuardByte; })) {
      Fault(fmt::format("{}: encode writes beyond the {} bytes of max_encoded_size", what, most_));
      return std::nullopt;
    }
    output.resize(encoded->payload_bytes);
    return output;
  }

  std::optional<std::vector<float>> Decode(ByteView payload, std::string_view what) {
    std::vector<float> output(n_ + kGuard, kGuardFloat);
    const Status status = codec_.Decode(payload, context_, std::span(output).first(n_));
    if (std::any_of(output.begin() + std::ptrdiff_t(n_), output.end(),
                    [](float v) { return v != kGuardFloat; })) {
      Fault(fmt::format("{}: decode writes beyond its output", what));
      return std::nullopt;
    }
    if (!status.ok()) {
      Fault(fmt::format("{}: {}", what, status.message()));
      return std::nullopt;
    }
    output.resize(n_);
    return output;
  }

  std::optional<std::vector<float>> RoundTrip(std::span<const float> values,
                                              std::string_view what) {
    auto payload = Encode(values, what);
    if (!payload) return std::nullopt;
    const auto again = Encode(values, what);
    if (!again) return std::nullopt;
    if (*again != *payload) Fault(fmt::format("{}: encoding them again gives other bytes", what));
    auto decoded = Decode(*payload, what);
    if (!decoded) return std::nullopt;
    std::vector<std::byte> moved(payload->size() + 1);
    std::copy(payload->begin(), payload->end(), moved.begin() + 1);
    const auto from_odd = Decode(ByteView(moved).subspan(1), "a payload at an odd address");
    if (from_odd && !IsSame(*from_odd, *decoded)) {
      Fault(fmt::format("{}: the payload decodes differently at an odd address", what));
    }
    payload_ = std::move(*payload);
    return decoded;
  }

  /// Bytes from the network may be anything: refused, or finite values.
  void Damage() {
    for (int i = 0; i < kDamages && faults_.size() < kMostFaults; ++i) {
      std::uint64_t draw = Mix64(HashCombine(n_, static_cast<std::uint64_t>(i)));
      std::vector<std::byte> bytes = payload_;
      if (i % 4 == 0) {
        bytes.resize(draw % (bytes.size() + 2));
      } else if (i % 4 == 1) {
        for (std::byte& b : bytes) b = static_cast<std::byte>((draw = Mix64(draw)) & 0xff);
      } else if (!bytes.empty()) {
        bytes[draw % bytes.size()] ^= static_cast<std::byte>(1U << (draw >> 32) % 8);
      }
      // On the heap and of exactly this size, so that tools see what is read beyond it.
      const auto exact = std::make_unique<std::byte[]>(bytes.size());
      std::copy(bytes.begin(), bytes.end(), exact.get());
      const ByteView damaged(exact.get(), bytes.size());
      if (!codec_.Validate(damaged, n_).ok()) continue;
      Decode(damaged, "a damaged payload that validate accepts");
    }
  }

  const Compressor& codec_;
  const std::size_t n_;
  const std::size_t most_;
  const CodecContext context_{.stream_seed = 7, .shared_seed = 8};
  std::vector<std::string>& faults_;
  std::vector<std::byte> payload_;  // of the last round trip
};

std::optional<std::string> ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

/// What is wrong with a golden case; empty if nothing is.
std::string CheckGoldenCase(const CompressorRegistry& registry, const fs::path& spec_file) {
  std::ifstream file(spec_file);
  std::string spec;
  std::string elements;
  std::string kind;
  std::getline(file, spec);
  std::getline(file, elements);
  std::getline(file, kind);
  std::size_t n = 0;
  const auto [end, error] = std::from_chars(elements.data(), elements.data() + elements.size(), n);
  constexpr std::size_t kMostElements = std::size_t{1} << 24;
  if (error != std::errc() || end != elements.data() + elements.size() || n > kMostElements ||
      (kind != "encode" && kind != "refuse")) {
    return "is no case: expected the lines compressor, elements, and encode or refuse";
  }
  const auto made = registry.Create(spec);
  if (!made.ok()) return made.status().message();
  const Compressor& codec = **made;
  const auto base = [&](const char* extension) {
    return fs::path(spec_file).replace_extension(extension);
  };
  const auto expected = ReadFile(base(".bin"));
  if (!expected) return "has no file .bin";
  const ByteView payload = AsBytes(*expected);
  if (kind == "refuse") {
    return codec.Validate(payload, n).ok() ? "is accepted, expected it to be refused" : "";
  }
  const auto input = ReadFile(base(".in"));
  const auto output = ReadFile(base(".out"));
  if (!input || !output || input->size() != n * sizeof(float) || output->size() != input->size()) {
    return fmt::format("needs files .in and .out of {} bytes", n * sizeof(float));
  }
  std::vector<float> values(n);
  if (n != 0) std::memcpy(values.data(), input->data(), input->size());
  std::vector<std::byte> encoded(codec.MaxEncodedSize(n));
  const auto result = EncodeSpan(codec, values, {}, encoded);
  if (!result.ok()) return result.status().message();
  if (!result->finite) return "has values that are not finite";
  encoded.resize(result->payload_bytes);
  if (!std::equal(encoded.begin(), encoded.end(), payload.begin(), payload.end())) {
    const auto at = std::mismatch(encoded.begin(), encoded.end(), payload.begin(), payload.end());
    return fmt::format("encodes to {} bytes that differ from the {} expected at byte {}",
                       encoded.size(), payload.size(), at.first - encoded.begin());
  }
  std::vector<float> decoded(n);
  if (const Status status = codec.Decode(payload, {}, decoded); !status.ok()) {
    return status.message();
  }
  return n == 0 || std::memcmp(decoded.data(), output->data(), output->size()) == 0
             ? ""
             : "decodes to other values than expected";
}

}  // namespace

std::vector<std::string> CheckCodec(const Compressor& codec) {
  std::vector<std::string> faults;
  for (const std::size_t n : kSizes) {
    if (faults.size() < kMostFaults) SizeCheck(codec, n, faults).Run();
  }
  return faults;
}

std::vector<std::string> CheckGoldenFiles(const CompressorRegistry& registry,
                                          const std::string& folder) {
  std::vector<fs::path> cases;
  std::error_code error;
  for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    if (at->path().extension() == ".spec") cases.push_back(at->path());
  }
  if (error) return {fmt::format("cannot read '{}': {}", folder, error.message())};
  if (cases.empty()) return {fmt::format("'{}' has no file that ends with .spec", folder)};
  std::sort(cases.begin(), cases.end());
  std::vector<std::string> faults;
  for (const fs::path& each : cases) {
    const std::string fault = CheckGoldenCase(registry, each);
    if (!fault.empty()) faults.push_back(fmt::format("{} {}", each.string(), fault));
  }
  return faults;
}

}  // namespace gradwire
