#include "worker/trainer/layers.h"

#include <algorithm>
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

class Embedding final : public Layer {
 public:
  Embedding(const std::string& name, std::size_t length, std::size_t rows, std::size_t width)
      : length_(length), width_(width) {
    table_.name = name + ".weight";
    table_.shape = {rows, width};
    // Rows are picked, not summed: they start with a variance of 1, which is that of two inputs.
    table_.fan_in = 2;
    table_.value = FloatBuffer(rows * width);
    table_.gradient = FloatBuffer(rows * width);
    table_.velocity = FloatBuffer(rows * width);
  }

  std::span<Parameter> parameters() override { return {&table_, 1}; }
  std::size_t input_size() const override { return length_; }
  std::size_t output_size() const override { return length_ * width_; }

  void Forward(std::size_t batch, const float* in, float* out) override {
    for (std::size_t i = 0; i < batch * length_; ++i) {
      std::copy_n(table_.value.data() + RowAt(in[i]), width_, out + i * width_);
    }
  }

  Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                  float* grad_in, const GradientReady& ready) override {
    static_cast<void>(out);
    std::fill_n(table_.gradient.data(), table_.gradient.size(), 0.0F);
    for (std::size_t i = 0; i < batch * length_; ++i) {
      float* row = table_.gradient.data() + RowAt(in[i]);
      for (std::size_t k = 0; k < width_; ++k) row[k] += grad_out[i * width_ + k];
    }
    GRADWIRE_RETURN_IF_ERROR(ready(table_));
    if (grad_in != nullptr) std::fill_n(grad_in, batch * length_, 0.0F);
    return Status::Ok();
  }

  double ForwardFlops(std::size_t batch) const override {
    static_cast<void>(batch);
    return 0.0;
  }

 private:
  /// Where the row of a number begins.
  std::size_t RowAt(float number) const {
    const std::size_t begin = static_cast<std::size_t>(number) * width_;
    assert(begin < table_.value.size());
    return begin;
  }

  const std::size_t length_;
  const std::size_t width_;
  Parameter table_;
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

std::unique_ptr<Layer> MakeEmbedding(const std::string& name, std::size_t length, std::size_t rows,
                                     std::size_t width) {
  return std::make_unique<Embedding>(name, length, rows, width);
}

std::unique_ptr<Layer> MakeMaxPool(std::size_t height, std::size_t width, std::size_t channels) {
  return std::make_unique<MaxPool>(height, width, channels);
}

}  // namespace gradwire::trainer
