#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

enum class Scaling { kL1, kL2, kTwoMeans, kNone };

/// What a block's elements decode to: `negative` where the sign bit is set, else `rest`.
struct Levels {
  float negative = 0;
  float rest = 0;
};

/// One bit an element and a scale (two_means: two) a block. Under feedback the residual is lazy:
/// values = q, pending = the payload's scales, and the next pass takes scale * sign off as it
/// reads. That is one pass where the plain way needs two, and the same operations in the same
/// order.
class OnebitCodec final : public Compressor {
 public:
  OnebitCodec(Scaling scaling, std::size_t block) : scaling_(scaling), block_(block) {}

  std::string_view name() const override { return "onebit"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class =
        scaling_ == Scaling::kL1 ? CompressorClass::kContractive : CompressorClass::kNoClaim;
    traits.feedback_by_default = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return NumScales(n) * sizeof(float) + (n + 7) / 8;
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    const std::size_t num_scales = NumScales(n);
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckPending(residual, num_scales));
    const ScopedFloatMode ieee;
    std::byte* const scales = output.data();
    std::byte* const bits = scales + num_scales * sizeof(float);
    Encoded encoded{MaxEncodedSize(n), true};
    kernels::SignSums total;
    std::size_t block_begin = 0;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      float* values = nullptr;
      Levels take_off;
      if (residual != nullptr) {
        values = residual->values.data() + offset;
        if (!residual->is_explicit()) take_off = LevelsAt(AsPending(*residual), n, offset);
      }
      const kernels::SignSums sums =
          kernels::EncodeSigns(Sums(), input.Block(offset, count), values, context.alpha,
                               take_off.negative, take_off.rest, count, bits + offset / 8);
      encoded.finite = encoded.finite && sums.finite;
      total.rest += sums.rest;
      total.negative += sums.negative;
      total.negatives += sums.negatives;
      const std::size_t end = offset + count;
      if (end == n || end - block_begin == BlockSize(n)) {
        StoreScales(total, end - block_begin, scales + ScaleIndex(n, block_begin) * sizeof(float));
        total = {};
        block_begin = end;
      }
    });
    if (residual != nullptr) {
      // The room stays in the vector, so this allocates in the first round only.
      residual->pending.resize(encoded.finite ? num_scales : 0);
      if (encoded.finite && num_scales != 0) {
        std::memcpy(residual->pending.data(), scales, num_scales * sizeof(float));
      }
    }
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    for (std::size_t i = 0; i < NumScales(n); ++i) {
      const auto scale = LoadLe<float>(payload.data() + i * sizeof(float));
      if (!std::isfinite(scale) || std::signbit(scale)) {
        return CorruptData(
            fmt::format("onebit scale {} is {}, expected a finite number from 0", i, scale));
      }
    }
    if (n % 8 != 0 && (payload.back() >> (n % 8)) != std::byte{0}) {
      return CorruptData(fmt::format("onebit payload ends in byte {:#04x}, expected {} bits of 0",
                                     std::to_integer<unsigned>(payload.back()), 8 - n % 8));
    }
    return Status::Ok();
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    const std::size_t n = output.size();
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, n));
    const ScopedFloatMode ieee;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const Levels levels = LevelsAt(payload, n, offset);
      kernels::DecodeSigns(Bits(payload, n, offset), levels.negative, levels.rest, count,
                           output.data() + offset);
    });
    return Status::Ok();
  }

  Status DecodeAdd(ByteView payload, const CodecContext& context,
                   std::span<float> accumulator) const override {
    const std::size_t n = accumulator.size();
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, n));
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      DecodeAddRange(payload, n, context, offset, accumulator.subspan(offset, count));
    });
    return Status::Ok();
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset % kBlockElements == 0 && offset + accumulator.size() <= n);
    if (accumulator.empty()) return;
    const ScopedFloatMode ieee;
    const Levels levels = LevelsAt(payload, n, offset);
    kernels::DecodeAddSigns(Bits(payload, n, offset), levels.negative, levels.rest,
                            accumulator.size(), accumulator.data());
  }

  void Flush(Residual& residual) const override {
    const std::size_t n = residual.values.size();
    if (residual.is_explicit()) return;
    assert(residual.pending.size() == NumScales(n));
    const ScopedFloatMode ieee;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const Levels take_off = LevelsAt(AsPending(residual), n, offset);
      for (float& value : residual.values.subspan(offset, count)) {
        value -= std::signbit(value) ? take_off.negative : take_off.rest;
      }
    });
    residual.pending.clear();
  }

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    if (!residual.is_explicit()) {
      residual.pending.clear();  // values are q already
      return;
    }
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  std::size_t ScalesPerBlock() const { return scaling_ == Scaling::kTwoMeans ? 2 : 1; }
  std::size_t BlockSize(std::size_t n) const { return block_ == 0 ? n : block_; }
  /// Index of the first scale of the block that begins at, or holds, an offset below n.
  std::size_t ScaleIndex(std::size_t n, std::size_t offset) const {
    return offset / BlockSize(n) * ScalesPerBlock();
  }
  std::size_t NumScales(std::size_t n) const {
    return n == 0 ? 0 : ((n - 1) / BlockSize(n) + 1) * ScalesPerBlock();
  }
  const std::byte* Bits(ByteView payload, std::size_t n, std::size_t offset) const {
    return payload.data() + NumScales(n) * sizeof(float) + offset / 8;
  }
  static ByteView AsPending(const Residual& residual) {
    return AsBytes(std::span<const float>(residual.pending));
  }

  Levels LevelsAt(ByteView scales, std::size_t n, std::size_t offset) const {
    const std::byte* first = scales.data() + ScaleIndex(n, offset) * sizeof(float);
    const auto negative = LoadLe<float>(first);
    const auto rest =
        scaling_ == Scaling::kTwoMeans ? LoadLe<float>(first + sizeof(float)) : negative;
    return {-negative, rest};
  }

  kernels::SignSum Sums() const {
    switch (scaling_) {
      case Scaling::kL2:
        return kernels::SignSum::kSquares;
      case Scaling::kTwoMeans:
        return kernels::SignSum::kTwoAbs;
      case Scaling::kL1:
      case Scaling::kNone:
        break;
    }
    return kernels::SignSum::kAbs;
  }

  /// Saturates: the lanes of a sum may overflow where no element does.
  static float ToScale(double value) {
    constexpr float kMax = std::numeric_limits<float>::max();
    return value < static_cast<double>(kMax) ? static_cast<float>(value) : kMax;
  }

  void StoreScales(const kernels::SignSums& sums, std::size_t count, std::byte* to) const {
    const auto mean = [](double sum, std::size_t of) {
      return of == 0 ? 0.0F : ToScale(sum / static_cast<double>(of));
    };
    switch (scaling_) {
      case Scaling::kL1:
        return StoreLe(to, mean(sums.rest, count));
      case Scaling::kL2:
        return StoreLe(to, ToScale(std::sqrt(sums.rest / static_cast<double>(count))));
      case Scaling::kTwoMeans:
        StoreLe(to, mean(sums.negative, sums.negatives));
        return StoreLe(to + sizeof(float), mean(sums.rest, count - sums.negatives));
      case Scaling::kNone:
        return StoreLe(to, sums.rest == 0 ? 0.0F : 1.0F);
    }
  }

  static Status CheckPending(const Residual* residual, std::size_t num_scales) {
    if (residual != nullptr && !residual->is_explicit() && residual->pending.size() != num_scales) {
      return InvalidArgument(
          fmt::format("onebit was given a residual with {} pending scales, expected 0 or {}",
                      residual->pending.size(), num_scales));
    }
    return Status::Ok();
  }

  const Scaling scaling_;
  const std::size_t block_;
};

