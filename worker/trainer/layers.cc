#include "worker/trainer/layers.h"

#include <array>
#include <cassert>

#include "worker/trainer/kernels.h"

namespace gradwire::trainer {
namespace {

constexpr std::size_t kWeight = 0;
constexpr std::size_t kBias = 1;

std::array<Parameter, 2> MakeParameters(const std::string& name,
                                        std::vector<std::uint64_t> weight_shape,
                                        std::size_t fan_in) {
  const std::size_t out = weight_shape[0];
  std::array<Parameter, 2> parameters;
  Parameter& weight = parameters[kWeight];
  weight.name = name + ".weight";
  weight.shape = std::move(weight_shape);
  weight.fan_in = fan_in;
  Parameter& bias = parameters[kBias];
  bias.name = name + ".bias";
  bias.shape = {out};
  for (Parameter* p : {&weight, &bias}) {
    const std::size_t size = p == &weight ? out * fan_in : out;
    p->value = FloatBuffer(size);
    p->gradient = FloatBuffer(size);
    p->velocity = FloatBuffer(size);
  }
  return parameters;
}

class Dense final : public Layer {
 public:
  Dense(const std::string& name, std::size_t in, std::size_t out, bool relu)
      : in_(in), out_(out), relu_(relu), parameters_(MakeParameters(name, {out, in}, in)) {}

  std::span<Parameter> parameters() override { return parameters_; }
  std::size_t input_size() const override { return in_; }
  std::size_t output_size() const override { return out_; }

  void Forward(std::size_t batch, const float* in, float* out) override {
    gradwire_nn_dense_forward(batch, in_, out_, in, parameters_[kWeight].value.data(),
                              parameters_[kBias].value.data(), relu_ ? 1 : 0, out);
  }

  Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                  float* grad_in, const GradientReady& ready) override {
    gradwire_nn_grad_activation(batch, out_, relu_ ? out : nullptr, grad_out,
                                parameters_[kBias].gradient.data());
    GRADWIRE_RETURN_IF_ERROR(ready(parameters_[kBias]));
    gradwire_nn_dense_grad_weight(batch, in_, out_, in, grad_out, 0,
                                  parameters_[kWeight].gradient.data());
    GRADWIRE_RETURN_IF_ERROR(ready(parameters_[kWeight]));
    if (grad_in != nullptr) {
      gradwire_nn_dense_grad_input(batch, in_, out_, grad_out, parameters_[kWeight].value.data(),
                                   grad_in);
    }
    return Status::Ok();
  }

  double ForwardFlops(std::size_t batch) const override {
    return 2.0 * static_cast<double>(batch) * static_cast<double>(in_) * static_cast<double>(out_);
  }

 private:
  const std::size_t in_;
  const std::size_t out_;
  const bool relu_;
  std::array<Parameter, 2> parameters_;
};

// One sample at a time: its patches (at most 0.3 MB in the nets here) stay in the cache, and
// gathering them again in Backward costs less than keeping them for the whole batch.
class Conv final : public Layer {
 public:
  Conv(const std::string& name, std::size_t height, std::size_t width, std::size_t in_channels,
       std::size_t out_channels, std::size_t size, bool relu)
      : height_(height),
        width_(width),
        in_channels_(in_channels),
        out_channels_(out_channels),
        size_(size),
        patch_(size * size * in_channels),
        relu_(relu),
        columns_(height * width * patch_),
        parameters_(MakeParameters(name, {out_channels, size, size, in_channels}, patch_)) {
    assert(size % 2 == 1);
  }

  std::span<Parameter> parameters() override { return parameters_; }
  std::size_t input_size() const override { return pixels() * in_channels_; }
  std::size_t output_size() const override { return pixels() * out_channels_; }

