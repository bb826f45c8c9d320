#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/dtype.h"

namespace gradwire {

/// What becomes of the workers' contributions. The numbers are on the wire.
enum class ReduceOp : std::uint8_t { kAverage = 1, kSum = 2, kBroadcast = 3 };

std::string_view ReduceOpName(ReduceOp op);

/// What a worker says of a tensor before its first use. All workers must say the same.
struct TensorDeclaration {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::uint64_t> shape;  // empty: a scalar, one element
  std::int32_t priority = 0;         // higher goes first; front layers are the most urgent
  ReduceOp op = ReduceOp::kAverage;

  std::uint64_t num_elements() const {
    std::uint64_t n = 1;
    for (const std::uint64_t extent : shape) n *= extent;
    return n;
  }
  friend bool operator==(const TensorDeclaration&, const TensorDeclaration&) = default;
};

/// A stretch of a tensor and where it lies in its unit, in elements.
struct UnitMember {
  std::uint32_t tensor = 0;  // index into Plan::tensors
  std::uint64_t tensor_offset = 0;
  std::uint64_t unit_offset = 0;
  std::uint64_t count = 0;

  friend bool operator==(const UnitMember&, const UnitMember&) = default;
};

/// What becomes of what a direction has not sent. The numbers are on the wire.
enum class Feedback : std::uint8_t {
  kNone = 0,
  kEf = 1,    // it is added the next time
  kEfLr = 2,  // the same, times the learning rate of then over that of the next time
};

/// "none", "ef", "ef_lr"; else "invalid".
std::string_view FeedbackName(Feedback feedback);

/// How a unit is compressed from a step on. Compressors are in their written form,
/// "topk(ratio=0.01)".
struct Phase {
  std::uint64_t first_step = 0;
  std::string uplink = "none";
  std::string downlink = "none";
  Feedback uplink_feedback = Feedback::kNone;
  Feedback downlink_feedback = Feedback::kNone;

  bool has_feedback() const {
    return uplink_feedback != Feedback::kNone || downlink_feedback != Feedback::kNone;
  }
  /// True if a residual follows the learning rate.
  bool needs_rate() const {
    return uplink_feedback == Feedback::kEfLr || downlink_feedback == Feedback::kEfLr;
  }
  friend bool operator==(const Phase&, const Phase&) = default;
};

/// From a step on, a filtered unit is sent once in `interval` steps; with 1 in every step. What is
/// held back keeps the weight min(1, c0 + increment * floor(step / every)) when more is added.
struct FilterStage {
  std::uint64_t first_step = 0;
  std::uint32_t interval = 1;
  double c0 = 1;
  double increment = 0;
  std::uint64_t every = 1;

  friend bool operator==(const FilterStage&, const FilterStage&) = default;
};

/// The overlap-aware filter (docs/covap.md). A new version of a plan may append stages.
struct Filter {
  std::vector<FilterStage> stages;  // by first_step, the first is 0; none: there is no filter
  bool skips_inactive = false;      // the output of what is not sent is left alone, else zeros

  /// Index of the stage that holds at `step`. Precondition: there are stages.
  std::size_t StageAt(std::uint64_t step) const {
    std::size_t stage = 0;
    while (stage + 1 < stages.size() && stages[stage + 1].first_step <= step) ++stage;
    return stage;
  }
  friend bool operator==(const Filter&, const Filter&) = default;
};

/// What is compressed and sent together: a cut of one tensor or a fusion of small ones.
struct Unit {
  std::uint64_t key = 0;  // equals its index in Plan::units
  std::uint64_t num_elements = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kAverage;
  std::int32_t priority = 0;  // of its most urgent member
  std::uint32_t server = 0;
  std::uint32_t lane = 0;
  std::vector<UnitMember> members;
  std::vector<Phase> phases;  // by first_step, the first is 0
  /// [stage of the plan's filter]: the unit is sent in steps t with (class + t) mod interval = 0.
  /// Empty: not filtered, sent in every step.
  std::vector<std::uint32_t> filter_classes;

  std::uint64_t raw_bytes() const { return num_elements * SizeOf(dtype); }
  /// Index of the phase that holds at `step`.
  std::uint32_t PhaseAt(std::uint64_t step) const {
    std::uint32_t phase = 0;
    while (phase + 1 < phases.size() && phases[phase + 1].first_step <= step) ++phase;
    return phase;
  }
  friend bool operator==(const Unit&, const Unit&) = default;
};

/// What is communicated how. Made by the root from configuration and declarations; a new version
/// only appends tensors, units and stages of the filter.
struct Plan {
  std::uint64_t version = 0;
  std::uint32_t num_workers = 0;
  std::uint32_t num_servers = 0;
  std::uint32_t lanes_per_server = 0;
  std::vector<TensorDeclaration> tensors;
  std::vector<Unit> units;
  Filter filter;

  friend bool operator==(const Plan&, const Plan&) = default;
};

}  // namespace gradwire
