#include "compressors/methods/kernels.h"

// This file is compiled once for each target: foreach_target.h includes it again with other
// instruction sets switched on. The targets are those of the codecs' kernels.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/methods/kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace gradwire::method_kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using M = hn::Mask<D>;
constexpr D d;
constexpr std::size_t N = hn::MaxLanes(d);
constexpr std::size_t kLanes = 16;
static_assert(N <= kLanes && kLanes % N == 0, "lanes of a vector divide the lanes of the sums");
constexpr std::size_t kVectors = kLanes / N;

HWY_INLINE V Set(float value) { return hn::Set(d, value); }
HWY_INLINE M Finite(V v) { return hn::Le(hn::Abs(v), Set(std::numeric_limits<float>::max())); }

/// 16 lanes of sums in double for each of kSums quantities. A square of a float is exact in double,
/// so a fused multiply-add rounds as a multiply and an add do.
template <std::size_t kSums>
class SumsOfSquares {
 public:
#if HWY_TARGET == HWY_SCALAR
  using Half = D;
  static constexpr std::size_t kHalves = 1;
#else
  using Half = hn::Half<D>;
  static constexpr std::size_t kHalves = 2;
#endif
  using D64 = hn::Rebind<double, Half>;

  SumsOfSquares() {
    for (auto& sum : lanes_) {
      for (auto& lanes : sum) lanes = hn::Zero(D64());
    }
  }
  HWY_INLINE void Add(std::size_t sum, std::size_t vector, V value) {
#if HWY_TARGET == HWY_SCALAR
    AddHalf(lanes_[sum][vector], value);
#else
    AddHalf(lanes_[sum][2 * vector], hn::LowerHalf(Half(), value));
    AddHalf(lanes_[sum][2 * vector + 1], hn::UpperHalf(Half(), value));
#endif
  }
  double Total(std::size_t sum) const {
    double total = 0;
    for (const auto& lanes : lanes_[sum]) {
      HWY_ALIGN double values[kLanes];
      hn::Store(lanes, D64(), values);
      for (std::size_t i = 0; i < hn::MaxLanes(D64()); ++i) total += values[i];
    }
    return total;
  }

 private:
  static HWY_INLINE void AddHalf(hn::Vec<D64>& lanes, hn::Vec<Half> value) {
    const auto wide = hn::PromoteTo(D64(), value);
    lanes = hn::MulAdd(wide, wide, lanes);
  }
  hn::Vec<D64> lanes_[kSums == 0 ? 1 : kSums][kVectors * kHalves];
};

/// Runs `body(in, out, squares)` over the elements, a vector at a time: it reads one value of each
/// array of `from`, gives one for each of `to` (which may be among `from`), and the values whose
/// squares are to be summed. What is missing in the last 16 elements is zeros.
template <std::size_t kSums, std::size_t kIn, std::size_t kOut, typename Body>
HWY_INLINE std::array<double, kSums> Pass(std::size_t n, const std::array<const float*, kIn>& from,
                                          const std::array<float*, kOut>& to, Body& body) {
  SumsOfSquares<kSums> sums;
  V in[kIn];
  V out[kOut == 0 ? 1 : kOut];
  V squares[kSums == 0 ? 1 : kSums];
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const std::size_t at = i + v * N;
      for (std::size_t a = 0; a < kIn; ++a) in[a] = hn::LoadU(d, from[a] + at);
      body(in, out, squares);
      for (std::size_t a = 0; a < kOut; ++a) hn::StoreU(out[a], d, to[a] + at);
      for (std::size_t s = 0; s < kSums; ++s) sums.Add(s, v, squares[s]);
    }
  }
  if (i < n) {
    HWY_ALIGN float first[kIn][kLanes] = {};
    HWY_ALIGN float last[kOut == 0 ? 1 : kOut][kLanes] = {};
    for (std::size_t a = 0; a < kIn; ++a) std::copy(from[a] + i, from[a] + n, first[a]);
    for (std::size_t v = 0; v < kVectors; ++v) {
      for (std::size_t a = 0; a < kIn; ++a) in[a] = hn::Load(d, first[a] + v * N);
      body(in, out, squares);
      for (std::size_t a = 0; a < kOut; ++a) hn::Store(out[a], d, last[a] + v * N);
      for (std::size_t s = 0; s < kSums; ++s) sums.Add(s, v, squares[s]);
    }
    for (std::size_t a = 0; a < kOut; ++a) std::copy(last[a], last[a] + (n - i), to[a] + i);
  }
  std::array<double, kSums> totals{};
  for (std::size_t s = 0; s < kSums; ++s) totals[s] = sums.Total(s);
  return totals;
}