Result<std::unique_ptr<const Compressor>> CreateOnebit(const Parameters& parameters) {
  const std::uint64_t block = parameters.Integer("block");
  if (block % kBlockElements != 0) {
    return InvalidArgument(fmt::format(
        "block of compressor onebit is {}, expected a multiple of {}", block, kBlockElements));
  }
  const std::string& text = parameters.Text("scaling");
  const Scaling scaling = text == "l1"          ? Scaling::kL1
                          : text == "l2"        ? Scaling::kL2
                          : text == "two_means" ? Scaling::kTwoMeans
                                                : Scaling::kNone;
  return std::unique_ptr<const Compressor>(
      std::make_unique<OnebitCodec>(scaling, static_cast<std::size_t>(block)));
}

}  // namespace

/// Scaled sign: one bit an element and the mean magnitude.
/// Layout: f32 scales, block by block (two_means: of the negatives, then of the rest), 0 where the
/// block is all zero; then ceil(n/8) bytes, bit i = sign bit of element i, LSB first, last bits 0.
/// Biased; l1 is contractive with delta = |x|_1^2 / (n |x|_2^2) in each block.
/// Scales are of the block: mean |x| (l1), sqrt(mean x^2) (l2), mean |x| of each sign (two_means),
/// 1 (none); sums in the order of kernels::EncodeSigns, blocks of 4096 in double. A sum that
/// overflows gives the largest float.
/// Source: Seide et al. 2014 (two means); Karimireddy et al. 2019, EF-SignSGD (l1).
Status RegisterOnebit(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "onebit";
  info.wire_id = wire_id::kOnebit;
  info.description = "one sign bit an element and a scale";
  info.source = "Seide et al. 2014; Karimireddy et al. 2019";

  info.parameters = {
      {.name = "scaling",
       .kind = ParameterInfo::Kind::kChoice,
       .default_value = "l1",
       .choices = {"l1", "l2", "two_means", "none"},
       .description = "what a sign is worth: mean |x|, root mean square, a mean a sign, 1"},
      {.name = "block",
       .kind = ParameterInfo::Kind::kInteger,
       .default_value = "0",
       .min = 0,
       .max = 1 << 30,
       .choices = {},
       .description = "elements that share a scale, a multiple of 4096; 0 = the whole unit"},
  };
  info.create = CreateOnebit;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
