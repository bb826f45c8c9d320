#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::trainer {

/// What all samples of a set have in common: images of height x width pixels, or a row of `width`
/// characters; and how many labels there are.
struct SampleShape {
  std::size_t height = 0;
  std::size_t width = 0;
  std::size_t classes = 0;
};

/// What a model is trained or tested on: numbered samples, each with a label, in memory.
/// Threads: safe.
class Samples {
 public:
  virtual ~Samples() = default;

  virtual SampleShape shape() const = 0;
  virtual std::size_t size() const = 0;
  /// Writes sample `index`, below size(), as a model takes it.  Shapes: output[sample_size()].
  virtual void Read(std::size_t index, std::span<float> output) const = 0;
  /// The label of sample `index`, below shape().classes.
  virtual std::uint8_t label(std::size_t index) const = 0;

  /// Floats of one sample.
  std::size_t sample_size() const { return shape().height * shape().width; }
};

}  // namespace gradwire::trainer
