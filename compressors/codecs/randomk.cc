#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "common/base/bytes.h"
#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/sparse_format.h"
#include "compressors/codecs/sparse_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

/// Which elements a shared seed chooses, in ascending order: choice 0 is the lowest.
/// The ring begins in the middle of the unit, at the element that it is turned by, so the choices
/// are those of its last windows and then of its first ones.
class RingChoice {
 public:
  /// k from 1 to n, n at most kMaxSparseElements.
  RingChoice(std::size_t n, std::size_t k, std::uint64_t seed) {
    ring_.n = static_cast<std::uint32_t>(n);
    ring_.k = static_cast<std::uint32_t>(k);
    ring_.key = DrawKey(seed);
    ring_.turn =
        static_cast<std::uint32_t>(std::uint64_t{DrawWord(ring_.k, ring_.key)} * ring_.n >> 32);
    first_window_ = PositionsBelow(ring_.n - ring_.turn);
  }

  std::size_t size() const { return ring_.k; }

  /// How many of the choices are below an element; all for n.
  std::size_t Below(std::size_t element) const {
    const std::uint32_t turn = ring_.turn;
    if (element < turn) return PositionsBelow(ring_.n - turn + element) - first_window_;
    return ring_.k - first_window_ + PositionsBelow(element - turn);
  }

  /// Choices `first` to `first + count - 1`.
  void Get(std::size_t first, std::size_t count, std::uint32_t* indices) const {
    const std::size_t last_windows = ring_.k - first_window_;
    std::size_t done = 0;
    if (first < last_windows) {
      done = std::min(count, last_windows - first);
      kernels::RingIndices(ring_, static_cast<std::uint32_t>(first_window_ + first), done, indices);
    }
    if (done == count) return;
    kernels::RingIndices(ring_, static_cast<std::uint32_t>(first + done - last_windows),
                         count - done, indices + done);
  }

 private:
  /// How many windows have their position below one of the ring's, 0 to n.
  std::size_t PositionsBelow(std::size_t position) const {
    if (position == ring_.n) return ring_.k;
    // The window that it is in: the last j with floor(j n / k) <= position.
    const auto window =
        static_cast<std::uint32_t>((std::uint64_t{position + 1} * ring_.k - 1) / ring_.n);
    kernels::Ring unturned = ring_;
    unturned.turn = 0;
    std::uint32_t drawn;
    kernels::RingIndices(unturned, window, 1, &drawn);
    return std::size_t{window} + (drawn < position ? 1 : 0);
  }

  kernels::Ring ring_;
  std::size_t first_window_ = 0;  // the one with the lowest choice; k: window 0
};

/// Keeps k elements that a seed chooses, so that indices need not be sent. Under feedback the
/// residual is explicit; what is kept is taken off while its block is in the cache.
class RandomkCodec final : public Compressor {
 public:
  RandomkCodec(KeptCount kept, kernels::CastFormat value)
      : kept_(kept), value_(value), value_bytes_(kernels::BytesOf(value)) {}

