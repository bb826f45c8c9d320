#include "worker/trainer/dataset.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "common/base/random.h"

namespace gradwire::trainer {
namespace {

constexpr std::size_t kMaxIdxBytes = std::size_t{1} << 30;
constexpr std::size_t kClasses = 10;
// Mean and deviation of the 60,000 training images' pixels, in units of 255.
constexpr float kPixelMean = 0.2860F;
constexpr float kPixelDeviation = 0.3530F;

std::uint32_t LoadBe32(const std::byte* from) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = (value << 8) | std::to_integer<std::uint32_t>(from[i]);
  return value;
}

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};
using GzHandle = std::unique_ptr<std::remove_pointer_t<gzFile>, GzClose>;

}  // namespace

Result<IdxArray> ParseIdx(ByteView bytes, const std::string& origin) {
  if (bytes.size() < 4) {
    return CorruptData(
        fmt::format("{}: {} bytes are too short for an idx file", origin, bytes.size()));
  }
  const auto type = std::to_integer<unsigned>(bytes[2]);
  const auto dimensions = std::to_integer<unsigned>(bytes[3]);
  if (bytes[0] != std::byte{0} || bytes[1] != std::byte{0} || type != 8 || dimensions < 1 ||
      dimensions > 4) {
    return CorruptData(fmt::format(
        "{}: magic number {:#010x}, expected 0x0000080d with d from 1 to 4 (idx, unsigned bytes)",
        origin, LoadBe32(bytes.data())));
  }
  const std::size_t header = 4 + 4 * std::size_t{dimensions};
  if (bytes.size() < header) {
    return CorruptData(fmt::format("{}: {} bytes, expected {} for the header of {} dimensions",
                                   origin, bytes.size(), header, dimensions));
  }
  IdxArray array;
  std::size_t count = 1;
  for (unsigned d = 0; d < dimensions; ++d) {
    const std::size_t extent = LoadBe32(bytes.data() + 4 + 4 * d);
    if (extent != 0 && count > kMaxIdxBytes / extent) {
      return CorruptData(
          fmt::format("{}: the dimensions multiply to more than {} bytes", origin, kMaxIdxBytes));
    }
    count *= extent;
    array.shape.push_back(extent);
  }
  if (bytes.size() - header != count) {
    return CorruptData(fmt::format("{}: {} bytes of values, expected {} from shape {}", origin,
                                   bytes.size() - header, count, fmt::join(array.shape, "x")));
  }
  array.values.resize(count);
  if (count != 0) std::memcpy(array.values.data(), bytes.data() + header, count);
  return array;
}

Result<std::vector<std::byte>> ReadMaybeGzip(const std::string& path, std::size_t max_bytes) {
  errno = 0;
  const GzHandle file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return NotFound(fmt::format("{}: {}", path, errno != 0 ? std::strerror(errno) : "no memory"));
  }
  constexpr unsigned kChunk = 1U << 18;
  std::vector<std::byte> bytes;
  for (;;) {
    const std::size_t have = bytes.size();
    bytes.resize(have + kChunk);
    const int got = gzread(file.get(), bytes.data() + have, kChunk);
    int code = Z_OK;
    const char* message = gzerror(file.get(), &code);
    // A file that is cut short reads to its end without an error from gzread, but leaves
    // Z_BUF_ERROR behind.
    if (got < 0 || (code != Z_OK && code != Z_STREAM_END)) {
      const bool system = code == Z_ERRNO;
      return CorruptData(fmt::format("{}: {}", path, system ? std::strerror(errno) : message));
    }
    bytes.resize(have + static_cast<std::size_t>(got));
    if (bytes.size() > max_bytes) {
      return CorruptData(fmt::format("{}: more than {} bytes when decompressed", path, max_bytes));
    }
    if (got == 0) return bytes;
  }
}

