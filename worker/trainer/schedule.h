#pragma once

#include <algorithm>
#include <cstdint>

namespace gradwire::trainer {

/// The learning rate over a run: rises linearly over the first `warmup_steps`, then falls along
/// half a cosine and is 0 at `total_steps`, so that what error feedback still holds back at the end
/// weighs nothing.
struct LearningRate {
  double peak = 0.0;
  std::uint64_t warmup_steps = 0;
  std::uint64_t total_steps = 0;

  /// The rate for step `step`, counted from 0. Exactly 0 from total_steps on.
  double At(std::uint64_t step) const;
};

/// A twentieth of the run, at most 100 steps: enough to get momentum going without losing the short
/// runs to it.
inline std::uint64_t DefaultWarmup(std::uint64_t total_steps) {
  return std::min<std::uint64_t>(100, total_steps / 20);
}

}  // namespace gradwire::trainer
