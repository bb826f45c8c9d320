#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "common/base/status.h"

namespace gradwire {

/// Elements that codecs read at a time: 16 KiB of fp32, so a block stays in the first-level cache.
/// Reductions use fixed float lanes inside a block and add the blocks' sums in double, so the bytes
/// do not depend on the machine. Part of the maths: changing it changes payloads.
inline constexpr std::size_t kBlockElements = 4096;

/// n fp32 values, produced block by block: a caller's gradient, a gradient converted from another
/// dtype, several small tensors one after the other, or the average of the workers' pushes. Codecs
/// read from a source so that all of these fuse with their encode pass.
/// Threads: one.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// Returns values [offset, offset + count), valid until the next call. `offset` is a multiple of
  /// kBlockElements and count = min(kBlockElements, n - offset). A codec may read the source more
  /// than once and gets the same values each time.
  virtual const float* Block(std::size_t offset, std::size_t count) = 0;
};

/// A source that is a plain array.
class SpanSource final : public BlockSource {
 public:
  explicit SpanSource(std::span<const float> values) : values_(values) {}
  const float* Block(std::size_t offset, std::size_t) override { return values_.data() + offset; }

 private:
  std::span<const float> values_;
};

/// What the scale of gradients depends on; 0: not given.
struct GradientScale {
  double learning_rate = 0;  // of the step, where what was not sent follows it (`ef_lr`)
  double loss_scale = 0;     // what the loss, and so every gradient, was multiplied with

  friend bool operator==(const GradientScale&, const GradientScale&) = default;
};

/// What was not sent of one unit: e in q = g + alpha * e. Codecs may store it lazily: then `values`
/// holds q, and `pending` what is to be taken off when it is next read (onebit: one scale a block).
/// Compressor::Flush makes it explicit. Sizes: values[n]; pending as the codec wants, empty at
/// first.
struct Residual {
  std::span<float> values;
  std::vector<float> pending;
  /// Of the gradients that it was last kept with: what `values` are to be read in.
  GradientScale scale = {};

  bool is_explicit() const { return pending.empty(); }
};

/// What an encode or decode call is told beside the data.
struct CodecContext {
  /// hash(job seed, key, round, sender): rounding draws, which differ from sender to sender.
  std::uint64_t stream_seed = 0;
  /// Weight of the residual; 1 in plain error feedback.
  float alpha = 1.0F;
  /// Choices that all workers of a round make alike (which elements randomk keeps).
  std::uint64_t shared_seed = 0;
  /// Encode only: the values are a sum of payloads of this codec with this shared seed, so they are
  /// zero wherever the codec would not look.
  bool of_same_choice = false;
};

/// hash(job seed, key, round), from which the seeds of both directions follow.
constexpr std::uint64_t RoundSeed(std::uint64_t job_seed, std::uint64_t key, std::uint64_t round) {
  return HashCombine(HashCombine(job_seed, key), round);
}

/// What a rank encodes its push with, and the server decodes it with.
constexpr CodecContext PushContext(std::uint64_t round_seed, std::uint64_t rank) {
  return {.stream_seed = HashCombine(round_seed, rank), .shared_seed = round_seed};
}

/// What the server encodes its reply with, and the workers decode it with. With the workers' own
/// compressor it makes the workers' choices; with another one they are independent of those, else
/// the choice of a choice would be biased.
constexpr CodecContext PullContext(std::uint64_t round_seed, std::uint64_t num_workers,
                                   bool compresses_as_push) {
  const std::uint64_t own = HashCombine(round_seed, num_workers);
  return {.stream_seed = own,
          .shared_seed = compresses_as_push ? round_seed : own,
          .of_same_choice = compresses_as_push};
}

/// Outcome of an encode pass.
struct Encoded {
  std::size_t payload_bytes = 0;
  /// False if q had a NaN or an infinity: the payload is void and a mark is sent in its place.
  bool finite = true;
  /// Elements of which more is left over than the codec's class bounds (twobit: abs q > 2 theta).
  /// If that goes on, their residual grows.
  std::size_t out_of_bound = 0;
};

enum class CompressorClass { kExact, kContractive, kUnbiased, kBounded, kNoClaim };

/// "exact", "contractive", "unbiased", "bounded" or "no_claim".
constexpr std::string_view CompressorClassName(CompressorClass compressor_class) {
  switch (compressor_class) {
    case CompressorClass::kExact:
      return "exact";
    case CompressorClass::kContractive:
      return "contractive";
    case CompressorClass::kUnbiased:
      return "unbiased";
    case CompressorClass::kBounded:
      return "bounded";
    case CompressorClass::kNoClaim:
      break;
  }
  return "no_claim";
}

