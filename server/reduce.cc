#include "server/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/wire/nonfinite.h"
#include "compressors/feedback/residual_store.h"

namespace gradwire {
namespace {

// The sum, and for an average its one division, produced block by block.
class SumSource final : public BlockSource {
 public:
  SumSource(const ReduceInput& input, PooledBuffer accumulator)
      : input_(input), n_(input.unit->num_elements), accumulator_(std::move(accumulator)) {
    if (!accumulator_.empty()) {
      whole_ = reinterpret_cast<float*>(accumulator_.bytes().data());
      std::memset(whole_, 0, n_ * sizeof(float));
    }
    divisor_ = input.unit->op == ReduceOp::kAverage ? static_cast<float>(input.contributions.size())
                                                    : 1.0F;
    exact_inverse_ = std::has_single_bit(input.contributions.size());
  }

  // Of the whole unit first: sparse codecs touch only what they kept.
  Status AddWhole() {
    for (std::size_t rank = 0; rank < input_.contributions.size(); ++rank) {
      GRADWIRE_RETURN_IF_ERROR(input_.uplink->DecodeAdd(input_.contributions[rank].payload.bytes,
                                                        PushContext(input_.round_seed, rank),
                                                        {whole_, n_}));
    }
    return Status::Ok();
  }

  const float* Block(std::size_t offset, std::size_t count) override {
    const std::span<float> block(scratch_.data(), count);
    if (whole_ != nullptr) {
      std::memcpy(block.data(), whole_ + offset, count * sizeof(float));
    } else {
      std::memset(block.data(), 0, count * sizeof(float));
      for (std::size_t rank = 0; rank < input_.contributions.size(); ++rank) {
        input_.uplink->DecodeAddRange(input_.contributions[rank].payload.bytes, n_,
                                      PushContext(input_.round_seed, rank), offset, block);
      }
    }
    if (divisor_ != 1.0F) Divide(block);
    return block.data();
  }

 private:
  void Divide(std::span<float> block) const {
    if (exact_inverse_) {
      // By a power of two the product is the quotient, bit for bit, and faster.
      const float inverse = 1.0F / divisor_;
      for (float& value : block) value *= inverse;
    } else {
      for (float& value : block) value /= divisor_;
    }
  }

  const ReduceInput& input_;
  const std::size_t n_;
  PooledBuffer accumulator_;
  float* whole_ = nullptr;
  float divisor_ = 1.0F;
  bool exact_inverse_ = false;
  alignas(64) std::array<float, kBlockElements> scratch_;
};

// True if a contribution that came without a mark (nobody looks at what `none` sends) is not
// finite.
bool HoldsNonfinite(const ReduceInput& input, std::size_t rank) {
  const Contribution& contribution = input.contributions[rank];
  const std::size_t n = input.unit->num_elements;
  if (input.uplink == nullptr && input.unit->dtype != DType::kFloat64) return false;
  if (input.uplink == nullptr) {
    for (std::size_t i = 0; i < n; ++i) {
      if (!std::isfinite(LoadLe<double>(contribution.payload.bytes.data() + i * sizeof(double)))) {
        return true;
      }
    }
    return false;
  }
  if (!input.uplink->traits().block_access) return false;  // their encode pass has looked
  std::array<float, kBlockElements> block;
  bool found = false;
  ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
    if (found) return;
    std::fill_n(block.begin(), count, 0.0F);
    input.uplink->DecodeAddRange(contribution.payload.bytes, n, PushContext(input.round_seed, rank),
                                 offset, {block.data(), count});
    found = !std::all_of(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(count),
                         [](float value) { return std::isfinite(value); });
  });
  return found;
}

bool IsFinite(BlockSource& source, std::size_t n) {
  bool finite = true;
  ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
    const float* block = source.Block(offset, count);
    finite = finite && std::all_of(block, block + count, [](float v) { return std::isfinite(v); });
  });
  return finite;
}

ReduceOutput VoidRound(const ReduceInput& input, BufferPool& pool) {
  std::vector<std::uint32_t> ranks;
  for (std::size_t rank = 0; rank < input.contributions.size(); ++rank) {
    const Contribution& contribution = input.contributions[rank];
    if (contribution.state == Contribution::State::kNonfinite ||
        (contribution.state == Contribution::State::kPayload && HoldsNonfinite(input, rank))) {
      ranks.push_back(static_cast<std::uint32_t>(rank));
    }
  }
  ReduceOutput output;
  output.kind = ReplyKind::kNonfinite;
  const std::size_t bytes = ranks.size() * sizeof(std::uint32_t);
  if (bytes > 0) {
    const PooledBuffer buffer = pool.Acquire(bytes);
    StoreNonfiniteRanks(ranks, buffer.bytes().data());
    output.payload = buffer.Share(bytes);
  }
  return output;
}

