#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/trainer/files.h"
#include "worker/trainer/dataset.h"
#include "worker/trainer/schedule.h"

namespace gradwire::trainer {
namespace {

std::vector<std::byte> Bytes(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}

std::vector<std::byte> ReadRaw(const std::string& path) {
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  std::FILE* file = std::fopen(path.c_str(), "rb");
  REQUIRE(file != nullptr);
  REQUIRE(std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size());
  std::fclose(file);
  return bytes;
}

TEST_CASE("an idx file is parsed into its shape and values", "[trainer][data]") {
  const auto matrix = ParseIdx(Bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6}), "m");
  REQUIRE(matrix.ok());
  CHECK(matrix->shape == std::vector<std::size_t>{2, 3});
  CHECK(matrix->values == std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6});
  const auto empty = ParseIdx(Bytes({0, 0, 8, 1, 0, 0, 0, 0}), "e");
  REQUIRE(empty.ok());
  CHECK(empty->values.empty());
}

TEST_CASE("a damaged idx file is refused by name", "[trainer][data]") {
  const std::vector<std::vector<std::byte>> damaged = {
      {},
      Bytes({0, 0, 8}),                                                // no whole magic number
      Bytes({1, 0, 8, 1, 0, 0, 0, 1, 5}),                              // wrong magic number
      Bytes({0, 0, 13, 1, 0, 0, 0, 1, 5}),                             // floats
      Bytes({0, 0, 8, 0, 5}),                                          // no dimension
      Bytes({0, 0, 8, 5}),                                             // too many dimensions
      Bytes({0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0}),                        // header cut short
      Bytes({0, 0, 8, 1, 0, 0, 0, 3, 1, 2}),                           // a value short
      Bytes({0, 0, 8, 1, 0, 0, 0, 1, 1, 2}),                           // a value too many
      Bytes({0, 0, 8, 2, 255, 255, 255, 255, 255, 255, 255, 255, 1}),  // nearly 2^64 values
      // 2^64 values: as many as follow, to whoever multiplies without a check.
      Bytes({0, 0, 8, 4, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0}),
      Bytes({0, 0, 8, 3, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1}),  // 2^48 values
  };
  for (std::size_t i = 0; i < damaged.size(); ++i) {
    CAPTURE(i);
    const auto parsed = ParseIdx(damaged[i], "some-file");
    CHECK(parsed.status().code() == StatusCode::kCorruptData);
    CHECK(parsed.status().message().find("some-file") != std::string::npos);
  }
}

TEST_CASE("gzip files are read, and refused if cut short, damaged or too large",
          "[trainer][data]") {
  const TempFolder folder;
  std::vector<std::byte> content(300000);
  for (std::size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<std::byte>((i * i) >> 7);
  }
  WriteGzip(folder / "good", content);
  WriteFile(folder / "plain", content);
  const auto good = ReadMaybeGzip(folder / "good", content.size());
  REQUIRE(good.ok());
  CHECK(*good == content);
  const auto plain = ReadMaybeGzip(folder / "plain", content.size());
  REQUIRE(plain.ok());
  CHECK(*plain == content);

  CHECK(ReadMaybeGzip(folder / "good", content.size() - 1).status().code() ==
        StatusCode::kCorruptData);
  CHECK(ReadMaybeGzip(folder / "none", content.size()).status().code() == StatusCode::kNotFound);
  const std::vector<std::byte> packed = ReadRaw(folder / "good");
  for (const std::size_t missing : {std::size_t{1}, std::size_t{8}, packed.size() / 2}) {
    CAPTURE(missing);
    WriteFile(folder / "short", {packed.begin(), packed.end() - static_cast<long>(missing)});
    CHECK(ReadMaybeGzip(folder / "short", content.size()).status().code() ==
          StatusCode::kCorruptData);
  }
  std::vector<std::byte> flipped = packed;
  flipped[flipped.size() - 6] ^= std::byte{1};  // in the checksum
  WriteFile(folder / "flipped", flipped);
  CHECK(ReadMaybeGzip(folder / "flipped", content.size()).status().code() ==
        StatusCode::kCorruptData);
}

TEST_CASE("images and labels must fit each other", "[trainer][data]") {
  const IdxArray images{{2, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7}};
  const auto good = MakeDataset(images, {{2}, {3, 9}}, 0, "set");
  REQUIRE(good.ok());
  CHECK(good->size() == 2);
  CHECK(good->sample_size() == 4);
  const auto limited = MakeDataset(images, {{2}, {3, 9}}, 1, "set");
  REQUIRE(limited.ok());
  CHECK(limited->size() == 1);
  CHECK(limited->pixels.size() == 4);

  const std::vector<std::pair<IdxArray, IdxArray>> wrong = {
      {images, {{3}, {1, 2, 3}}},         // another number
      {images, {{2}, {1, 10}}},           // a label beyond the classes
      {images, {{2, 1}, {1, 2}}},         // labels with two dimensions
      {{{8}, images.values}, {{8}, {}}},  // images with one
      {{{0, 2, 2}, {}}, {{0}, {}}},       // nothing
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    CAPTURE(i);
    const auto made = MakeDataset(wrong[i].first, wrong[i].second, 0, "some-set");
    CHECK(made.status().code() == StatusCode::kCorruptData);
    CHECK(made.status().message().find("some-set") != std::string::npos);
  }
}