template <std::size_t kCount>
using From = std::array<const float*, kCount>;
template <std::size_t kCount>
using To = std::array<float*, kCount>;

/// AdamTerms as vectors.
struct Terms {
  explicit Terms(const AdamTerms& t)
      : beta1(Set(t.beta1)),
        rest1(Set(t.rest1)),
        beta2(Set(t.beta2)),
        rest2(Set(t.rest2)),
        m_weight(Set(t.m_weight)),
        v_weight(Set(t.v_weight)),
        epsilon(Set(t.epsilon)),
        decay(Set(t.decay)) {}

  HWY_INLINE V NextM(V m, V g) const { return hn::Add(hn::Mul(beta1, m), hn::Mul(rest1, g)); }
  HWY_INLINE V NextV(V v, V g) const {
    return hn::Add(hn::Mul(beta2, v), hn::Mul(rest2, hn::Mul(g, g)));
  }
  HWY_INLINE V Divisor(V v) const { return hn::Add(hn::Sqrt(hn::Mul(v_weight, v)), epsilon); }
  HWY_INLINE V Decay(V x) const { return hn::Mul(decay, x); }
  HWY_INLINE V Direction(V m, V v, V x) const {
    return hn::Add(hn::Div(hn::Mul(m_weight, m), Divisor(v)), Decay(x));
  }
  V beta1, rest1, beta2, rest2, m_weight, v_weight, epsilon, decay;
};

struct NoBody {
  HWY_INLINE void operator()(const V* in, V*, V* squares) const { squares[0] = in[0]; }
};

double SumSquares(std::size_t n, const float* values) {
  NoBody body;
  return Pass<1>(n, From<1>{values}, To<0>{}, body)[0];
}

struct SgdBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V p = in[0], velocity = in[1], x = in[2];
    out[0] = hn::Add(hn::Mul(momentum, velocity), hn::Add(p, hn::Mul(decay, x)));
    out[1] = hn::Sub(x, hn::Mul(rate, out[0]));
  }
  V rate, momentum, decay;
};

void UpdateSgd(std::size_t n, float rate, float momentum, float decay, const float* pulled,
               float* velocity, float* x) {
  SgdBody body{Set(rate), Set(momentum), Set(decay)};
  Pass<0>(n, From<3>{pulled, velocity, x}, To<2>{velocity, x}, body);
}

struct AdamBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V p = in[0], x = in[3];
    out[0] = terms.NextM(in[1], p);
    out[1] = terms.NextV(in[2], p);
    out[2] = hn::Sub(x, hn::Mul(rate, terms.Direction(out[0], out[1], x)));
  }
  Terms terms;
  V rate;
};

void UpdateAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled, float* m,
                float* v, float* x) {
  AdamBody body{Terms(terms), Set(rate)};
  Pass<0>(n, From<4>{pulled, m, v, x}, To<3>{m, v, x}, body);
}

struct LambBody {
  HWY_INLINE void operator()(const V* in, V* out, V* squares) const {
    const V p = in[0], x = in[3];
    out[0] = terms.NextM(in[1], p);
    out[1] = terms.NextV(in[2], p);
    squares[0] = x;
    squares[1] = terms.Direction(out[0], out[1], x);
  }
  Terms terms;
};

Squares LambMoments(std::size_t n, const AdamTerms& terms, const float* pulled, float* m, float* v,
                    const float* x) {
  LambBody body{Terms(terms)};
  const auto sums = Pass<2>(n, From<4>{pulled, m, v, x}, To<2>{m, v}, body);
  return {sums[0], sums[1], 0};
}

/// r and c share one division: both are a numerator times 1 / (sqrt(v) + epsilon), plus decay x.
struct Directions {
  HWY_INLINE Directions(const Terms& terms, V g, V m, V v, V x) {
    const V inverse = hn::Div(Set(1.0F), terms.Divisor(v));
    const V decay = terms.Decay(x);
    r = hn::Add(hn::Mul(hn::Mul(terms.m_weight, m), inverse), decay);
    c = hn::Add(hn::Mul(g, inverse), decay);
  }
  V r, c;
};

struct LansBody {
  HWY_INLINE void operator()(const V* in, V* out, V* squares) const {
    const V g = hn::Mul(scale, in[0]), x = in[3];
    out[0] = terms.NextM(in[1], g);
    out[1] = terms.NextV(in[2], g);
    const Directions both(terms, g, out[0], out[1], x);
    squares[0] = x;
    squares[1] = both.r;
    squares[2] = both.c;
  }
  Terms terms;
  V scale;
};

