#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "common/base/random.h"
#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/sparse_format.h"
#include "compressors/codecs/sparse_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

/// Of 0.1 % this has 8 above the cut, enough to aim; more would cost more than it saves.
constexpr std::size_t kMaxSamples = 8192;
/// Samples come in runs of a cache line.
constexpr std::size_t kSampleRun = 16;
/// A unit of this size is not sampled: all that is not zero is a candidate.
constexpr std::size_t kUnsampled = 16384;

std::uint32_t AbsBits(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffff; }

/// One thread's working memory, kept from call to call: it grows to what the largest unit needs
/// (24 bytes a kept element and 240 KiB, less for small units) and no further.
struct Scratch {
  void Reserve(std::size_t wanted) {
    if (wanted <= capacity) return;
    indices = std::make_unique_for_overwrite<std::uint32_t[]>(wanted);
    values = std::make_unique_for_overwrite<float[]>(wanted);
    bits = std::make_unique_for_overwrite<std::uint32_t[]>(wanted);
    capacity = wanted;
  }
  std::size_t capacity = 0;
  std::unique_ptr<std::uint32_t[]> indices;  // of candidates
  std::unique_ptr<float[]> values;           // of candidates; of the samples before
  std::unique_ptr<std::uint32_t[]> bits;     // magnitudes among which a cut is looked for
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

/// Where the k largest end: everything above `bits` is kept, and the first `equals` of its equals.
struct Cut {
  std::uint32_t bits = 0;
  std::size_t equals = 0;
};

/// The cut of some values, k from 1 to values.size(): counts them in bins between the smallest and
/// the largest magnitude, and again within the bin that the cut is in, at most three times.
/// `bits` is working memory of the same size.
Cut CutOf(std::span<const float> values, std::size_t k, std::uint32_t* bits) {
  constexpr int kBinBits = 11;
  std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) bits[i] = AbsBits(values[i]);
  while (true) {
    std::int32_t least = std::numeric_limits<std::int32_t>::max();  // signed ones are vectorized
    std::int32_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      least = std::min(least, static_cast<std::int32_t>(bits[i]));
      most = std::max(most, static_cast<std::int32_t>(bits[i]));
    }
    const auto low = static_cast<std::uint32_t>(least);
    if (least == most) return {low, k};
    const auto range_bits =
        static_cast<int>(std::bit_width(static_cast<std::uint32_t>(most) - low));
    const int shift = std::max(range_bits - kBinBits, 0);
    std::array<std::uint32_t, std::size_t{1} << kBinBits> counts{};
    for (std::size_t i = 0; i < count; ++i) ++counts[(bits[i] - low) >> shift];
    std::uint32_t bin = (static_cast<std::uint32_t>(most) - low) >> shift;
    while (counts[bin] < k) k -= counts[bin--];
    std::size_t left = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t own = bits[i];
      bits[left] = own;
      left += (own - low) >> shift == bin ? 1 : 0;
    }
    count = left;
  }
}

/// Finds the k largest magnitudes of a unit that is given block by block.
/// Candidates are all that reach a threshold. Where they become too many, the k-th largest of them
/// is a threshold that the result will reach as well, so the rest goes. Each such cut takes time in
/// proportion to what it drops, so any order of values takes linear time. The first threshold may
/// be a guess: with too high a one fewer than k are found, and Done() says so.
class LargestFinder {
 public:
  /// k from 1 to n.
  LargestFinder(std::size_t k, std::size_t n, Scratch& scratch)
      : k_(k), limit_(std::min(n, 2 * k + kUnsampled)), scratch_(scratch) {
    scratch.Reserve(limit_ + kBlockElements);
  }

  void Begin(std::uint32_t threshold) {
    threshold_ = threshold;
    found_ = 0;
  }

  /// Looks at the next values, q = input + alpha * residual (which becomes q) or input alone.
  /// Returns whether they are finite.
  bool Add(const float* input, float* residual, float alpha, std::size_t offset,
           std::size_t count) {
    const kernels::Collected collected = kernels::CollectAtLeast(
        input, residual, alpha, count, threshold_, static_cast<std::uint32_t>(offset),
        scratch_.indices.get() + found_, scratch_.values.get() + found_);
    found_ += collected.found;
    // Later ones that are equal to the cut would have higher indices than k others.
    if (found_ > limit_) threshold_ = KeepLargest() + 1;
    return collected.finite;
  }

