#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "worker/trainer/samples.h"

namespace gradwire::trainer {

/// A file in the idx format: unsigned bytes with one to four dimensions.
struct IdxArray {
  std::vector<std::size_t> shape;
  std::vector<std::uint8_t> values;
};

/// Parses an uncompressed idx file. `origin` (a file name) goes into error messages.
/// Layout: 0 0 | type (8: unsigned byte) | number of dimensions | a big-endian u32 each | values.
/// Errors: CorruptData naming origin, got and expected, for a wrong magic number, type, number of
/// dimensions or size, and for more than 1 GiB.
/// Source: the format's description on the page of the MNIST database (LeCun, Cortes, Burges).
Result<IdxArray> ParseIdx(ByteView bytes, const std::string& origin);

/// Reads a file, decompressing it if it is gzip.
/// Errors: NotFound if it can't be opened, CorruptData if it is damaged, cut short or larger than
/// `max_bytes` when decompressed.
Result<std::vector<std::byte>> ReadMaybeGzip(const std::string& path, std::size_t max_bytes);

/// Labelled images, in memory as bytes.
struct Dataset final : Samples {
  std::size_t height = 0;
  std::size_t width = 0;
  std::size_t classes = 0;
  std::vector<std::uint8_t> pixels;  // [size, height, width]
  std::vector<std::uint8_t> labels;  // [size], each below classes

  SampleShape shape() const override { return {height, width, classes}; }
  std::size_t size() const override { return labels.size(); }
  /// Writes sample `index` as floats, (p / 255 - mean) / deviation with Fashion-MNIST's constants.
  void Read(std::size_t index, std::span<float> output) const override;
  std::uint8_t label(std::size_t index) const override { return labels[index]; }
};

/// Joins images and labels and keeps the first `limit` (0: all).
/// Errors: CorruptData if they don't fit each other, there are none, or a label is 10 or more.
Result<Dataset> MakeDataset(IdxArray images, IdxArray labels, std::size_t limit,
                            const std::string& origin);

/// Where Debian's package dataset-fashion-mnist puts the files.
inline constexpr const char* kDefaultDataDir = "/usr/share/datasets/fashion-mnist";

enum class Split { kTrain, kTest };

/// Loads one half of Fashion-MNIST (28 x 28, 10 classes) from a folder.
/// Errors: NotFound naming the folder and the Debian package; CorruptData.
Result<Dataset> LoadFashionMnist(const std::string& folder, Split split, std::size_t limit);

/// Decides which samples each rank sees at each step: an endless row of epochs, every one a
/// permutation of all samples drawn from (seed, epoch) alone. Step s takes the next num_workers *
/// batch places of the row, and rank r the r-th slice of them: over all ranks every sample comes
/// exactly once in an epoch. A global batch may span two epochs.
class BatchSampler {
 public:
  BatchSampler(std::size_t num_samples, std::size_t batch, std::uint32_t rank,
               std::uint32_t num_workers, std::uint64_t seed);

  /// The samples of this rank at a step.  Shapes: indices[batch].
  void Batch(std::uint64_t step, std::span<std::size_t> indices);

 private:
  void Shuffle(std::uint64_t epoch);

  const std::size_t num_samples_;
  const std::size_t batch_;
  const std::uint64_t rank_;
  const std::uint64_t num_workers_;
  const std::uint64_t seed_;
  std::uint64_t epoch_ = 0;  // whose permutation is in order_
  std::vector<std::uint32_t> order_;
};

}  // namespace gradwire::trainer
