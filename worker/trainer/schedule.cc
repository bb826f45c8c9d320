#include "worker/trainer/schedule.h"

#include <cmath>
#include <numbers>

namespace gradwire::trainer {

double LearningRate::At(std::uint64_t step) const {
  if (step >= total_steps) return 0.0;
  if (step < warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  const double done =
      static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  return peak * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace gradwire::trainer
