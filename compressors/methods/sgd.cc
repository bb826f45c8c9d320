// The methods of the SGD family.
#include <memory>

#include "compressors/methods/builtin.h"
#include "compressors/methods/kernels.h"

namespace gradwire {
namespace {

using method_kernels::SendWithMomentum;
using method_kernels::UpdateDistEf;
using method_kernels::UpdateSgd;

float DecayOf(double weight_decay, const TensorState& state) {
  return state.decays ? static_cast<float>(weight_decay) : 0.0F;
}

/// v <- mu v + (p + lambda x); x <- x - rate v.
/// Floor: 20 B an element (reads p, v, x; writes v, x).
class Sgd final : public Method {
 public:
  explicit Sgd(const Parameters& given)
      : momentum_(static_cast<float>(given.Number("momentum"))),
        weight_decay_(given.Number("weight_decay")) {}

  MethodTraits traits() const override { return {}; }
  std::size_t num_arrays() const override { return 1; }
  void Send(TensorState&, std::span<float>) const override {}
  void Freeze(TensorState&) const override {}
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    UpdateSgd(parameters.size(), static_cast<float>(rate), momentum_, DecayOf(weight_decay_, state),
              pulled.data(), state.arrays[0].data(), parameters.data());
  }

 private:
  const float momentum_;
  const double weight_decay_;
};

/// Before the push m <- mu m + g, sent is g + mu m; after the pull w <- mu (w + lambda x),
/// x <- x - rate (p + w + lambda x). m is the worker's own, w the same on all.
/// Floor: 16 B an element to send (g, m read and written), 20 B to update (reads p, w, x; writes
/// w, x).
class DistEfSgdm final : public Method {
 public:
  explicit DistEfSgdm(const Parameters& given)
      : momentum_(static_cast<float>(given.Number("momentum"))),
        weight_decay_(given.Number("weight_decay")) {}

  MethodTraits traits() const override { return {}; }
  std::size_t num_arrays() const override { return 2; }
  void Send(TensorState& state, std::span<float> gradient) const override {
    SendWithMomentum(gradient.size(), momentum_, gradient.data(), state.arrays[0].data());
  }
  void Freeze(TensorState&) const override {}
  void Update(TensorState& state, std::span<const float> pulled, double rate,
              std::span<float> parameters) const override {
    UpdateDistEf(parameters.size(), static_cast<float>(rate), momentum_,
                 DecayOf(weight_decay_, state), pulled.data(), state.arrays[1].data(),
                 parameters.data());
  }

 private:
  const float momentum_;
  const double weight_decay_;
};

}  // namespace

MethodInfo SgdMethod() {
  return {"sgd",
          "SGD with momentum",
          "",
          {MomentumParameter(), WeightDecayParameter("0")},
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<Sgd>(given));
          }};
}

MethodInfo DistEfSgdmMethod() {
  return {"dist_ef_sgdm",
          "SGD with Nesterov's momentum on the worker, before feedback and compression",
          "Zheng, Huang, Kwok 2019",
          {MomentumParameter(), WeightDecayParameter("0")},
          [](const Parameters& given) -> Result<std::unique_ptr<const Method>> {
            return std::unique_ptr<const Method>(std::make_unique<DistEfSgdm>(given));
          }};
}

}  // namespace gradwire