Result<ReduceOutput> ReduceFloat64(const ReduceInput& input, BufferPool& pool) {
  const std::size_t n = input.unit->num_elements;
  const PooledBuffer buffer = pool.Acquire(n * sizeof(double));
  std::byte* out = buffer.bytes().data();
  const double divisor =
      input.unit->op == ReduceOp::kAverage ? static_cast<double>(input.contributions.size()) : 1.0;
  bool finite = true;
  for (std::size_t i = 0; i < n; ++i) {
    double sum = 0.0;
    for (const Contribution& contribution : input.contributions) {
      sum += LoadLe<double>(contribution.payload.bytes.data() + i * sizeof(double));
    }
    sum /= divisor;
    finite = finite && std::isfinite(sum);
    StoreLe(out + i * sizeof(double), sum);
  }
  if (!finite) return VoidRound(input, pool);
  return ReduceOutput{ReplyKind::kResult, buffer.Share(n * sizeof(double)), 0};
}

template <typename T>
Result<ReduceOutput> ReduceInteger(const ReduceInput& input, BufferPool& pool) {
  const std::size_t n = input.unit->num_elements;
  const PooledBuffer buffer = pool.Acquire(n * sizeof(T));
  std::byte* out = buffer.bytes().data();
  const auto workers = static_cast<std::int64_t>(input.contributions.size());
  __extension__ using Wide = __int128;  // 65536 ranks of 63 bits never overflow it
  for (std::size_t i = 0; i < n; ++i) {
    Wide sum = 0;
    for (const Contribution& contribution : input.contributions) {
      sum += LoadLe<T>(contribution.payload.bytes.data() + i * sizeof(T));
    }
    if (input.unit->op == ReduceOp::kAverage) {
      const Wide quotient = sum / workers;
      sum = (sum % workers < 0) ? quotient - 1 : quotient;
    }
    if (sum < std::numeric_limits<T>::min() || sum > std::numeric_limits<T>::max()) {
      return InvalidArgument("the sum over ranks of element " + std::to_string(i) +
                             " does not fit " + std::string(DTypeName(input.unit->dtype)));
    }
    StoreLe(out + i * sizeof(T), static_cast<T>(sum));
  }
  return ReduceOutput{ReplyKind::kResult, buffer.Share(n * sizeof(T)), 0};
}

Result<ReduceOutput> ReduceBroadcast(const ReduceInput& input, BufferPool& pool) {
  const Contribution* root = nullptr;
  for (const Contribution& contribution : input.contributions) {
    if (contribution.payload.empty()) continue;
    if (root != nullptr) {
      std::string ranks;
      for (std::size_t rank = 0; rank < input.contributions.size(); ++rank) {
        if (input.contributions[rank].payload.empty()) continue;
        ranks += (ranks.empty() ? "" : " and ") + std::to_string(rank);
      }
      return InvalidArgument("ranks " + ranks + " both broadcast, expected one root");
    }
    root = &contribution;
  }
  if (root == nullptr) return InvalidArgument("no rank broadcasts, expected one root");
  // A copy, so that the root's memory is not held by a reply that is kept until the next round.
  const PooledBuffer reply = pool.Acquire(root->payload.size());
  std::memcpy(reply.bytes().data(), root->payload.bytes.data(), root->payload.size());
  return ReduceOutput{ReplyKind::kResult, reply.Share(root->payload.size()), 0};
}

}  // namespace

Result<ReduceOutput> Reduce(const ReduceInput& input, BufferPool& pool) {
  if (input.unit->op == ReduceOp::kBroadcast) return ReduceBroadcast(input, pool);
  for (const Contribution& contribution : input.contributions) {
    if (contribution.state == Contribution::State::kNonfinite) return VoidRound(input, pool);
  }
  if (input.uplink == nullptr) {
    switch (input.unit->dtype) {
      case DType::kFloat64:
        return ReduceFloat64(input, pool);
      case DType::kInt8:
        return ReduceInteger<std::int8_t>(input, pool);
      case DType::kUInt8:
        return ReduceInteger<std::uint8_t>(input, pool);
      case DType::kInt32:
        return ReduceInteger<std::int32_t>(input, pool);
      case DType::kInt64:
        return ReduceInteger<std::int64_t>(input, pool);
      default:
        return Internal("unit without an uplink codec");
    }
  }

  const std::size_t n = input.unit->num_elements;
  // A source that is read twice would be decoded twice.
  const bool by_block = input.uplink->traits().block_access &&
                        !(input.residual == nullptr && input.downlink->traits().reads_twice);
  SumSource source(input, by_block ? PooledBuffer() : pool.Acquire(n * sizeof(float)));
  if (!by_block) GRADWIRE_RETURN_IF_ERROR(source.AddWhole());

  if (input.residual != nullptr && input.sums_unseen_values && !IsFinite(source, n)) {
    return VoidRound(input, pool);  // before the encode pass touches the residual
  }
  if (input.residual != nullptr) BringToScale(*input.downlink, input.scale, *input.residual);
  const PooledBuffer reply = pool.Acquire(input.downlink->MaxEncodedSize(n));
  const CodecContext context =
      PullContext(input.round_seed, input.contributions.size(), input.same_both_ways);
  const auto encoded = input.downlink->Encode(source, n, context, input.residual, reply.bytes());
  if (!encoded.ok()) return encoded.status();
  if (!encoded->finite) {
    if (input.residual != nullptr) RestoreAfterVoidRound(source, *input.residual);
    return VoidRound(input, pool);
  }
  return ReduceOutput{ReplyKind::kResult, reply.Share(encoded->payload_bytes),
                      input.residual == nullptr ? 0 : encoded->out_of_bound};
}

}  // namespace gradwire
