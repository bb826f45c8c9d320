#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "compressors/methods/kernels.h"
#include "compressors/methods/method.h"

namespace gradwire {

/// The parameters of Adam and its kin, and what follows from them in a step.
struct AdamParameters {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;

  static AdamParameters From(const Parameters& given) {
    AdamParameters p;
    p.beta1 = given.Number("beta1");
    p.beta2 = given.Number("beta2");
    p.epsilon = given.Number("eps");
    p.weight_decay = given.Number("weight_decay");
    if (given.Has("bias_correction")) p.bias_correction = given.Bool("bias_correction");
    return p;
  }

  /// `updates`: t, counted from 1; 0: without the bias correction.
  method_kernels::AdamTerms Terms(std::uint64_t updates, bool decays) const {
    method_kernels::AdamTerms terms;
    terms.beta1 = static_cast<float>(beta1);
    terms.rest1 = static_cast<float>(1.0 - beta1);
    terms.beta2 = static_cast<float>(beta2);
    terms.rest2 = static_cast<float>(1.0 - beta2);
    if (bias_correction && updates > 0) {
      terms.m_weight = static_cast<float>(Correction(beta1, updates));
      terms.v_weight = static_cast<float>(Correction(beta2, updates));
    }
    terms.epsilon = static_cast<float>(epsilon);
    terms.decay = decays ? static_cast<float>(weight_decay) : 0.0F;
    return terms;
  }

  static double Correction(double beta, std::uint64_t updates) {
    return 1.0 / (1.0 - std::pow(beta, static_cast<double>(updates)));
  }
};

/// phi(|x|) / |direction|, with phi the identity clipped to [low, high]; the plain direction, so 1,
/// where a norm is 0 or the ratio is no float.
struct TrustRatio {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();

  static TrustRatio From(const Parameters& given) {
    TrustRatio ratio;
    if (given.Has("norm_low")) ratio.low = given.Number("norm_low");
    if (given.Has("norm_high")) ratio.high = given.Number("norm_high");
    return ratio;
  }

  double Of(double parameters_squared, double direction_squared) const {
    if (!(parameters_squared > 0) || !(direction_squared > 0)) return 1;
    const double ratio =
        std::clamp(std::sqrt(parameters_squared), low, high) / std::sqrt(direction_squared);
    return ratio <= double{std::numeric_limits<float>::max()} ? ratio : 1;
  }
};

/// A factor as the kernels take it, the largest float where it is beyond all.
inline float Factor(double factor) {
  return static_cast<float>(std::min(factor, double{std::numeric_limits<float>::max()}));
}

}  // namespace gradwire
