#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

// What every codec must do. Whatever the registry lists is tested; nothing here knows a codec.

namespace gradwire::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Calls body(codec, input) for every variant, size and kind of data.
template <typename Body>
void ForAll(std::size_t largest, Body&& body) {
  for (const std::string& spec : Variants()) {
    const auto codec = Make(spec);
    for (const std::size_t n : Sizes()) {
      if (n > largest) continue;
      CAPTURE(spec, n);
      body(*codec, Gradient(n, n + 1));
      body(*codec, AwkwardGradient(n, n + 2));
    }
  }
}

/// A copy of the bytes at an odd address.
struct AtOddAddress {
  explicit AtOddAddress(ByteView bytes) : storage(bytes.size() + 2) {
    begin = storage.data() + (reinterpret_cast<std::uintptr_t>(storage.data()) % 2 == 0 ? 1 : 0);
    if (!bytes.empty()) std::memcpy(begin, bytes.data(), bytes.size());
    view = MutableBytes(begin, bytes.size());
  }
  std::vector<std::byte> storage;
  std::byte* begin;
  MutableBytes view;
};

TEST_CASE("a payload decodes to what the codec's class promises", "[compressors][conformance]") {
  ForAll(524288, [](const Compressor& codec, const std::vector<float>& x) {
    const Coded coded = Encode(codec, x);
    CHECK(coded.finite);
    REQUIRE(coded.payload.size() <= codec.MaxEncodedSize(x.size()));
    if (codec.traits().fixed_size) REQUIRE(coded.payload.size() == codec.MaxEncodedSize(x.size()));
    if (x.empty()) REQUIRE(coded.payload.empty());
    REQUIRE(codec.Validate(coded.payload, x.size()).ok());
    const std::vector<float> decoded = Decode(codec, coded.payload, x.size());
    std::vector<float> error(x.size());
    bool finite = true;
    for (std::size_t i = 0; i < x.size(); ++i) {
      finite = finite && std::isfinite(decoded[i]);
      error[i] = decoded[i] - x[i];
    }
    CHECK(finite);
    if (codec.traits().compressor_class == CompressorClass::kExact) {
      REQUIRE(Bits(decoded) == Bits(x));
    } else if (codec.traits().compressor_class == CompressorClass::kContractive) {
      // Room for the float rounding of a mean and of the differences.
      REQUIRE(SquaredNorm(error) <= SquaredNorm(x) * (1 + 1e-6));
    }
  });
}

TEST_CASE("adding a payload equals adding what it decodes to", "[compressors][conformance]") {
  ForAll(524288, [](const Compressor& codec, const std::vector<float>& x) {
    const std::size_t n = x.size();
    const Coded coded = Encode(codec, x);
    const std::vector<float> decoded = Decode(codec, coded.payload, n);

    std::vector<float> from_zero(n, 0.0F);
    REQUIRE(codec.DecodeAdd(coded.payload, {}, from_zero).ok());
    std::vector<float> expected(n, 0.0F);
    for (std::size_t i = 0; i < n; ++i) expected[i] += decoded[i];
    REQUIRE(Bits(from_zero) == Bits(expected));

    std::vector<float> sum = Gradient(n, 77);
    expected = sum;
    std::vector<float> by_blocks = sum;
    for (std::size_t i = 0; i < n; ++i) expected[i] += decoded[i];
    REQUIRE(codec.DecodeAdd(coded.payload, {}, sum).ok());
    REQUIRE(Bits(sum) == Bits(expected));
    // Codecs without block access are asked too, where it does not take long.
    if (!codec.traits().block_access && n > 10000) return;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      codec.DecodeAddRange(coded.payload, n, {}, offset,
                           std::span(by_blocks).subspan(offset, count));
    });
    REQUIRE(Bits(by_blocks) == Bits(expected));
  });
}

TEST_CASE("payloads work from odd addresses, and nothing is written beyond them",
          "[compressors][conformance]") {
  ForAll(65537, [](const Compressor& codec, const std::vector<float>& x) {
    const std::size_t n = x.size();
    const Coded coded = Encode(codec, x);
    AtOddAddress output(std::vector<std::byte>(codec.MaxEncodedSize(n), std::byte{0xaa}));
    std::byte* const guard = output.begin + output.view.size();
    if (guard < output.storage.data() + output.storage.size()) *guard = std::byte{0x5a};
    const Result<Encoded> encoded = EncodeSpan(codec, x, {}, output.view);
    REQUIRE(encoded.ok());
    if (guard < output.storage.data() + output.storage.size()) REQUIRE(*guard == std::byte{0x5a});
    const MutableBytes payload = output.view.first(encoded->payload_bytes);
    REQUIRE(std::equal(payload.begin(), payload.end(), coded.payload.begin(), coded.payload.end()));
    REQUIRE(Bits(Decode(codec, payload, n)) == Bits(Decode(codec, coded.payload, n)));
    std::vector<float> sum(n, 1.0F);
    std::vector<float> expected(n, 1.0F);
    REQUIRE(codec.DecodeAdd(payload, {}, sum).ok());
    REQUIRE(codec.DecodeAdd(coded.payload, {}, expected).ok());
    REQUIRE(Bits(sum) == Bits(expected));
  });
}