  std::string_view name() const override { return "randomk"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kUnbiased;
    traits.summable = value_ == kernels::CastFormat::kF32;
    traits.feedback_by_default = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override { return kept_.Of(n) * value_bytes_; }

  double FeedbackVariance(std::size_t n) const override {
    return n == 0 ? 0 : 1 - static_cast<double>(kept_.Of(n)) / static_cast<double>(n);
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    GRADWIRE_RETURN_IF_ERROR(CheckSparseElements(name(), n));
    Encoded encoded{MaxEncodedSize(n)};
    if (n == 0) return encoded;
    const ScopedFloatMode ieee;
    const RingChoice choice(n, kept_.Of(n), context.shared_seed);
    const bool scaled = residual == nullptr && !context.of_same_choice;
    const float factor =
        scaled ? static_cast<float>(static_cast<double>(n) / static_cast<double>(choice.size()))
               : 1;
    Chunk chunk;
    std::size_t done = 0;  // choices
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const float* q = input.Block(offset, count);
      float* e = nullptr;
      if (residual != nullptr) {
        e = residual->values.data() + offset;
        const bool finite = kernels::AddFeedback(q, e, context.alpha, count);
        encoded.finite = encoded.finite && finite;
        q = e;
      } else {
        encoded.finite = kernels::AllFinite(q, count) && encoded.finite;
      }
      if (!encoded.finite) return;  // the payload is void, and nothing more is taken off
      while (done < choice.size()) {
        if (done == chunk.end) chunk.Next(choice);
        const std::size_t taken =
            Take(chunk, done, offset, count, q, e, factor, output.data() + done * value_bytes_);
        done += taken;
        if (done != chunk.end) break;  // the rest is in later blocks
      }
    });
    if (!encoded.finite && residual != nullptr) {
      Add(output, choice, 0, done, 0, residual->values.data());
    }
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckSparseElements(name(), n));
    return CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n));
  }

  Status Decode(ByteView payload, const CodecContext& context,
                std::span<float> output) const override {
    const std::size_t n = output.size();
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, n));
    if (n == 0) return Status::Ok();
    const ScopedFloatMode ieee;
    const RingChoice choice(n, kept_.Of(n), context.shared_seed);
    std::size_t filled = 0;  // zeros go ahead of the values, so that memory is visited once
    ForEachChunk(payload, choice, 0, choice.size(), [&](const Chunk& chunk, std::size_t count) {
      const std::size_t end = std::size_t{chunk.indices[count - 1]} + 1;
      std::fill(output.data() + filled, output.data() + end, 0.0F);
      filled = end;
      for (std::size_t i = 0; i < count; ++i) output[chunk.indices[i]] = chunk.values[i];
    });
    std::fill(output.data() + filled, output.data() + n, 0.0F);
    return Status::Ok();
  }

  Status DecodeAdd(ByteView payload, const CodecContext& context,
                   std::span<float> accumulator) const override {
    const std::size_t n = accumulator.size();
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, n));
    if (n == 0) return Status::Ok();
    const ScopedFloatMode ieee;
    const RingChoice choice(n, kept_.Of(n), context.shared_seed);
    Add(payload, choice, 0, choice.size(), 0, accumulator.data());
    return Status::Ok();
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext& context,
                      std::size_t offset, std::span<float> accumulator) const override {
    assert(offset + accumulator.size() <= n);
    if (accumulator.empty()) return;
    const ScopedFloatMode ieee;
    const RingChoice choice(n, kept_.Of(n), context.shared_seed);
    Add(payload, choice, choice.Below(offset), choice.Below(offset + accumulator.size()), offset,
        accumulator.data());
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  /// Choices that are worked on together.
  struct Chunk {
    static constexpr std::size_t kCapacity = 512;
    /// Goes on to the choices from `end`.
    void Next(const RingChoice& choice) {
      begin = end;
      end = std::min(begin + kCapacity, choice.size());
      choice.Get(begin, end - begin, indices.data());
    }
    std::size_t begin = 0;
    std::size_t end = 0;
    std::array<std::uint32_t, kCapacity> indices;
    std::array<float, kCapacity> values;
  };

  /// Writes q of the choices from `first` on, as far as the chunk and a block of elements go, times
  /// a factor, and takes it off e if that is given. Returns how many.
  std::size_t Take(Chunk& chunk, std::size_t first, std::size_t offset, std::size_t elements,
                   const float* q, float* e, float factor, std::byte* output) const {
    std::uint32_t* const indices = chunk.indices.data() + (first - chunk.begin);
    const std::size_t most = chunk.end - first;
    const auto count = static_cast<std::size_t>(
        std::lower_bound(indices, indices + most, offset + elements) - indices);
    if (e != nullptr && value_ == kernels::CastFormat::kF32) {
      float* const from = e - offset;  // q is there, not to be multiplied; what is left of it is 0
      for (std::size_t i = 0; i < count; ++i) {
        StoreLe(output + i * sizeof(float), from[indices[i]]);
        from[indices[i]] = 0.0F;
      }
      return count;
    }
    for (std::size_t i = 0; i < count; ++i) indices[i] -= static_cast<std::uint32_t>(offset);
    float* const values = chunk.values.data();
    if (factor == 1) {
      for (std::size_t i = 0; i < count; ++i) values[i] = q[indices[i]];
    } else {
      constexpr float kMax = std::numeric_limits<float>::max();
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = std::clamp(q[indices[i]] * factor, -kMax, kMax);
      }
    }
    kernels::EncodeCast(value_, values, nullptr, 1, count, output);
    if (e == nullptr) return count;
    std::array<float, Chunk::kCapacity> decoded;
    kernels::DecodeCast(value_, output, count, decoded.data());
    for (std::size_t i = 0; i < count; ++i) e[indices[i]] = values[i] - decoded[i];
    return count;
  }

  /// Calls body(chunk, count) for the choices from first to end, decoded.
  template <typename Body>
  void ForEachChunk(ByteView payload, const RingChoice& choice, std::size_t first, std::size_t end,
                    Body&& body) const {
    Chunk chunk;
    for (; first < end; first += Chunk::kCapacity) {
      const std::size_t count = std::min(Chunk::kCapacity, end - first);
      choice.Get(first, count, chunk.indices.data());
      kernels::DecodeCast(value_, payload.data() + first * value_bytes_, count,
                          chunk.values.data());
      body(chunk, count);
    }
  }

  /// to[index - offset] += value of the choices from first to end.
  void Add(ByteView payload, const RingChoice& choice, std::size_t first, std::size_t end,
           std::size_t offset, float* to) const {
    ForEachChunk(payload, choice, first, end, [&](const Chunk& chunk, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) to[chunk.indices[i] - offset] += chunk.values[i];
    });
  }

  const KeptCount kept_;
  const kernels::CastFormat value_;
  const std::size_t value_bytes_;
};

constexpr double kDefaultRatio = 1.0 / 32;

Result<std::unique_ptr<const Compressor>> CreateRandomk(const Parameters& parameters) {
  const Result<KeptCount> kept = KeptCountOf("randomk", parameters, kDefaultRatio);
  if (!kept.ok()) return kept.status();
  return std::unique_ptr<const Compressor>(
      std::make_unique<RandomkCodec>(*kept, ValueOf(parameters)));
}

}  // namespace

/// Keeps k elements, the same for all senders of a round and others in the next round, each with
/// the chance k / n.
/// Layout: f32 or f16 [k], by index; the indices follow from the shared seed (docs/payloads.md).
/// Without feedback values are multiplied by n / k, so that the mean of what is decoded is q:
/// unbiased, omega = n / k - 1. With feedback they are not, and what is decoded contracts in
/// expectation, E |C(q) - q|^2 = (1 - k / n) |q|^2, which is why feedback is the default.
/// Products that overflow become the largest float. At most 2^32 - 1 elements.
/// Source: Stich et al. 2018; Wangni et al. 2018.
Status RegisterRandomk(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "randomk";
  info.wire_id = wire_id::kRandomk;
  info.description = "k elements that a seed chooses for all workers";
  info.source = "Stich et al. 2018; Wangni et al. 2018";
  info.parameters = {RatioParameter("1/32"), KParameter(), ValueParameter("fp32")};
  info.create = CreateRandomk;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