  void Forward(std::size_t batch, const float* in, float* out) override {
    for (std::size_t i = 0; i < batch; ++i) {
      Gather(in + i * input_size());
      gradwire_nn_dense_forward(pixels(), patch_, out_channels_, columns_.data(),
                                parameters_[kWeight].value.data(), parameters_[kBias].value.data(),
                                relu_ ? 1 : 0, out + i * output_size());
    }
  }

  Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                  float* grad_in, const GradientReady& ready) override {
    gradwire_nn_grad_activation(batch * pixels(), out_channels_, relu_ ? out : nullptr, grad_out,
                                parameters_[kBias].gradient.data());
    GRADWIRE_RETURN_IF_ERROR(ready(parameters_[kBias]));
    for (std::size_t i = 0; i < batch; ++i) {
      Gather(in + i * input_size());
      gradwire_nn_dense_grad_weight(pixels(), patch_, out_channels_, columns_.data(),
                                    grad_out + i * output_size(), i == 0 ? 0 : 1,
                                    parameters_[kWeight].gradient.data());
    }
    GRADWIRE_RETURN_IF_ERROR(ready(parameters_[kWeight]));
    if (grad_in == nullptr) return Status::Ok();
    for (std::size_t i = 0; i < batch; ++i) {
      gradwire_nn_dense_grad_input(pixels(), patch_, out_channels_, grad_out + i * output_size(),
                                   parameters_[kWeight].value.data(), columns_.data());
      gradwire_nn_col2im(height_, width_, in_channels_, size_, columns_.data(),
                         grad_in + i * input_size());
    }
    return Status::Ok();
  }

  double ForwardFlops(std::size_t batch) const override {
    return 2.0 * static_cast<double>(batch) * static_cast<double>(pixels()) *
           static_cast<double>(patch_) * static_cast<double>(out_channels_);
  }

 private:
  std::size_t pixels() const { return height_ * width_; }
  void Gather(const float* image) {
    gradwire_nn_im2col(height_, width_, in_channels_, size_, image, columns_.data());
  }

  const std::size_t height_;
  const std::size_t width_;
  const std::size_t in_channels_;
  const std::size_t out_channels_;
  const std::size_t size_;
  const std::size_t patch_;  // floats of one patch
  const bool relu_;
  FloatBuffer columns_;  // [pixels, patch], of one sample
  std::array<Parameter, 2> parameters_;
};

class MaxPool final : public Layer {
 public:
  MaxPool(std::size_t height, std::size_t width, std::size_t channels)
      : height_(height), width_(width), channels_(channels) {
    assert(height % 2 == 0 && width % 2 == 0);
  }

  std::span<Parameter> parameters() override { return {}; }
  std::size_t input_size() const override { return height_ * width_ * channels_; }
  std::size_t output_size() const override { return input_size() / 4; }

  void Forward(std::size_t batch, const float* in, float* out) override {
    for (std::size_t i = 0; i < batch; ++i) {
      gradwire_nn_max_pool(height_, width_, channels_, in + i * input_size(),
                           out + i * output_size());
    }
  }

  Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                  float* grad_in, const GradientReady& ready) override {
    static_cast<void>(ready);
    if (grad_in == nullptr) return Status::Ok();
    for (std::size_t i = 0; i < batch; ++i) {
      gradwire_nn_max_pool_grad(height_, width_, channels_, in + i * input_size(),
                                out + i * output_size(), grad_out + i * output_size(),
                                grad_in + i * input_size());
    }
    return Status::Ok();
  }

  double ForwardFlops(std::size_t batch) const override {
    static_cast<void>(batch);
    return 0.0;
  }

 private:
  const std::size_t height_;
  const std::size_t width_;
  const std::size_t channels_;
};

}  // namespace

std::unique_ptr<Layer> MakeDense(const std::string& name, std::size_t in, std::size_t out,
                                 bool relu) {
  return std::make_unique<Dense>(name, in, out, relu);
}

std::unique_ptr<Layer> MakeConv(const std::string& name, std::size_t height, std::size_t width,
                                std::size_t in_channels, std::size_t out_channels, std::size_t size,
                                bool relu) {
  return std::make_unique<Conv>(name, height, width, in_channels, out_channels, size, relu);
}

std::unique_ptr<Layer> MakeMaxPool(std::size_t height, std::size_t width, std::size_t channels) {
  return std::make_unique<MaxPool>(height, width, channels);
}

}  // namespace gradwire::trainer