struct CompressorTraits {
  CompressorClass compressor_class = CompressorClass::kNoClaim;
  /// Payloads may be added element by element without decoding.
  bool summable = false;
  /// Every payload of n elements has MaxEncodedSize(n) bytes.
  bool fixed_size = true;
  /// DecodeAddRange is cheap for any block; otherwise only whole units are decoded.
  bool block_access = true;
  /// Without a residual Encode reads its source twice (first for a norm of all of it).
  bool reads_twice = false;
  /// What `feedback: auto` means for this compressor.
  bool feedback_by_default = false;
};

/// A codec with its parameters bound: makes n floats smaller and back. Immutable; every method is
/// const and safe from many threads; all buffers belong to the caller.
///
/// Rules for all: zero in, zero out. n = 0 has an empty payload. Any address will do for payloads.
/// The same input gives the same bytes on every machine.
class Compressor {
 public:
  virtual ~Compressor() = default;

  /// The registry's name: "onebit".
  virtual std::string_view name() const = 0;
  virtual CompressorTraits traits() const = 0;

  /// Bytes: an upper bound of the payload of n elements.
  virtual std::size_t MaxEncodedSize(std::size_t n) const = 0;

  /// The bound of E |C(q) - q|^2 / |q|^2 over all q of n elements, as encoded with feedback: omega
  /// of the unbiased ones. Where it is 1 or more a residual could grow for ever, and feedback is
  /// refused. Codecs that are made for feedback leave it at 0.
  virtual double FeedbackVariance(std::size_t) const { return 0; }

  /// Encodes the n values of `input`, with feedback if `residual` is given: q = input + alpha * e,
  /// payload of q, e <- q - C(q). Without it q is the input.
  /// Shapes: output at least MaxEncodedSize(n) bytes; residual->values[n].
  /// Non-finite: if any q is NaN or infinite the result says finite = false; the residual then is
  /// explicit and holds every finite q, and the old e where q is not finite (nothing was
  /// delivered). Errors: BufferTooSmall.
  virtual Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                                 Residual* residual, MutableBytes output) const = 0;

  /// Checks all that a decoder relies on: exact size, counts, indices, finite scales.
  /// Errors: CorruptData with what was got and expected.
  virtual Status Validate(ByteView payload, std::size_t n) const = 0;

  /// output[i] = C(x)[i]. Validates first.
  /// Errors: CorruptData; the output is then unspecified.
  virtual Status Decode(ByteView payload, const CodecContext& context,
                        std::span<float> output) const = 0;

  /// accumulator[i] += C(x)[i]; sparse codecs touch only what they kept. Validates first.
  /// Errors: CorruptData; the accumulator is then unspecified.
  virtual Status DecodeAdd(ByteView payload, const CodecContext& context,
                           std::span<float> accumulator) const = 0;

  /// accumulator[i] += C(x)[offset + i] for a block: offset a multiple of kBlockElements, at most
  /// kBlockElements values. The payload of n elements has passed Validate.
  /// Only for codecs with traits().block_access.
  virtual void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext& context,
                              std::size_t offset, std::span<float> accumulator) const = 0;

  /// Makes a lazily stored residual explicit: values = e, pending empty.
  virtual void Flush(Residual& residual) const = 0;

  /// Takes back the delivery of `payload`, the last one encoded with this residual, because the
  /// round was void: e <- e + C(q). Exact for lazily stored residuals, to rounding for others.
  virtual void Undo(ByteView payload, const CodecContext& context, Residual& residual) const = 0;
};

/// Encodes an array without feedback. For tests, tools and single-pass users.
inline Result<Encoded> EncodeSpan(const Compressor& compressor, std::span<const float> input,
                                  const CodecContext& context, MutableBytes output) {
  SpanSource source(input);
  return compressor.Encode(source, input.size(), context, nullptr, output);
}

/// Encodes an array with feedback.
inline Result<Encoded> EncodeSpan(const Compressor& compressor, std::span<const float> input,
                                  const CodecContext& context, Residual& residual,
                                  MutableBytes output) {
  SpanSource source(input);
  return compressor.Encode(source, input.size(), context, &residual, output);
}

/// Calls body(offset, count) for each block of n elements.
template <typename Body>
void ForEachBlock(std::size_t n, Body&& body) {
  for (std::size_t offset = 0; offset < n; offset += kBlockElements) {
    body(offset, std::min(kBlockElements, n - offset));
  }
}

}  // namespace gradwire
