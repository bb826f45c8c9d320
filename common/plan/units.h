#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "common/wire/plan_data.h"
#include "compressors/feedback/residual_store.h"

namespace gradwire {

/// The unit's tensors as a person reads them: "'dense0.weight'[0:524288]", "3 tensors from
/// 'a.bias'".
inline std::string DescribeUnit(const Plan& plan, const Unit& unit) {
  const UnitMember& first = unit.members.front();
  const std::string& name = plan.tensors[first.tensor].name;
  if (unit.members.size() > 1) {
    return fmt::format("{} tensors from '{}'", unit.members.size(), name);
  }
  if (first.count == plan.tensors[first.tensor].num_elements()) return fmt::format("'{}'", name);
  return fmt::format("'{}'[{}:{}]", name, first.tensor_offset, first.tensor_offset + first.count);
}

/// The ranges of tensors that the unit's residual covers, in the unit's order.
inline std::vector<TensorRange> RangesOf(const Plan& plan, const Unit& unit) {
  std::vector<TensorRange> ranges;
  ranges.reserve(unit.members.size());
  for (const UnitMember& member : unit.members) {
    ranges.push_back({plan.tensors[member.tensor].name, member.tensor_offset, member.count});
  }
  return ranges;
}

/// True if the unit travels in its dtype's own bytes both ways and is summed in it: broadcasts,
/// integers (exact, the average floors) and fp64 under `none` in both directions.
inline bool IsTypedReduction(const Unit& unit, std::uint32_t phase) {
  if (unit.op == ReduceOp::kBroadcast || !IsFloat(unit.dtype)) return true;
  return unit.dtype == DType::kFloat64 && unit.phases[phase].uplink == "none" &&
         unit.phases[phase].downlink == "none";
}

}  // namespace gradwire
