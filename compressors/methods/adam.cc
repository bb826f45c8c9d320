// Adam and its kin that send the raw gradient.
#include <cmath>
#include <memory>

#include "compressors/methods/adam_terms.h"
#include "compressors/methods/builtin.h"
#include "compressors/methods/kernels.h"

namespace gradwire {
namespace {

using method_kernels::AdamTerms;
using method_kernels::Squares;

/// Moments of p, then x <- x - rate (m^ / (sqrt(v^) + eps) + lambda x).
/// Floor: 28 B an element (reads p, m, v, x; writes m, v, x).
class AdamW final : public Method {
 public:
  explicit AdamW(const Parameters& given) : adam_(AdamParameters::From(given)) {}

  MethodTraits traits() const override { return {}; }
  std::size_t num_arrays() const override { return 2; }
  void Send(TensorState&, std::span<float>) const override {}
  void Freeze(TensorState&) const override {}
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    method_kernels::UpdateAdam(parameters.size(), adam_.Terms(state.updates, state.decays),
                               static_cast<float>(rate), pulled.data(), state.arrays[0].data(),
                               state.arrays[1].data(), parameters.data());
  }

 private:
  const AdamParameters adam_;
};

/// Moments of p, r = m^ / (sqrt(v^) + eps) + lambda x, x <- x - rate phi(|x|) / |r| r.
/// Floor: 40 B an element: the norms come before the first change of x, so x, m and v are read
/// twice.
class Lamb final : public Method {
 public:
  explicit Lamb(const Parameters& given)
      : adam_(AdamParameters::From(given)), trust_(TrustRatio::From(given)) {}

  MethodTraits traits() const override { return {}; }
  std::size_t num_arrays() const override { return 2; }
  void Send(TensorState&, std::span<float>) const override {}
  void Freeze(TensorState&) const override {}
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    const std::size_t n = parameters.size();
    const AdamTerms terms = adam_.Terms(state.updates, state.decays);
    float* const m = state.arrays[0].data();
    float* const v = state.arrays[1].data();
    const Squares sums =
        method_kernels::LambMoments(n, terms, pulled.data(), m, v, parameters.data());
    const double ratio = trust_.Of(sums.parameters, sums.direction);
    method_kernels::ApplyDirection(n, terms, Factor(rate * ratio), m, v, parameters.data());
  }

 private:
  const AdamParameters adam_;
  const TrustRatio trust_;
};

/// g = p / (|p| + eps), moments of g, r = m^ / (sqrt(v^) + eps) + lambda x, c with g in place of
/// m^, x <- x - rate phi(|x|) (beta1 r / |r| + (1 - beta1) c / |c|).
/// Floor: 48 B an element: 4 for |p|, 24 for the moments and norms, 20 for the step.
class Lans final : public Method {
 public:
  Lans(const Parameters& given, bool needs_two_way)
      : adam_(AdamParameters::From(given)),
        trust_(TrustRatio::From(given)),
        needs_two_way_(needs_two_way) {}

  MethodTraits traits() const override {
    MethodTraits traits;
    traits.needs_two_way = needs_two_way_;
    traits.needs_skip = true;
    return traits;
  }
  std::size_t num_arrays() const override { return 2; }
  void Send(TensorState&, std::span<float>) const override {}
  void Freeze(TensorState&) const override {}
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    const std::size_t n = parameters.size();
    const AdamTerms terms = adam_.Terms(state.updates, state.decays);
    float* const m = state.arrays[0].data();
    float* const v = state.arrays[1].data();
    const double norm = std::sqrt(method_kernels::SumSquares(n, pulled.data()));
    const float scale = norm > 0 ? static_cast<float>(1.0 / (norm + adam_.epsilon)) : 1.0F;
    const Squares sums =
        method_kernels::LansMoments(n, terms, scale, pulled.data(), m, v, parameters.data());
    const double step = rate * adam_.beta1 * trust_.Of(sums.parameters, sums.direction);
    const double gradient_step =
        rate * (1.0 - adam_.beta1) * trust_.Of(sums.parameters, sums.gradient_direction);
    method_kernels::ApplyBothDirections(n, terms, scale, Factor(step), Factor(gradient_step),
                                        pulled.data(), m, v, parameters.data());
  }

 private:
  const AdamParameters adam_;
  const TrustRatio trust_;
  const bool needs_two_way_;
};

std::vector<ParameterInfo> LambParameters() {
  return {Beta1Parameter(),         Beta2Parameter(),
          EpsilonParameter("1e-6"), WeightDecayParameter("0.01"),
          NormLowParameter(),       NormHighParameter()};
}

}  // namespace

MethodInfo AdamWMethod() {
  return {"adamw",
          "Adam with decoupled weight decay",
          "Loshchilov, Hutter 2019",
          {Beta1Parameter(), Beta2Parameter(), EpsilonParameter("1e-8"),
           WeightDecayParameter("0.01"), BiasCorrectionParameter()},
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<AdamW>(given));
          }};
}

MethodInfo LambMethod() {
  MethodInfo info{"lamb", "Adam's direction in the length of each tensor's parameters",
                  "You et al. 2020", LambParameters(),
                  [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
                    return std::unique_ptr<const Method>(std::make_unique<Lamb>(given));
                  }};
  info.parameters.push_back(BiasCorrectionParameter());
  return info;
}

MethodInfo LansMethod() {
  return {"lans", "LAMB on normalized gradients, with a second term for the newest one",
          "Zheng et al. 2020", LambParameters(),
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<Lans>(given, false));
          }};
}

MethodInfo ClanMethod() {
  return {"clan", "lans behind compression in both directions", "Zheng et al. 2021",
          LambParameters(), [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<Lans>(given, true));
          }};
}

}  // namespace gradwire
