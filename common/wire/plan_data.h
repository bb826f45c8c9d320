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
/// only appends tensors and units.
struct Plan {
  std::uint64_t version = 0;
  std::uint32_t num_workers = 0;
  std::uint32_t num_servers = 0;
  std::uint32_t lanes_per_server = 0;
  std::vector<TensorDeclaration> tensors;
  std::vector<Unit> units;

  friend bool operator==(const Plan&, const Plan&) = default;
};

}  // namespace gradwire
