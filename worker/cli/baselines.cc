#include "worker/cli/baselines.h"

#include <cstring>

// Compiled with -O3 in every build type, see CMakeLists.txt.

namespace gradwire::baselines {
namespace {

// Not the kernels' own loop (DecodeAddCast of kF32): a yardstick that shares code with what it
// measures would move with it. The restrict says what is true here and spares the loop a check.
void AddAnywhere(float* __restrict a, const float* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] += b[i];
}

#if defined(__x86_64__)
// Function attributes rather than files with -march: those would let the linker keep an inline
// function for everybody that only new machines can run.
[[gnu::target("avx2")]] void AddAvx2(float* __restrict a, const float* __restrict b,
                                     std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] += b[i];
}

[[gnu::target("avx512f")]] void AddAvx512(float* __restrict a, const float* __restrict b,
                                          std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] += b[i];
}
#endif

}  // namespace

Add AddFor([[maybe_unused]] std::string_view target) {
#if defined(__x86_64__)
  if (target.substr(0, 4) == "AVX3") return AddAvx512;
  if (target == "AVX2") return AddAvx2;
#endif
  return AddAnywhere;
}

void Copy(float* to, const float* from, std::size_t n) { std::memcpy(to, from, n * sizeof(float)); }

void ScatterAdd(float* accumulator, const std::uint32_t* indices, const float* values,
                std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) accumulator[indices[i]] += values[i];
}

}  // namespace gradwire::baselines
