#include "common/base/random.h"

#include <cmath>
#include <numbers>
#include <random>

namespace gradwire {

std::uint64_t RandomId() {
  std::random_device device;
  std::uint64_t id = 0;
  while (id == 0) {
    id = (static_cast<std::uint64_t>(device()) << 32) | device();
  }
  return id;
}

double CounterRng::NextGaussian() {
  const double u = 1.0 - NextUniform();  // in (0, 1]: the logarithm is finite
  const double v = NextUniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace gradwire
