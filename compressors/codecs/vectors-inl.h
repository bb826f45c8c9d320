// What the kernel files share. Included once for each target, after foreach_target.h: its guard
// toggles with the target.
#if defined(GRADWIRE_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_VECTORS_INL_H_
#undef GRADWIRE_VECTORS_INL_H_
#else
#define GRADWIRE_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/base/bytes.h"
#include "compressors/codecs/draws.h"

// Vectors where there are some; the scalar code after each vector loop handles the tail, and
// everything where there are none. Both do the same arithmetic in the same order.
#undef GRADWIRE_VECTORS
#if HWY_TARGET == HWY_SCALAR
#define GRADWIRE_VECTORS 0
#else
#define GRADWIRE_VECTORS 1
#endif

// F16C rounds as float16 is specified here and ignores the denormal mode.
#undef GRADWIRE_NATIVE_HALF
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
#define GRADWIRE_NATIVE_HALF 1
#else
#define GRADWIRE_NATIVE_HALF 0
#endif

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr float kMaxFinite = std::numeric_limits<float>::max();
constexpr std::size_t kLanes = 16;

inline bool Finite(float value) { return std::fabs(value) <= kMaxFinite; }

#if GRADWIRE_VECTORS
using D = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<D>;
using DI = hn::RebindToSigned<D>;
using D16 = hn::Rebind<std::uint16_t, D>;
using V = hn::Vec<D>;
using VU = hn::Vec<DU>;
using M = hn::Mask<D>;
constexpr D d;
constexpr DU du;
constexpr DI di;
constexpr D16 d16;
constexpr std::size_t N = hn::MaxLanes(d);
static_assert(N <= kLanes && kLanes % N == 0, "lanes of a vector divide the lanes of a block");

/// Any address: through vectors of bytes.
template <typename DX>
HWY_INLINE hn::Vec<DX> LoadBytes(DX dx, const std::byte* from) {
  const hn::Repartition<std::uint8_t, DX> d8;
  return hn::BitCast(dx, hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(from)));
}
template <typename DX, typename VX>
HWY_INLINE void StoreBytes(DX, VX v, std::byte* to) {
  const hn::Repartition<std::uint8_t, DX> d8;
  hn::StoreU(hn::BitCast(d8, v), d8, reinterpret_cast<std::uint8_t*>(to));
}

HWY_INLINE M AllLanes() { return hn::Eq(hn::Zero(d), hn::Zero(d)); }
HWY_INLINE M FiniteLanes(V v) { return hn::Le(hn::Abs(v), hn::Set(d, kMaxFinite)); }

/// The bits without the sign: ordered as the magnitudes are, NaN above infinity above all others.
HWY_INLINE hn::Vec<DI> Magnitude(V v) {
  return hn::And(hn::BitCast(di, v), hn::Set(di, 0x7fffffff));
}

/// True where the sign bit is set, -0 too. (IfNegativeThenElse is not used: for SSSE3 in Highway
/// 1.0.3 it picks bit by bit.)
HWY_INLINE hn::Mask<DI> SignBits(V v) { return hn::Lt(hn::BitCast(di, v), hn::Zero(di)); }

/// Bit i = lane i. Loads no wider than what was stored, which compilers then keep in registers.
HWY_INLINE std::uint32_t MaskBits(hn::Mask<DI> mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(di, mask, bytes);
  if constexpr (N > 8) return LoadLe<std::uint16_t>(bytes);
  return bytes[0];
}

/// A constant that the compiler does not know. Where registers are short g++ 12 makes vectors of
/// known ones anew in each round of a loop, with two shuffles each; others it keeps in memory,
/// which costs next to nothing.
HWY_INLINE std::uint32_t Hidden(std::uint32_t constant) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  asm("" : "+r"(constant));
#endif
  return constant;
}

/// What DrawMixes multiplies and mixes with; make one before a loop.
struct DrawVectors {
  explicit DrawVectors(const DrawKey& key)
      : first(hn::Set(du, Hidden(0x7feb352d))),
        second(hn::Set(du, Hidden(0x846ca68b))),
        k1(hn::Set(du, key.k1 ^ key.k1 >> 15)) {}
  VU first;
  VU second;
  VU k1;  // and its share of the shift that follows it
};

/// x for each lane's c, where word(c) of draws.h is x ^ x >> 16: the high halves of both are the
/// same. `product` is c * kDrawStep + k0.
HWY_INLINE VU DrawMixes(VU product, const DrawVectors& with) {
  const VU x = hn::Mul(hn::Xor(product, hn::ShiftRight<16>(product)), with.first);
  return hn::Mul(hn::Xor3(hn::ShiftRight<15>(x), x, with.k1), with.second);
}
/// word(c).
HWY_INLINE VU DrawWords(VU product, const DrawVectors& with) {
  const VU x = DrawMixes(product, with);
  return hn::Xor(x, hn::ShiftRight<16>(x));
}
HWY_INLINE VU DrawWords(VU product, const DrawKey& key) {
  return DrawWords(product, DrawVectors(key));
}
/// The products of counters first, first + 1, ...; add kDrawStep * lanes to go on.
HWY_INLINE VU DrawProducts(std::uint32_t first, const DrawKey& key) {
  const VU counters = hn::Add(hn::Iota(du, 0), hn::Set(du, first));
  return hn::Add(hn::Mul(counters, hn::Set(du, kDrawStep)), hn::Set(du, key.k0));
}
#endif  // GRADWIRE_VECTORS

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