void Dataset::Read(std::size_t index, std::span<float> output) const {
  const std::uint8_t* from = pixels.data() + index * sample_size();
  constexpr float kScale = 1.0F / (255.0F * kPixelDeviation);
  constexpr float kShift = kPixelMean / kPixelDeviation;
  for (std::size_t i = 0; i < output.size(); ++i) {
    output[i] = static_cast<float>(from[i]) * kScale - kShift;
  }
}

Result<Dataset> MakeDataset(IdxArray images, IdxArray labels, std::size_t limit,
                            const std::string& origin) {
  if (images.shape.size() != 3 || labels.shape.size() != 1) {
    return CorruptData(fmt::format("{}: images have {} dimensions and labels {}, expected 3 and 1",
                                   origin, images.shape.size(), labels.shape.size()));
  }
  if (images.shape[0] != labels.shape[0] || images.values.empty()) {
    return CorruptData(fmt::format("{}: {} images of {} x {} pixels and {} labels", origin,
                                   images.shape[0], images.shape[1], images.shape[2],
                                   labels.shape[0]));
  }
  for (std::size_t i = 0; i < labels.values.size(); ++i) {
    if (labels.values[i] >= kClasses) {
      return CorruptData(fmt::format("{}: label {} of sample {}, expected below {}", origin,
                                     labels.values[i], i, kClasses));
    }
  }
  Dataset data;
  data.height = images.shape[1];
  data.width = images.shape[2];
  data.classes = kClasses;
  data.pixels = std::move(images.values);
  data.labels = std::move(labels.values);
  if (limit != 0 && limit < data.size()) {
    data.labels.resize(limit);
    data.pixels.resize(limit * data.sample_size());
  }
  return data;
}

Result<Dataset> LoadFashionMnist(const std::string& folder, Split split, std::size_t limit) {
  const std::string base = folder + (split == Split::kTrain ? "/train" : "/t10k");
  std::array<IdxArray, 2> arrays;
  const std::array<std::string, 2> paths = {base + "-images-idx3-ubyte.gz",
                                            base + "-labels-idx1-ubyte.gz"};
  for (std::size_t i = 0; i < paths.size(); ++i) {
    Result<std::vector<std::byte>> bytes = ReadMaybeGzip(paths[i], kMaxIdxBytes);
    if (bytes.status().code() == StatusCode::kNotFound) {
      return NotFound(fmt::format(
          "no Fashion-MNIST in {} ({}); install the Debian package dataset-fashion-mnist or give "
          "--data-dir",
          folder, bytes.status().message()));
    }
    GRADWIRE_RETURN_IF_ERROR(bytes.status());
    Result<IdxArray> array = ParseIdx(*bytes, paths[i]);
    GRADWIRE_RETURN_IF_ERROR(array.status());
    arrays[i] = std::move(*array);
  }
  return MakeDataset(std::move(arrays[0]), std::move(arrays[1]), limit, base);
}

BatchSampler::BatchSampler(std::size_t num_samples, std::size_t batch, std::uint32_t rank,
                           std::uint32_t num_workers, std::uint64_t seed)
    : num_samples_(num_samples),
      batch_(batch),
      rank_(rank),
      num_workers_(num_workers),
      seed_(seed),
      order_(num_samples) {
  Shuffle(0);
}

void BatchSampler::Shuffle(std::uint64_t epoch) {
  epoch_ = epoch;
  std::iota(order_.begin(), order_.end(), std::uint32_t{0});
  CounterRng rng(HashCombine(HashCombine(HashText("shuffle"), seed_), epoch));
  for (std::size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1], order_[rng.NextBelow(i)]);
  }
}

void BatchSampler::Batch(std::uint64_t step, std::span<std::size_t> indices) {
  const std::uint64_t first = (step * num_workers_ + rank_) * batch_;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::uint64_t place = first + i;
    if (place / num_samples_ != epoch_) Shuffle(place / num_samples_);
    indices[i] = order_[place % num_samples_];
  }
}

}  // namespace gradwire::trainer