Squares LansMoments(std::size_t n, const AdamTerms& terms, float gradient_scale,
                    const float* pulled, float* m, float* v, const float* x) {
  LansBody body{Terms(terms), Set(gradient_scale)};
  const auto sums = Pass<3>(n, From<4>{pulled, m, v, x}, To<2>{m, v}, body);
  return {sums[0], sums[1], sums[2]};
}

struct ApplyBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V x = in[2];
    out[0] = hn::Sub(x, hn::Mul(step, terms.Direction(in[0], in[1], x)));
  }
  Terms terms;
  V step;
};

void ApplyDirection(std::size_t n, const AdamTerms& terms, float step, const float* m,
                    const float* v, float* x) {
  ApplyBody body{Terms(terms), Set(step)};
  Pass<0>(n, From<3>{m, v, x}, To<1>{x}, body);
}

struct ApplyBothBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V x = in[3];
    const Directions both(terms, hn::Mul(scale, in[0]), in[1], in[2], x);
    out[0] = hn::Sub(x, hn::Add(hn::Mul(step, both.r), hn::Mul(gradient_step, both.c)));
  }
  Terms terms;
  V scale, step, gradient_step;
};

void ApplyBothDirections(std::size_t n, const AdamTerms& terms, float gradient_scale, float step,
                         float gradient_step, const float* pulled, const float* m, const float* v,
                         float* x) {
  ApplyBothBody body{Terms(terms), Set(gradient_scale), Set(step), Set(gradient_step)};
  Pass<0>(n, From<4>{pulled, m, v, x}, To<1>{x}, body);
}

struct DistEfSendBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V next = hn::Add(hn::Mul(momentum, in[1]), in[0]);
    out[0] = hn::Add(in[0], hn::Mul(momentum, next));
    out[1] = hn::IfThenElse(Finite(next), next, in[1]);
  }
  V momentum;
};

void SendWithMomentum(std::size_t n, float momentum, float* gradient, float* m) {
  DistEfSendBody body{Set(momentum)};
  Pass<0>(n, From<2>{gradient, m}, To<2>{gradient, m}, body);
}

struct DistEfBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V x = in[2];
    const V decayed = hn::Mul(decay, x);
    out[0] = hn::Mul(momentum, hn::Add(in[1], decayed));
    out[1] = hn::Sub(x, hn::Mul(rate, hn::Add(hn::Add(in[0], out[0]), decayed)));
  }
  V rate, momentum, decay;
};

void UpdateDistEf(std::size_t n, float rate, float momentum, float decay, const float* pulled,
                  float* w, float* x) {
  DistEfBody body{Set(rate), Set(momentum), Set(decay)};
  Pass<0>(n, From<3>{pulled, w, x}, To<2>{w, x}, body);
}

struct SendMomentsBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V g = in[0];
    const V next = hn::Mul(scale, hn::Add(hn::Mul(beta1, in[1]), hn::Mul(rest1, g)));
    const M kept = hn::Or(hn::Gt(in[2], hn::Zero(d)), hn::Not(Finite(g)));
    out[0] = hn::IfThenElseZero(kept, next);
  }
  V beta1, rest1, scale;
};

void SendMoments(std::size_t n, float beta1, float rest1, float scale, float* gradient,
                 const float* m, const float* v) {
  SendMomentsBody body{Set(beta1), Set(rest1), Set(scale)};
  Pass<0>(n, From<3>{gradient, m, v}, To<1>{gradient}, body);
}

struct FrozenAdamBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) const {
    const V v = in[1], x = in[2];
    out[0] = hn::IfThenElseZero(hn::Gt(v, hn::Zero(d)), in[0]);
    out[1] = hn::Sub(x, hn::Mul(rate, terms.Direction(out[0], v, x)));
  }
  Terms terms;
  V rate;
};

void UpdateFrozenAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled,
                      float* m, const float* v, float* x) {
  FrozenAdamBody body{Terms(terms), Set(rate)};
  Pass<0>(n, From<3>{pulled, v, x}, To<2>{m, x}, body);
}