  /// Returns whether the k largest were found; indices() and values() are they then.
  bool Done() {
    if (found_ < k_) return false;
    if (found_ > k_) KeepLargest();
    return true;
  }

  /// Ascending. Valid until the scratch is used again.
  std::span<const std::uint32_t> indices() const { return {scratch_.indices.get(), found_}; }
  std::span<const float> values() const { return {scratch_.values.get(), found_}; }

 private:
  /// Drops all but the k largest, of equals the higher indices. Returns the least magnitude left.
  std::uint32_t KeepLargest() {
    std::uint32_t* const indices = scratch_.indices.get();
    float* const values = scratch_.values.get();
    Cut cut = CutOf(this->values(), k_, scratch_.bits.get());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < found_; ++i) {
      const float value = values[i];
      const std::uint32_t bits = AbsBits(value);
      const std::size_t equal = bits == cut.bits && cut.equals != 0 ? 1 : 0;
      indices[kept] = indices[i];
      values[kept] = value;
      kept += (bits > cut.bits ? 1 : 0) + equal;
      cut.equals -= equal;
    }
    assert(kept == k_);
    found_ = kept;
    return cut.bits;
  }

  const std::size_t k_;
  const std::size_t limit_;
  Scratch& scratch_;
  std::uint32_t threshold_ = 0;
  std::size_t found_ = 0;
};

/// A magnitude that a few more than k elements of q should reach, from a sample of them; at least
/// 1, so that zeros are not collected where there are enough others. Only the speed depends on it.
std::uint32_t AimThreshold(BlockSource& input, const float* residual, float alpha, std::size_t n,
                           std::size_t k, Scratch& scratch) {
  if (n <= kUnsampled) return 1;
  const std::size_t wanted = std::min(kMaxSamples, 32 * (n / k + 1)) / kSampleRun * kSampleRun;
  const double above =
      static_cast<double>(k) * static_cast<double>(wanted) / static_cast<double>(n);
  // Low by a third and two standard deviations, since too few means to begin again.
  const auto rank = static_cast<std::size_t>(1.3 * above + 2 * std::sqrt(above) + 2);
  if (rank >= wanted) return 1;
  // Of one block in sixteen, since a source may have to compute a block to show some of it. Blocks
  // and runs are anywhere in their stretch, since tensors have periods of their own.
  const std::size_t runs = wanted / kSampleRun;
  const std::size_t whole_blocks = n / kBlockElements;
  const std::size_t blocks = std::min(std::max<std::size_t>(whole_blocks / 16, 4), runs);
  std::size_t sampled = 0;
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::size_t first = i * whole_blocks / blocks;
    const std::size_t size = (i + 1) * whole_blocks / blocks - first;
    const std::size_t offset = (first + Mix64(i) % size) * kBlockElements;
    const float* const block = input.Block(offset, kBlockElements);
    const std::size_t runs_here = (i + 1) * runs / blocks - i * runs / blocks;
    const std::size_t stretch = kBlockElements / runs_here;
    for (std::size_t run = 0; run < runs_here; ++run) {
      const std::size_t at = run * stretch + Mix64(sampled) % (stretch - kSampleRun + 1);
      float* const to = scratch.values.get() + sampled;
      for (std::size_t j = 0; j < kSampleRun; ++j) {
        to[j] =
            residual == nullptr ? block[at + j] : block[at + j] + alpha * residual[offset + at + j];
      }
      sampled += kSampleRun;
    }
  }
  assert(sampled == wanted);
  const std::span<const float> samples(scratch.values.get(), sampled);
  return std::max(CutOf(samples, rank, scratch.bits.get()).bits, 1U);
}

/// Keeps the k elements of the largest magnitude. Under feedback the residual is explicit: the one
/// pass that looks for them adds the input to it, and what is kept is taken off.
class TopkCodec final : public Compressor {
 public:
  TopkCodec(KeptCount kept, kernels::CastFormat value, IndexFormat index)
      : kept_(kept), format_("topk", value, index) {}

