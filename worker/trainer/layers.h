#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "worker/trainer/float_buffer.h"

namespace gradwire::trainer {

/// A tensor that is trained. The gradient is handed to a Client as input and as output; whoever
/// does that keeps Backward from running again before it is back.
struct Parameter {
  std::string name;  // "dense0.weight"
  std::vector<std::uint64_t> shape;
  std::size_t fan_in = 0;  // of a weight; 0 for a bias, which starts at zero and does not decay
  std::size_t layer = 0;   // place in Model::layers(), set by the model
  std::size_t index = 0;   // place in Model::parameters(), set by the model
  FloatBuffer value;
  FloatBuffer gradient;
  FloatBuffer velocity;  // momentum

  bool is_weight() const { return fan_in != 0; }
};

/// Called once for each parameter as soon as its gradient is complete.
using GradientReady = std::function<Status(Parameter&)>;

/// One layer with its own parameters. All matrices are row-major, one row a sample; images are
/// [height, width, channels]. Threads: one at a time.
class Layer {
 public:
  virtual ~Layer() = default;

  virtual std::span<Parameter> parameters() = 0;
  /// Floats of one sample.
  virtual std::size_t input_size() const = 0;
  virtual std::size_t output_size() const = 0;

  /// Shapes: in[batch, input_size()] -> out[batch, output_size()].
  virtual void Forward(std::size_t batch, const float* in, float* out) = 0;

  /// Computes the gradients of the parameters, hands each over through `ready`, and then the
  /// gradient of the input. `in` and `out` are what Forward saw and gave. `grad_out` may be
  /// overwritten; `grad_in` may be null if nobody wants it.
  /// Errors: what `ready` returns.
  virtual Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                          float* grad_in, const GradientReady& ready) = 0;

  /// Floating-point operations of the matrix products of one Forward; Backward has as many for the
  /// weights and as many for the input. Elementwise work is not counted.
  virtual double ForwardFlops(std::size_t batch) const = 0;
};

/// y = x w^T + b, then ReLU if `relu`.  Parameters: <name>.weight[out, in], <name>.bias[out].
std::unique_ptr<Layer> MakeDense(const std::string& name, std::size_t in, std::size_t out,
                                 bool relu);

/// Convolution, stride 1, zeros around the image so that it keeps its size, then ReLU if `relu`.
/// Parameters: <name>.weight[out, size, size, in], <name>.bias[out]. `size` is odd.
std::unique_ptr<Layer> MakeConv(const std::string& name, std::size_t height, std::size_t width,
                                std::size_t in_channels, std::size_t out_channels, std::size_t size,
                                bool relu);

/// A row of a table for each number in the input: in[batch, length] has integers from 0 to rows -
/// 1, out[batch, length * width] their rows.  Parameter: <name>.weight[rows, width], its gradient
/// dense. The input has no gradient: Backward gives zeros.
std::unique_ptr<Layer> MakeEmbedding(const std::string& name, std::size_t length, std::size_t rows,
                                     std::size_t width);

/// Largest of each 2 x 2 square; height and width are even.
std::unique_ptr<Layer> MakeMaxPool(std::size_t height, std::size_t width, std::size_t channels);

}  // namespace gradwire::trainer
