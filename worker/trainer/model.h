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
#include "worker/trainer/layers.h"

namespace gradwire::trainer {

/// What a batch gave: the mean loss and how many samples were classified right.
struct BatchResult {
  double loss = 0.0;
  std::size_t correct = 0;
};

/// A chain of layers that ends in softmax and cross entropy, with the memory for one batch.
/// Threads: one at a time.
class Model {
 public:
  /// Called before a layer's Forward, with its place in layers(): the time to bring its parameters
  /// up to date.
  using BeforeLayer = std::function<Status(std::size_t layer)>;

  /// The layers must fit each other; the last one gives the logits. Weights are drawn from a normal
  /// distribution of variance 2 / fan_in (He et al. 2015), each tensor from (seed, its name) alone;
  /// biases are zero.
  Model(std::vector<std::unique_ptr<Layer>> layers, std::size_t max_batch, std::uint64_t seed);

  std::span<const std::unique_ptr<Layer>> layers() const { return layers_; }
  /// All parameters, front layers first.
  std::span<Parameter* const> parameters() const { return parameters_; }
  std::size_t num_parameters() const;
  std::size_t max_batch() const { return max_batch_; }
  std::size_t num_classes() const { return layers_.back()->output_size(); }

  /// Where the next batch goes, [max_batch, input size of the first layer]; unchanged by the rest.
  std::span<float> input() const { return input_.span(); }

  /// Computes the logits of the first `batch` rows of input().
  /// Errors: what `before_layer` returns.
  Status Forward(std::size_t batch, const BeforeLayer& before_layer);

  /// Loss and gradient of the logits after Forward.  Shapes: labels[batch].
  BatchResult Loss(std::span<const std::uint8_t> labels);

  /// Gradients of all parameters after Loss, last layer first.
  /// Errors: what `ready` returns.
  Status Backward(std::size_t batch, const GradientReady& ready);

  /// Operations of the matrix products of one training step.
  double StepFlops(std::size_t batch) const;

  /// 64-bit hash of the bits of all parameters, in order.
  std::uint64_t Digest() const;

 private:
  const std::size_t max_batch_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Parameter*> parameters_;
  FloatBuffer input_;
  std::vector<FloatBuffer> outputs_;    // of each layer
  std::vector<FloatBuffer> gradients_;  // of each layer's output
};

/// The model that takes text; the others take images.
inline constexpr const char* kTextModel = "charlm";

/// The models there are: "mlp" (dense 2048, dense 2048, dense 10; 5.8 million parameters), "conv"
/// (5x5 convolution to 16 channels, pool, 5x5 to 32, pool, dense 128, dense 10; 0.2 million), and
/// kTextModel for text (embedding of 32 numbers a character, dense 512, dense 512, dense to the
/// alphabet; 0.6 million), whose samples are width characters of `classes` kinds.
/// Errors: InvalidArgument for another name, or a size of image that "conv" can't halve twice.
Result<std::unique_ptr<Model>> MakeModel(const std::string& name, std::size_t height,
                                         std::size_t width, std::size_t classes,
                                         std::size_t max_batch, std::uint64_t seed);

}  // namespace gradwire::trainer
