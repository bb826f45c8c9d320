#include "worker/trainer/model.h"

#include <fmt/format.h>

#include <bit>
#include <cassert>
#include <cmath>
#include <utility>

#include "common/base/random.h"
#include "worker/trainer/kernels.h"

namespace gradwire::trainer {

Model::Model(std::vector<std::unique_ptr<Layer>> layers, std::size_t max_batch, std::uint64_t seed)
    : max_batch_(max_batch),
      layers_(std::move(layers)),
      input_(max_batch * layers_.front()->input_size()) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    assert(i == 0 || layers_[i]->input_size() == layers_[i - 1]->output_size());
    outputs_.emplace_back(max_batch * layers_[i]->output_size());
    gradients_.emplace_back(max_batch * layers_[i]->output_size());
    for (Parameter& p : layers_[i]->parameters()) {
      p.layer = i;
      p.index = parameters_.size();
      parameters_.push_back(&p);
      if (!p.is_weight()) continue;
      CounterRng rng(HashCombine(HashCombine(HashText("initialize"), seed), HashText(p.name)));
      const double deviation = std::sqrt(2.0 / static_cast<double>(p.fan_in));
      for (float& w : p.value.span()) w = static_cast<float>(deviation * rng.NextGaussian());
    }
  }
}

std::size_t Model::num_parameters() const {
  std::size_t n = 0;
  for (const Parameter* p : parameters_) n += p->value.size();
  return n;
}

Status Model::Forward(std::size_t batch, const BeforeLayer& before_layer) {
  assert(batch <= max_batch_);
  const float* in = input_.data();
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    GRADWIRE_RETURN_IF_ERROR(before_layer(i));
    layers_[i]->Forward(batch, in, outputs_[i].data());
    in = outputs_[i].data();
  }
  return Status::Ok();
}

BatchResult Model::Loss(std::span<const std::uint8_t> labels) {
  BatchResult result;
  gradwire_nn_softmax_cross_entropy(labels.size(), num_classes(), outputs_.back().data(),
                                    labels.data(), gradients_.back().data(), &result.loss,
                                    &result.correct);
  return result;
}

Status Model::Backward(std::size_t batch, const GradientReady& ready) {
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const float* in = i == 0 ? input_.data() : outputs_[i - 1].data();
    float* grad_in = i == 0 ? nullptr : gradients_[i - 1].data();
    GRADWIRE_RETURN_IF_ERROR(
        layers_[i]->Backward(batch, in, outputs_[i].data(), gradients_[i].data(), grad_in, ready));
  }
  return Status::Ok();
}

double Model::StepFlops(std::size_t batch) const {
  double flops = 0.0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    // Forward, weight gradient, and input gradient except for the first layer's.
    flops += (i == 0 ? 2.0 : 3.0) * layers_[i]->ForwardFlops(batch);
  }
  return flops;
}

std::uint64_t Model::Digest() const {
  std::uint64_t digest = HashText("parameters");
  for (const Parameter* p : parameters_) {
    for (const float v : p->value.span()) {
      digest = HashCombine(digest, std::bit_cast<std::uint32_t>(v));
    }
  }
  return digest;
}

Result<std::unique_ptr<Model>> MakeModel(const std::string& name, std::size_t height,
                                         std::size_t width, std::size_t classes,
                                         std::size_t max_batch, std::uint64_t seed) {
  std::vector<std::unique_ptr<Layer>> layers;
  if (name == "mlp") {
    constexpr std::size_t kHidden = 2048;
    layers.push_back(MakeDense("dense0", height * width, kHidden, true));
    layers.push_back(MakeDense("dense1", kHidden, kHidden, true));
    layers.push_back(MakeDense("dense2", kHidden, classes, false));
  } else if (name == "conv") {
    if (height % 4 != 0 || width % 4 != 0) {
      return InvalidArgument(fmt::format(
          "model conv halves images twice, which {} x {} pixels do not allow", height, width));
    }
    layers.push_back(MakeConv("conv0", height, width, 1, 16, 5, true));
    layers.push_back(MakeMaxPool(height, width, 16));
    layers.push_back(MakeConv("conv1", height / 2, width / 2, 16, 32, 5, true));
    layers.push_back(MakeMaxPool(height / 2, width / 2, 32));
    layers.push_back(MakeDense("dense0", height / 4 * (width / 4) * 32, 128, true));
    layers.push_back(MakeDense("dense1", 128, classes, false));
  } else if (name == kTextModel) {
    constexpr std::size_t kWidth = 32;
    constexpr std::size_t kHidden = 512;
    const std::size_t length = height * width;
    layers.push_back(MakeEmbedding("embed0", length, classes, kWidth));
    layers.push_back(MakeDense("dense0", length * kWidth, kHidden, true));
    layers.push_back(MakeDense("dense1", kHidden, kHidden, true));
    layers.push_back(MakeDense("dense2", kHidden, classes, false));
  } else {
    return InvalidArgument(
        fmt::format("no model \"{}\"; there are mlp, conv and {}", name, kTextModel));
  }
  return std::make_unique<Model>(std::move(layers), max_batch, seed);
}

}  // namespace gradwire::trainer