TEST_CASE("zero in, zero out, and nothing is left over", "[compressors][conformance]") {
  for (const std::string& spec : Variants()) {
    const auto codec = Make(spec);
    for (const std::size_t n : Sizes()) {
      CAPTURE(spec, n);
      std::vector<float> zeros(n, 0.0F);
      if (n > 3) zeros[n / 2] = -0.0F;
      std::vector<float> values(n, 0.0F);
      Residual residual{values, {}};
      const Coded coded = Encode(*codec, zeros, &residual);
      CHECK(coded.finite);
      REQUIRE(SquaredNorm(Decode(*codec, coded.payload, n)) == 0);
      REQUIRE(SquaredNorm(Explicit(*codec, residual)) == 0);
    }
  }
}

TEST_CASE("a payload of another size is refused with both sizes", "[compressors][conformance]") {
  ForAll(8209, [](const Compressor& codec, const std::vector<float>& x) {
    const std::size_t n = x.size();
    const Coded coded = Encode(codec, x);
    std::vector<float> output(n);
    for (const std::size_t size :
         {coded.payload.size() + 1, coded.payload.size() + 100, coded.payload.size() - 1,
          coded.payload.size() / 2, std::size_t{0}}) {
      if (size == coded.payload.size() || size > coded.payload.size() + 100) continue;
      CAPTURE(size, coded.payload.size());
      std::vector<std::byte> wrong = coded.payload;
      wrong.resize(size);
      const Status status = codec.Validate(wrong, n);
      CAPTURE(status.ToString());
      REQUIRE(status.code() == StatusCode::kCorruptData);
      if (codec.traits().fixed_size) {
        CHECK(status.message().find(std::to_string(size) + " bytes") != std::string::npos);
        CHECK(status.message().find("expected " + std::to_string(coded.payload.size())) !=
              std::string::npos);
      }
      CHECK(codec.Decode(wrong, {}, output).code() == StatusCode::kCorruptData);
      CHECK(codec.DecodeAdd(wrong, {}, output).code() == StatusCode::kCorruptData);
    }
  });
}

TEST_CASE("damaged payloads are refused or decode to something, but never crash",
          "[compressors][conformance]") {
  CounterRng rng(4711);
  ForAll(8209, [&](const Compressor& codec, const std::vector<float>& x) {
    const std::size_t n = x.size();
    const Coded coded = Encode(codec, x);
    std::vector<float> output(n);
    for (int attempt = 0; attempt < 40; ++attempt) {
      std::vector<std::byte> damaged = coded.payload;
      if (attempt % 4 == 3) {  // garbage of a possible size
        damaged.resize(rng.NextBelow(codec.MaxEncodedSize(n) + 2));
        for (std::byte& byte : damaged) byte = static_cast<std::byte>(rng.Next() & 0xff);
      } else if (!damaged.empty()) {
        for (std::uint64_t flips = 1 + rng.NextBelow(3); flips > 0; --flips) {
          damaged[rng.NextBelow(damaged.size())] ^= std::byte{1} << rng.NextBelow(8);
        }
      }
      // A copy of exactly this size, so that a sanitizer sees any read beyond it.
      const std::vector<std::byte> exact(damaged.begin(), damaged.end());
      const Status valid = codec.Validate(exact, n);
      REQUIRE((valid.ok() || valid.code() == StatusCode::kCorruptData));
      REQUIRE(codec.Decode(exact, {}, output).ok() == valid.ok());
      REQUIRE(codec.DecodeAdd(exact, {}, output).ok() == valid.ok());
      if (valid.ok()) REQUIRE(exact.size() <= codec.MaxEncodedSize(n));
    }
  });
}

TEST_CASE("an output or a residual of the wrong size is refused", "[compressors][conformance]") {
  ForAll(1000, [](const Compressor& codec, const std::vector<float>& x) {
    const std::size_t n = x.size();
    if (n == 0) return;
    std::vector<std::byte> output(codec.MaxEncodedSize(n) - 1);
    CHECK(EncodeSpan(codec, x, {}, output).status().code() == StatusCode::kBufferTooSmall);
    std::vector<float> values(n - 1);
    Residual residual{values, {}};
    output.resize(codec.MaxEncodedSize(n));
    CHECK(EncodeSpan(codec, x, {}, residual, output).status().code() ==
          StatusCode::kInvalidArgument);
  });
}