  std::string_view name() const override { return "topk"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kContractive;
    traits.fixed_size = format_.index() == IndexFormat::kU32;
    traits.block_access = false;
    traits.feedback_by_default = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    const std::size_t k = kept_.Of(n);
    const std::size_t values = k * format_.value_bytes();
    if (format_.index() == IndexFormat::kU32) return values + k * sizeof(std::uint32_t);
    // The gaps add up to n - k at most, so none is wider than that.
    const std::size_t width =
        std::min<std::size_t>(kMaxGapWidth, std::size_t(std::bit_width(n - k)));
    const std::size_t whole = k / kGapBlock * (1 + kGapBlock * width / 8);
    const std::size_t last = k % kGapBlock;
    return values + whole + (last == 0 ? 0 : 1 + (last * width + 7) / 8);
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    GRADWIRE_RETURN_IF_ERROR(CheckSparseElements(name(), n));
    Encoded encoded;
    if (n == 0) return encoded;
    const ScopedFloatMode ieee;
    Scratch& scratch = ThreadScratch();
    float* const q = residual == nullptr ? nullptr : residual->values.data();
    const std::size_t k = kept_.Of(n);
    LargestFinder finder(k, n, scratch);
    finder.Begin(AimThreshold(input, q, context.alpha, n, k, scratch));
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      float* const block = q == nullptr ? nullptr : q + offset;
      const bool finite =
          finder.Add(input.Block(offset, count), block, context.alpha, offset, count);
      encoded.finite = encoded.finite && finite;
    });
    if (!encoded.finite) return encoded;
    if (!finder.Done()) {
      // Aimed too high, or fewer than k are not zero.
      finder.Begin(0);
      ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
        finder.Add(q == nullptr ? input.Block(offset, count) : q + offset, nullptr, 1, offset,
                   count);
      });
      const bool found = finder.Done();
      assert(found);
      static_cast<void>(found);
    }

    kernels::EncodeCast(format_.value(), finder.values().data(), nullptr, 1, k, output.data());
    std::byte* const values_end = output.data() + k * format_.value_bytes();
    if (q != nullptr) TakeOff(output.data(), finder, q);
    const std::byte* const end = format_.WriteIndices(finder.indices(), values_end);
    encoded.payload_bytes = static_cast<std::size_t>(end - output.data());
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    return format_.Validate(payload, 0, kept_.Of(n), n);
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    const ScopedFloatMode ieee;
    return format_.Decode(payload, 0, kept_.Of(output.size()), output);
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    return format_.DecodeAdd(payload, 0, kept_.Of(accumulator.size()), accumulator);
  }

  /// Right for any range, but reads the whole payload.
  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    format_.DecodeAddRange(payload, 0, kept_.Of(n), n, offset, accumulator);
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  /// e <- q - C(q) of what was kept. The finder has its q, so that e need not be read.
  void TakeOff(const std::byte* payload, const LargestFinder& finder, float* e) const {
    std::array<float, 1024> decoded;
    const std::size_t k = finder.values().size();
    for (std::size_t begin = 0; begin < k; begin += decoded.size()) {
      const std::size_t count = std::min(decoded.size(), k - begin);
      kernels::DecodeCast(format_.value(), payload + begin * format_.value_bytes(), count,
                          decoded.data());
      const float* const q = finder.values().data() + begin;
      const std::uint32_t* const indices = finder.indices().data() + begin;
      for (std::size_t i = 0; i < count; ++i) e[indices[i]] = q[i] - decoded[i];
    }
  }

  const KeptCount kept_;
  const SparseFormat format_;
};

constexpr double kDefaultRatio = 0.001;

Result<std::unique_ptr<const Compressor>> CreateTopk(const Parameters& parameters) {
  const Result<KeptCount> kept = KeptCountOf("topk", parameters, kDefaultRatio);
  if (!kept.ok()) return kept.status();
  return std::unique_ptr<const Compressor>(
      std::make_unique<TopkCodec>(*kept, ValueOf(parameters), IndexOf(parameters)));
}

}  // namespace

/// Keeps the k largest magnitudes, exactly; of equals the lower index.
/// Layout: that of SparseFormat. Biased; delta >= k / n with f32 values. At most 2^32 - 1 elements.
/// Memory: see Scratch; nothing is allocated once a thread has seen its largest unit.
/// Source: Aji and Heafield 2017; Stich et al. 2018.
Status RegisterTopk(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "topk";
  info.wire_id = wire_id::kTopk;
  info.description = "the k elements of the largest magnitude";
  info.source = "Aji and Heafield 2017; Stich et al. 2018";
  info.parameters = {RatioParameter("0.001"), KParameter(), ValueParameter("fp16"),
                     IndexParameter()};
  info.create = CreateTopk;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
