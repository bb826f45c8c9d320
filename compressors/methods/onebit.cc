// The methods that freeze their second moment after a warm-up and from then on send momenta.
#include <algorithm>
#include <cmath>
#include <memory>

#include "compressors/methods/adam_terms.h"
#include "compressors/methods/builtin.h"
#include "compressors/methods/kernels.h"

namespace gradwire {
namespace {

using method_kernels::AdamTerms;

MethodTraits FrozenTraits(std::uint64_t freeze_step) {
  MethodTraits traits;
  traits.pushes_state = true;
  traits.freeze_step = freeze_step;
  return traits;
}

/// v <- v^ of the last update: what the frozen phase divides by goes on where the warm-up ended.
/// Where v > 0 it is then at least floor^2 times the mean of those v: a sign codec gives every
/// element the same size, and one whose gradient was next to nothing would move by that over its
/// sqrt(v).
void FreezeSecondMoment(const AdamParameters& adam, double floor, TensorState& state) {
  const float weight = adam.Terms(state.updates, state.decays).v_weight;
  double sum = 0;
  std::size_t count = 0;
  for (float& v : state.arrays[1]) {
    v *= weight;
    sum += static_cast<double>(v);
    if (v > 0) ++count;
  }
  if (count == 0) return;
  const auto least = static_cast<float>(floor * floor * (sum / static_cast<double>(count)));
  for (float& v : state.arrays[1]) {
    if (v > 0) v = std::max(v, least);
  }
}

/// Warm-up: AdamW of the gradient. Then v stays, m_i = beta1 m + (1 - beta1) g is sent, m is what
/// comes back, and x <- x - rate (m / (sqrt(v) + eps) + lambda x). Where v = 0 at the freeze both
/// are 0.
/// Floor: 28 B an element to update in the warm-up; then 16 B to send (reads g, m, v; writes g) and
/// 20 B to update (reads p, v, x; writes m, x).
class OnebitAdam final : public Method {
 public:
  explicit OnebitAdam(const Parameters& given)
      : adam_(AdamParameters::From(given)),
        v_floor_(given.Number("v_floor")),
        freeze_step_(given.Integer("freeze_step")) {}

  MethodTraits traits() const override { return FrozenTraits(freeze_step_); }
  std::size_t num_arrays() const override { return 2; }
  void Send(TensorState& state, std::span<float> gradient) const override {
    if (!state.is_frozen) return;
    const AdamTerms terms = adam_.Terms(0, state.decays);
    method_kernels::SendMoments(gradient.size(), terms.beta1, terms.rest1, 1.0F, gradient.data(),
                                state.arrays[0].data(), state.arrays[1].data());
  }
  void Freeze(TensorState& state) const override { FreezeSecondMoment(adam_, v_floor_, state); }
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    const std::size_t n = parameters.size();
    float* const m = state.arrays[0].data();
    float* const v = state.arrays[1].data();
    if (state.is_frozen) {
      method_kernels::UpdateFrozenAdam(n, adam_.Terms(0, state.decays), static_cast<float>(rate),
                                       pulled.data(), m, v, parameters.data());
    } else {
      method_kernels::UpdateAdam(n, adam_.Terms(state.updates, state.decays),
                                 static_cast<float>(rate), pulled.data(), m, v, parameters.data());
    }
  }

 private:
  const AdamParameters adam_;
  const double v_floor_;
  const std::uint64_t freeze_step_;
};

/// Warm-up: LAMB of the gradient, and the running mean of its trust ratio. Then v and that mean
/// stay; scale m_i is sent, m is what comes back over scale, and x <- x - rate mean factor
/// (m / (sqrt(v) + eps) + lambda x), where the factor follows a second moment that is kept fresh.
/// Floor: 40 B an element to update in the warm-up; then 16 B to send and 40 B to update (reads p,
/// m, v, fresh; writes m, fresh; then reads m, v, x; writes x).
class OnebitLamb final : public Method {
 public:
  explicit OnebitLamb(const Parameters& given)
      : adam_(AdamParameters::From(given)),
        trust_(TrustRatio::From(given)),
        v_floor_(given.Number("v_floor")),
        freeze_step_(given.Integer("freeze_step")) {}

  MethodTraits traits() const override { return FrozenTraits(freeze_step_); }
  std::size_t num_arrays() const override { return 3; }