TEST_CASE("NaN and infinities void the round, and the residual keeps every finite element",
          "[compressors][conformance]") {
  ForAll(65537, [](const Compressor& codec, const std::vector<float>& first) {
    const std::size_t n = first.size();
    if (n == 0) return;
    const auto variant = GENERATE(0, 1, 2);
    const float bad = variant == 0 ? kNan : variant == 1 ? kInf : -kInf;
    // One bad element at the very end, or many.
    std::vector<float> g = Gradient(n, 9);
    for (std::size_t i = n - 1; i < n; i -= n / 5 + 1) {
      g[i] = bad;
      if (variant == 2) break;
    }
    CHECK_FALSE(Encode(codec, g).finite);

    std::vector<float> values(n, 0.0F);
    Residual residual{values, {}};
    REQUIRE(Encode(codec, first, &residual).finite);
    const std::vector<float> before = Explicit(codec, residual);
    REQUIRE_FALSE(Encode(codec, g, &residual).finite);
    REQUIRE(residual.is_explicit());
    // To rounding: codecs with an explicit residual add C(q) back to q - C(q). Where rounding is
    // random, C(q) may be a step of the unit, however small q is.
    const bool by_steps = codec.traits().compressor_class == CompressorClass::kUnbiased;
    float largest = 0;
    for (std::size_t i = 0; i < n && by_steps; ++i) {
      const float q = g[i] + before[i];
      if (std::isfinite(q)) largest = std::max(largest, std::fabs(q));
    }
    bool as_expected = true;
    for (std::size_t i = 0; i < n; ++i) {
      const float q = g[i] + before[i];
      as_expected = as_expected && (std::isfinite(q) ? std::fabs(values[i] - q) <=
                                                           1e-6F * std::max(std::fabs(q), largest)
                                                     : values[i] == before[i]);
    }
    REQUIRE(as_expected);
    // And the next round goes on from there.
    const std::vector<float> next = Gradient(n, 10);
    REQUIRE(Encode(codec, next, &residual).finite);
  });
}

TEST_CASE("a sum that overflows in the feedback voids the round too",
          "[compressors][conformance]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    std::vector<float> values = {3e38F, 1.0F, -2.0F};
    Residual residual{values, {}};
    const std::vector<float> g = {3e38F, 0.5F, 0.25F};
    REQUIRE_FALSE(Encode(*codec, g, &residual).finite);
    REQUIRE(residual.is_explicit());
    CHECK(values == std::vector<float>{3e38F, 1.5F, -1.75F});
  }
}

TEST_CASE("values near the largest float decode to finite ones", "[compressors][conformance]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    std::vector<float> x(5000, std::numeric_limits<float>::max());
    for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
    const Coded coded = Encode(*codec, x);
    REQUIRE(coded.finite);
    REQUIRE(std::isfinite(SquaredNorm(Decode(*codec, coded.payload, x.size()))));
  }
}

/// All that a codec computes for an input: payloads with and without feedback, over two rounds.
struct Everything {
  std::vector<std::vector<std::byte>> payloads;
  std::vector<std::vector<std::uint32_t>> floats;
  friend bool operator==(const Everything&, const Everything&) = default;
};

Everything ComputeEverything(const Compressor& codec, const std::vector<float>& x) {
  Everything all;
  const std::size_t n = x.size();
  std::vector<float> values(n, 0.0F);
  Residual residual{values, {}};
  all.payloads.push_back(Encode(codec, x).payload);
  for (const float alpha : {1.0F, 1.0F, 0.7F}) {
    all.payloads.push_back(Encode(codec, x, &residual, {1, alpha}).payload);
    all.floats.push_back(Bits(Explicit(codec, residual)));
  }
  for (const auto& payload : all.payloads) {
    all.floats.push_back(Bits(Decode(codec, payload, n)));
    std::vector<float> sum = Gradient(n, 3);
    REQUIRE(codec.DecodeAdd(payload, {}, sum).ok());
    all.floats.push_back(Bits(sum));
  }
  // A void round: the payload does not count, the residual does.
  std::vector<float> bad = x;
  if (n > 0) bad[n / 2] = kNan;
  if (n > 40) bad[n - 1] = kInf;
  Encode(codec, bad, &residual);
  all.floats.push_back(Bits(values));
  return all;
}

