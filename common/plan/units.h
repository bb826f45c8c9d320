#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "common/wire/plan_data.h"
#include "compressors/feedback/residual_store.h"
#include "compressors/filters/covap.h"

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

/// The member that has the unit's element. Precondition: element < num_elements.
inline const UnitMember& MemberAt(const Unit& unit, std::uint64_t element) {
  std::size_t m = 0;
  while (element >= unit.members[m].unit_offset + unit.members[m].count) ++m;
  return unit.members[m];
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

/// True if the filter lets the unit go in this step; always without a filter.
inline bool IsActive(const Filter& filter, const Unit& unit, std::uint64_t step) {
  if (unit.filter_classes.empty()) return true;
  const std::size_t stage = filter.StageAt(step);
  return covap::IsActive(unit.filter_classes[stage], filter.stages[stage].interval, step);
}

/// The one class of `interval` that is sent in this step.
inline std::uint32_t ActiveClass(std::uint32_t interval, std::uint64_t step) {
  return static_cast<std::uint32_t>((interval - step % interval) % interval);
}

/// True if by this step the filter may have held something of the unit back.
inline bool MayHoldBack(const Filter& filter, const Unit& unit, std::uint64_t step) {
  if (unit.filter_classes.empty()) return false;
  for (const FilterStage& stage : filter.stages) {
    if (stage.first_step <= step && stage.interval > 1) return true;
  }
  return false;
}

/// The weight of what was held back. Precondition: the filter has stages.
inline float WeightAt(const Filter& filter, std::uint64_t step) {
  const FilterStage& stage = filter.stages[filter.StageAt(step)];
  return covap::Coefficient{stage.c0, stage.increment, stage.every}.At(step);
}

}  // namespace gradwire
