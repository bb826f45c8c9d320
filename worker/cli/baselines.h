#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

/// What codecs are measured against: the loops that anybody would write, optimized whatever the
/// build type. Each is called through a function that the compiler cannot see into, so nothing is
/// left out. Threads: safe.
namespace gradwire::baselines {

using Add = void (*)(float* a, const float* b, std::size_t n);

/// a[i] += b[i], the arrays apart: a plain loop that the compiler vectorizes for the same machine
/// as the kernels' instruction set of that name (kernels::TargetName): 512 bits for AVX3 and later,
/// 256 for AVX2, else what every machine of this architecture has.
Add AddFor(std::string_view target);

/// memcpy.
void Copy(float* to, const float* from, std::size_t n);

/// accumulator[indices[i]] += values[i]: what a sparse codec's decode-add cannot do without.
void ScatterAdd(float* accumulator, const std::uint32_t* indices, const float* values,
                std::size_t count);

}  // namespace gradwire::baselines