TEST_CASE("every instruction set gives the same bytes", "[compressors][conformance]") {
  const std::vector<std::int64_t> targets = kernels::AvailableTargets();
  // Plain code and at least one vector set on every machine that this is developed on.
  REQUIRE_FALSE(targets.empty());
  ForAll(65537, [&](const Compressor& codec, const std::vector<float>& x) {
    const Everything expected = ComputeEverything(codec, x);
    for (const std::int64_t target : targets) {
      CAPTURE(kernels::TargetName(target));
      kernels::UseTarget(target);
      const bool same = ComputeEverything(codec, x) == expected;
      kernels::UseTarget(0);
      REQUIRE(same);
    }
  });
}

#if defined(__x86_64__)
TEST_CASE("a thread that flushes denormals or rounds otherwise gets the same bytes",
          "[compressors][conformance]") {
  ForAll(8209, [](const Compressor& codec, const std::vector<float>& x) {
    const Everything expected = ComputeEverything(codec, x);
    const unsigned saved = _mm_getcsr();
    std::vector<float> values(x.size(), 1e-39F);
    Residual residual{values, {}};
    std::vector<float> other_values = values;
    Residual other{other_values, {}};
    const Coded coded = Encode(codec, x, &residual);
    _mm_setcsr(saved | 0x8040 | 0x6000);  // flush to zero, denormals are zero, round toward zero
    const unsigned odd = _mm_getcsr();
    std::vector<std::byte> output(codec.MaxEncodedSize(x.size()));
    SpanSource source(x);
    const Result<Encoded> encoded = codec.Encode(source, x.size(), {}, &other, output);
    codec.Flush(other);
    std::vector<float> decoded(x.size());
    const Status status = codec.Decode(coded.payload, {}, decoded);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    REQUIRE((after & 0xe040) == (odd & 0xe040));  // the thread's mode is given back
    REQUIRE(status.ok());
    REQUIRE(encoded.ok());
    output.resize(encoded->payload_bytes);
    REQUIRE(output == coded.payload);
    REQUIRE(Bits(other_values) == Bits(Explicit(codec, residual)));
    REQUIRE(Bits(decoded) == Bits(Decode(codec, coded.payload, x.size())));
  });
}
#endif

/// A source whose blocks live in one buffer that is overwritten by the next one, as a server's
/// average does; counts how often it is read.
class FleetingSource final : public BlockSource {
 public:
  explicit FleetingSource(std::span<const float> values) : values_(values) {}
  const float* Block(std::size_t offset, std::size_t count) override {
    REQUIRE(offset % kBlockElements == 0);
    REQUIRE(count == std::min(kBlockElements, values_.size() - offset));
    block_.assign(count, 0.0F);
    std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(offset), count, block_.begin());
    ++calls;
    return block_.data();
  }
  std::size_t calls = 0;

 private:
  std::span<const float> values_;
  std::vector<float> block_;
};

TEST_CASE("codecs read their source block by block and keep no pointer into it",
          "[compressors][conformance]") {
  ForAll(65537, [](const Compressor& codec, const std::vector<float>& x) {
    std::vector<float> values(x.size(), 0.5F);
    std::vector<float> other_values = values;
    Residual residual{values, {}};
    Residual other{other_values, {}};
    const Coded coded = Encode(codec, x, &residual);
    FleetingSource source(x);
    std::vector<std::byte> output(codec.MaxEncodedSize(x.size()));
    const Result<Encoded> encoded = codec.Encode(source, x.size(), {}, &other, output);
    REQUIRE(encoded.ok());
    output.resize(encoded->payload_bytes);
    REQUIRE(output == coded.payload);
    REQUIRE(Bits(Explicit(codec, other)) == Bits(Explicit(codec, residual)));
    const std::size_t blocks = (x.size() + kBlockElements - 1) / kBlockElements;
    // Some look at a few blocks beforehand.
    REQUIRE(source.calls <= blocks + blocks / 2);
    source.calls = 0;
    output.resize(codec.MaxEncodedSize(x.size()));
    REQUIRE(codec.Encode(source, x.size(), {}, nullptr, output).ok());
    if (codec.traits().reads_twice) REQUIRE(source.calls == 2 * blocks);
  });
}

TEST_CASE("the registry's facts of a codec agree with the codec", "[compressors][conformance]") {
  for (const CompressorInfo& info : BuiltinCompressors().entries()) {
    CAPTURE(info.name);
    const auto codec = Make(info.name);
    CHECK(codec->name() == info.name);
    CHECK_FALSE(info.description.empty());
    const CompressorClass c = codec->traits().compressor_class;
    if (c == CompressorClass::kExact) CHECK_FALSE(codec->traits().feedback_by_default);
    // Feedback that could let a residual grow for ever is nobody's default.
    if (codec->traits().feedback_by_default) CHECK(codec->FeedbackVariance(100'000) < 1);
  }
}

}  // namespace
}  // namespace gradwire::testing