TEST_CASE("a missing data set is an error that names the Debian package", "[trainer][data]") {
  const TempFolder folder;
  const auto loaded = LoadFashionMnist(folder.path(), Split::kTrain, 0);
  CHECK(loaded.status().code() == StatusCode::kNotFound);
  CHECK(loaded.status().message().find("dataset-fashion-mnist") != std::string::npos);
  CHECK(loaded.status().message().find(folder.path()) != std::string::npos);
}

TEST_CASE("Fashion-MNIST loads and is normalized", "[trainer][data]") {
  if (!std::filesystem::exists(std::string(kDefaultDataDir) + "/train-images-idx3-ubyte.gz")) {
    WARN("SKIPPED: the Debian package dataset-fashion-mnist is not installed");
    return;
  }
  const auto train = LoadFashionMnist(kDefaultDataDir, Split::kTrain, 0);
  REQUIRE(train.ok());
  CHECK(train->size() == 60000);
  CHECK(train->sample_size() == 784);
  const auto test = LoadFashionMnist(kDefaultDataDir, Split::kTest, 0);
  REQUIRE(test.ok());
  CHECK(test->size() == 10000);
  double sum = 0.0;
  double squares = 0.0;
  std::vector<float> sample(train->sample_size());
  for (std::size_t i = 0; i < train->size(); ++i) {
    train->Read(i, sample);
    for (const float v : sample) {
      sum += v;
      squares += static_cast<double>(v) * v;
    }
  }
  const double n = static_cast<double>(train->size() * train->sample_size());
  // The constants are given to four digits.
  CHECK(std::abs(sum / n) < 1e-3);
  CHECK(std::abs(squares / n - 1.0) < 2e-3);
}

TEST_CASE("every epoch covers each sample once and ranks never share one", "[trainer][data]") {
  // 30 samples, global batch 12: batches span the ends of epochs.
  constexpr std::size_t kSamples = 30;
  constexpr std::size_t kBatch = 4;
  constexpr std::uint32_t kWorkers = 3;
  std::vector<BatchSampler> samplers;
  for (std::uint32_t r = 0; r < kWorkers; ++r) {
    samplers.emplace_back(kSamples, kBatch, r, kWorkers, 7);
  }
  std::vector<std::size_t> row;
  std::vector<std::size_t> batch(kBatch);
  for (std::uint64_t step = 0; step < 10; ++step) {
    for (BatchSampler& sampler : samplers) {
      sampler.Batch(step, batch);
      row.insert(row.end(), batch.begin(), batch.end());
    }
  }
  REQUIRE(row.size() == 4 * kSamples);
  std::set<std::vector<std::size_t>> epochs;
  for (std::size_t epoch = 0; epoch < 4; ++epoch) {
    const auto first = row.begin() + static_cast<long>(epoch * kSamples);
    std::vector<std::size_t> order(first, first + kSamples);
    epochs.insert(order);
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < kSamples; ++i) REQUIRE(order[i] == i);
  }
  CHECK(epochs.size() == 4);  // in another order each time

  SECTION("the order depends on the seed and the step alone") {
    BatchSampler same(kSamples, kBatch, 1, kWorkers, 7);
    std::vector<std::size_t> again(kBatch);
    for (const std::uint64_t step : {9U, 0U, 5U}) {  // in any order of asking
      same.Batch(step, again);
      samplers[1].Batch(step, batch);
      CHECK(again == batch);
    }
    std::vector<std::size_t> whole(kSamples);
    std::vector<std::size_t> other(kSamples);
    BatchSampler(kSamples, kSamples, 0, 1, 7).Batch(0, whole);
    BatchSampler(kSamples, kSamples, 0, 1, 8).Batch(0, other);
    CHECK(whole != other);
  }
  SECTION("the ranks' slices are the batch of one worker with a batch as large") {
    BatchSampler one(kSamples, kBatch * kWorkers, 0, 1, 7);
    std::vector<std::size_t> global(kBatch * kWorkers);
    one.Batch(3, global);
    CHECK(std::equal(global.begin(), global.end(), row.begin() + 3 * kBatch * kWorkers));
  }
}

TEST_CASE("the learning rate warms up, falls and ends at 0", "[trainer][schedule]") {
  const LearningRate rate{0.5, 10, 110};
  CHECK(rate.At(0) == Approx(0.05));
  CHECK(rate.At(9) == 0.5);
  CHECK(rate.At(10) == 0.5);
  CHECK(rate.At(60) == Approx(0.25));
  for (std::uint64_t step = 1; step < 10; ++step) CHECK(rate.At(step) > rate.At(step - 1));
  for (std::uint64_t step = 11; step <= 110; ++step) CHECK(rate.At(step) < rate.At(step - 1));
  CHECK(rate.At(109) > 0.0);
  CHECK(rate.At(110) == 0.0);
  CHECK(rate.At(1000) == 0.0);
  // Runs that are all warm-up, of one step or of none.
  CHECK(LearningRate{0.5, 10, 5}.At(4) == Approx(0.25));
  CHECK(LearningRate{0.5, 10, 5}.At(5) == 0.0);
  CHECK(LearningRate{0.5, 0, 1}.At(0) == 0.5);
  CHECK(LearningRate{0.5, 0, 0}.At(0) == 0.0);
  CHECK(DefaultWarmup(10) == 0);
  CHECK(DefaultWarmup(400) == 20);
  CHECK(DefaultWarmup(100000) == 100);
}

}  // namespace
}  // namespace gradwire::trainer