  void Send(TensorState& state, std::span<float> gradient) const override {
    if (!state.is_frozen) return;
    const AdamTerms terms = adam_.Terms(0, state.decays);
    method_kernels::SendMoments(gradient.size(), terms.beta1, terms.rest1,
                                static_cast<float>(state.numbers[kScale]), gradient.data(),
                                state.arrays[kM].data(), state.arrays[kV].data());
  }

  void Freeze(TensorState& state) const override {
    FreezeSecondMoment(adam_, v_floor_, state);
    state.arrays[kFresh] = state.arrays[kV];  // as long, so nothing is allocated
    state.numbers[kFactor] = 1;
    // Every tensor's momentum is sent with a mean square of 1, so that one scale fits all that
    // travel together.
    const std::vector<float>& m = state.arrays[kM];
    const double norm = std::sqrt(method_kernels::SumSquares(m.size(), m.data()));
    const double scale = std::sqrt(static_cast<double>(m.size())) / norm;
    // As a float both ways: what comes back is multiplied with its inverse.
    const bool is_usable = norm > 0 && scale <= kMostScale && scale >= 1 / kMostScale;
    state.numbers[kScale] = is_usable ? static_cast<double>(static_cast<float>(scale)) : 1.0;
  }

  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    const std::size_t n = parameters.size();
    float* const m = state.arrays[kM].data();
    float* const v = state.arrays[kV].data();
    if (state.is_frozen) {
      const AdamTerms terms = adam_.Terms(0, state.decays);
      const double largest = method_kernels::FrozenLambMoments(
          n, terms, static_cast<float>(1.0 / state.numbers[kScale]), pulled.data(), m, v,
          state.arrays[kFresh].data());
      // The root of the largest quotient is the largest quotient of roots.
      double& factor = state.numbers[kFactor];
      const double wanted = std::clamp(std::sqrt(largest), kLeastFactor, kMostFactor);
      factor = std::clamp(wanted, factor * (1 - kFactorChange), factor * (1 + kFactorChange));
      method_kernels::ApplyDirection(n, terms, Factor(rate * state.numbers[kRatio] * factor), m, v,
                                     parameters.data());
      return;
    }
    const AdamTerms terms = adam_.Terms(state.updates, state.decays);
    const auto sums = method_kernels::LambMoments(n, terms, pulled.data(), m, v, parameters.data());
    const double ratio = trust_.Of(sums.parameters, sums.direction);
    double& mean = state.numbers[kRatio];
    mean = state.updates == 1 ? ratio : kRatioMemory * mean + (1 - kRatioMemory) * ratio;
    method_kernels::ApplyDirection(n, terms, Factor(rate * ratio), m, v, parameters.data());
  }

 private:
  enum Array : std::size_t { kM, kV, kFresh };
  enum Number : std::size_t { kRatio, kFactor, kScale };
  static constexpr double kRatioMemory = 0.9;
  static constexpr double kLeastFactor = 0.5;
  static constexpr double kMostFactor = 4.0;
  static constexpr double kFactorChange = 0.1;
  static constexpr double kMostScale = 1e30;

  const AdamParameters adam_;
  const TrustRatio trust_;
  const double v_floor_;
  const std::uint64_t freeze_step_;
};

}  // namespace

MethodInfo OnebitAdamMethod() {
  return {"onebit_adam",
          "Adam whose second moment is frozen after a warm-up; then momenta are sent",
          "Tang et al. 2021",
          {FreezeStepParameter(), Beta1Parameter(), Beta2Parameter(), EpsilonParameter("1e-8"),
           WeightDecayParameter("0"), BiasCorrectionParameter(), VFloorParameter()},
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<OnebitAdam>(given));
          }};
}

MethodInfo OnebitLambMethod() {
  return {"onebit_lamb",
          "LAMB whose second moment and trust ratio are frozen after a warm-up; then momenta are "
          "sent",
          "Li et al. 2021",
          {FreezeStepParameter(), Beta1Parameter(), Beta2Parameter(), EpsilonParameter("1e-6"),
           WeightDecayParameter("0.01"), NormLowParameter(), NormHighParameter(),
           BiasCorrectionParameter(), VFloorParameter()},
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<OnebitLamb>(given));
          }};
}

}  // namespace gradwire
