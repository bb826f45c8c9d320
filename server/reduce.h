#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/buffer_pool.h"
#include "common/base/status.h"
#include "common/wire/header.h"
#include "common/wire/plan_data.h"
#include "compressors/compressor.h"

namespace gradwire {

/// One rank's part of a round.
struct Contribution {
  enum class State { kAbsent, kPayload, kNonfinite };
  State state = State::kAbsent;
  Payload payload;
};

/// What a round's reduction works on. Payloads have passed validation.
struct ReduceInput {
  const Unit* unit = nullptr;
  std::span<const Contribution> contributions;  // [rank]
  const Compressor* uplink = nullptr;           // null: sums in the dtype itself (see below)
  const Compressor* downlink = nullptr;
  Residual* residual = nullptr;  // null: no feedback on the downlink
  GradientScale scale;           // of what was pushed, as far as the residual follows it
  /// Nobody has looked at what was pushed (`none`): the sum is looked at before the residual is
  /// used.
  bool sums_unseen_values = false;
  std::uint64_t round_seed = 0;  // RoundSeed of the job, key and round
  /// Both directions have the same compressor with the same parameters.
  bool same_both_ways = false;
};

/// What all workers get.
struct ReduceOutput {
  ReplyKind kind = ReplyKind::kResult;
  Payload payload;  // kNonfinite: the ranks at fault, u32 each; none if the sum overflowed
  std::size_t out_of_bound = 0;  // Encoded::out_of_bound of the reply, with feedback
};

/// Closes a round: adds the contributions in rank order from +0.0, divides once for an average,
/// adds the residual (brought to the scale of
/// the round before), and encodes once. One pass, block by block in the first-level cache, where
/// the uplink codec gives access to blocks and the downlink codec reads once; through a whole-unit
/// accumulator otherwise. Same bits.
/// A broadcast returns a copy of the root's payload.
/// Errors: InvalidArgument naming the overflow of an integer sum, or a broadcast with no root or
/// two. Internal if a codec refuses.
/// Threads: safe for different units.
Result<ReduceOutput> Reduce(const ReduceInput& input, BufferPool& pool);

}  // namespace gradwire