struct FrozenLambBody {
  HWY_INLINE void operator()(const V* in, V* out, V*) {
    const V m = in[1], v = in[2], fresh = in[3];
    const M kept = hn::Gt(v, hn::Zero(d));
    out[0] = hn::IfThenElseZero(kept, hn::Mul(unscale, in[0]));
    const V recovered = hn::Div(hn::Sub(out[0], hn::Mul(terms.beta1, m)), terms.rest1);
    out[1] = hn::IfThenElseZero(kept, terms.NextV(fresh, recovered));
    largest = hn::Max(largest, hn::IfThenElseZero(kept, hn::Div(v, out[1])));
  }
  Terms terms;
  V unscale, largest;
};

float FrozenLambMoments(std::size_t n, const AdamTerms& terms, float unscale, const float* pulled,
                        float* m, const float* v, float* fresh) {
  FrozenLambBody body{Terms(terms), Set(unscale), hn::Zero(d)};
  Pass<0>(n, From<4>{pulled, m, v, fresh}, To<2>{m, fresh}, body);
  return hn::GetLane(hn::MaxOfLanes(d, body.largest));
}

}  // namespace gradwire::method_kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::method_kernels {

HWY_EXPORT(SumSquares);
HWY_EXPORT(UpdateSgd);
HWY_EXPORT(UpdateAdam);
HWY_EXPORT(LambMoments);
HWY_EXPORT(LansMoments);
HWY_EXPORT(ApplyDirection);
HWY_EXPORT(ApplyBothDirections);
HWY_EXPORT(SendWithMomentum);
HWY_EXPORT(UpdateDistEf);
HWY_EXPORT(SendMoments);
HWY_EXPORT(UpdateFrozenAdam);
HWY_EXPORT(FrozenLambMoments);

double SumSquares(std::size_t n, const float* values) {
  return HWY_DYNAMIC_DISPATCH(SumSquares)(n, values);
}

void UpdateSgd(std::size_t n, float rate, float momentum, float decay, const float* pulled,
               float* velocity, float* x) {
  HWY_DYNAMIC_DISPATCH(UpdateSgd)(n, rate, momentum, decay, pulled, velocity, x);
}

void UpdateAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled, float* m,
                float* v, float* x) {
  HWY_DYNAMIC_DISPATCH(UpdateAdam)(n, terms, rate, pulled, m, v, x);
}

Squares LambMoments(std::size_t n, const AdamTerms& terms, const float* pulled, float* m, float* v,
                    const float* x) {
  return HWY_DYNAMIC_DISPATCH(LambMoments)(n, terms, pulled, m, v, x);
}

Squares LansMoments(std::size_t n, const AdamTerms& terms, float gradient_scale,
                    const float* pulled, float* m, float* v, const float* x) {
  return HWY_DYNAMIC_DISPATCH(LansMoments)(n, terms, gradient_scale, pulled, m, v, x);
}

void ApplyDirection(std::size_t n, const AdamTerms& terms, float step, const float* m,
                    const float* v, float* x) {
  HWY_DYNAMIC_DISPATCH(ApplyDirection)(n, terms, step, m, v, x);
}

void ApplyBothDirections(std::size_t n, const AdamTerms& terms, float gradient_scale, float step,
                         float gradient_step, const float* pulled, const float* m, const float* v,
                         float* x) {
  HWY_DYNAMIC_DISPATCH(ApplyBothDirections)
  (n, terms, gradient_scale, step, gradient_step, pulled, m, v, x);
}

void SendWithMomentum(std::size_t n, float momentum, float* gradient, float* m) {
  HWY_DYNAMIC_DISPATCH(SendWithMomentum)(n, momentum, gradient, m);
}

void UpdateDistEf(std::size_t n, float rate, float momentum, float decay, const float* pulled,
                  float* w, float* x) {
  HWY_DYNAMIC_DISPATCH(UpdateDistEf)(n, rate, momentum, decay, pulled, w, x);
}

void SendMoments(std::size_t n, float beta1, float rest1, float scale, float* gradient,
                 const float* m, const float* v) {
  HWY_DYNAMIC_DISPATCH(SendMoments)(n, beta1, rest1, scale, gradient, m, v);
}

void UpdateFrozenAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled,
                      float* m, const float* v, float* x) {
  HWY_DYNAMIC_DISPATCH(UpdateFrozenAdam)(n, terms, rate, pulled, m, v, x);
}

float FrozenLambMoments(std::size_t n, const AdamTerms& terms, float unscale, const float* pulled,
                        float* m, const float* v, float* fresh) {
  return HWY_DYNAMIC_DISPATCH(FrozenLambMoments)(n, terms, unscale, pulled, m, v, fresh);
}

}  // namespace gradwire::method_kernels
#endif  // HWY_ONCE
