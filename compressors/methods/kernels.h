#pragma once

#include <cstddef>

/// The inner loops of the methods, vectorized with Highway and dispatched at run time. Elements are
/// independent; sums of squares are in double, in 16 fixed lanes (element i in lane i mod 16) that
/// are added from lane 0 up, so every instruction set gives the same bits. Each allocates nothing
/// and expects the float mode of ScopedFloatMode. Arrays have n values at any address aligned to
/// floats and do not overlap. Threads: safe.
///
/// "B" in the comments: bytes read and written an element, which for tensors beyond the caches is
/// what bounds the speed.
namespace gradwire::method_kernels {

/// What the moments of Adam and its kin are made of: m <- beta1 m + rest1 g, v <- beta2 v + rest2
/// g^2, and the direction m_weight m / (sqrt(v_weight v) + epsilon) + decay x.
struct AdamTerms {
  float beta1 = 0;
  float rest1 = 0;  // 1 - beta1
  float beta2 = 0;
  float rest2 = 0;
  float m_weight = 1;  // 1 / (1 - beta1^t) with bias correction
  float v_weight = 1;
  float epsilon = 0;
  float decay = 0;
};

/// Sums of squares over a tensor.
struct Squares {
  double parameters = 0;          // x
  double direction = 0;           // r = m / (sqrt(v) + epsilon) + decay x, weights included
  double gradient_direction = 0;  // c = g / (sqrt(v) + epsilon) + decay x (LANS)
};

/// Not finite exactly where a value is not: squares of floats do not overflow in double.  4 B.
double SumSquares(std::size_t n, const float* values);

/// velocity <- momentum velocity + (pulled + decay x); x <- x - rate velocity.  20 B.
void UpdateSgd(std::size_t n, float rate, float momentum, float decay, const float* pulled,
               float* velocity, float* x);

/// Moments from `pulled`, then x <- x - rate r.  28 B.
void UpdateAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled, float* m,
                float* v, float* x);

/// Moments from g = gradient_scale pulled, and the sums. `gradient_direction` only if wanted.
/// 24 B.
Squares LambMoments(std::size_t n, const AdamTerms& terms, const float* pulled, float* m, float* v,
                    const float* x);
Squares LansMoments(std::size_t n, const AdamTerms& terms, float gradient_scale,
                    const float* pulled, float* m, float* v, const float* x);

/// x <- x - step r.  16 B.
void ApplyDirection(std::size_t n, const AdamTerms& terms, float step, const float* m,
                    const float* v, float* x);
/// x <- x - (step r + gradient_step c).  20 B.
void ApplyBothDirections(std::size_t n, const AdamTerms& terms, float gradient_scale, float step,
                         float gradient_step, const float* pulled, const float* m, const float* v,
                         float* x);

/// m <- momentum m + g where that is finite; g <- g + momentum m.  16 B.
void SendWithMomentum(std::size_t n, float momentum, float* gradient, float* m);
/// w <- momentum (w + decay x); x <- x - rate (pulled + w + decay x).  20 B.
void UpdateDistEf(std::size_t n, float rate, float momentum, float decay, const float* pulled,
                  float* w, float* x);

/// g <- scale (beta1 m + rest1 g) where v > 0, else 0; a g that is not finite stays so.  16 B.
void SendMoments(std::size_t n, float beta1, float rest1, float scale, float* gradient,
                 const float* m, const float* v);
/// m <- pulled where v > 0, else 0; x <- x - rate (m / (sqrt(v) + epsilon) + decay x).  20 B.
void UpdateFrozenAdam(std::size_t n, const AdamTerms& terms, float rate, const float* pulled,
                      float* m, const float* v, float* x);
/// Where v > 0: m' = unscale pulled, fresh <- beta2 fresh + rest2 ((m' - beta1 m) / rest1)^2, and
/// m <- m'; elsewhere m <- 0. Returns the largest v / fresh, 0 if v is 0 everywhere.  24 B.
float FrozenLambMoments(std::size_t n, const AdamTerms& terms, float unscale, const float* pulled,
                        float* m, const float* v, float* fresh);

}  // namespace gradwire::method_kernels
