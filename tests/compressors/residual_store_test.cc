#include "compressors/feedback/residual_store.h"

#include <limits>

#include "common/base/random.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace gradwire::testing {
namespace {

std::vector<float> Values(const Residual& residual) {
  return {residual.values.begin(), residual.values.end()};
}

std::vector<std::byte> SaveOf(ResidualStore& store) {
  Result<std::vector<std::byte>> saved = store.Save();
  REQUIRE(saved.ok());
  return std::move(saved).value();
}

Residual& GetFrom(ResidualStore& store, std::uint64_t key, const std::vector<TensorRange>& ranges,
                  const Compressor& codec) {
  Result<Residual*> residual = store.Get(key, ranges, codec);
  INFO(residual.status().ToString());
  REQUIRE(residual.ok());
  return **residual;
}

void Fill(Residual& residual, float first) {
  for (std::size_t i = 0; i < residual.values.size(); ++i) {
    residual.values[i] = first + static_cast<float>(i);
  }
}

TEST_CASE("a residual begins as zeros and stays where it is", "[compressors][residual_store]") {
  const auto none = Make("none");
  ResidualStore store;
  Residual& residual = GetFrom(store, 7, {{"w", 0, 10}}, *none);
  CHECK(Values(residual) == std::vector<float>(10, 0.0F));
  CHECK(store.size_bytes() == 40);
  Fill(residual, 1);
  for (std::uint64_t key = 100; key < 200; ++key) GetFrom(store, key, {{"x", key, 1}}, *none);
  CHECK(&GetFrom(store, 7, {{"w", 0, 10}}, *none) == &residual);
  CHECK(residual.values[9] == 10.0F);
  const Status status = store.Get(7, {{"w", 0, 11}}, *none).status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(status.message().find("key 7") != std::string::npos);
}

TEST_CASE("residuals come back after save and restore, before or after their units are known",
          "[compressors][residual_store]") {
  const auto onebit = Make("onebit");
  ResidualStore store;
  Residual& residual = GetFrom(store, 1, {{"w", 0, 300}, {"b", 0, 5}}, *onebit);
  Encode(*onebit, Gradient(305, 1), &residual);
  REQUIRE_FALSE(residual.is_explicit());
  const std::vector<float> expected = Explicit(*onebit, residual);
  const std::vector<std::byte> saved = SaveOf(store);
  CHECK(residual.is_explicit());

  const bool known_first = GENERATE(true, false);
  ResidualStore other;
  if (known_first) {
    Residual& early = GetFrom(other, 1, {{"w", 0, 300}, {"b", 0, 5}}, *onebit);
    Encode(*onebit, Gradient(305, 2), &early);
  }
  REQUIRE(other.Restore(saved).ok());
  Residual& restored = GetFrom(other, 1, {{"w", 0, 300}, {"b", 0, 5}}, *onebit);
  CHECK(restored.is_explicit());
  CHECK(Bits(Values(restored)) == Bits(expected));
  // The next round is the same on both.
  const std::vector<float> g = Gradient(305, 3);
  CHECK(Encode(*onebit, g, &residual).payload == Encode(*onebit, g, &restored).payload);
  CHECK(SaveOf(store) == SaveOf(other));
}

TEST_CASE("residuals find their elements again under another cut",
          "[compressors][residual_store]") {
  const auto none = Make("none");
  ResidualStore store;
  Fill(GetFrom(store, 1, {{"w", 0, 100}}, *none), 1000);
  Fill(GetFrom(store, 2, {{"w", 100, 50}, {"b", 0, 10}}, *none), 2000);
  const std::vector<std::byte> saved = SaveOf(store);

  ResidualStore other;
  REQUIRE(other.Restore(saved).ok());
  CHECK(other.size_bytes() == 160 * sizeof(float));
  // Crosses the old border, and goes beyond what was saved.
  const std::vector<float> middle = Values(GetFrom(other, 9, {{"w", 80, 40}}, *none));
  for (std::size_t i = 0; i < 40; ++i) {
    const float expected =
        i < 20 ? 1080.0F + static_cast<float>(i) : 1980.0F + static_cast<float>(i);
    CHECK(middle[i] == expected);
  }
  const std::vector<float> tail = Values(GetFrom(other, 10, {{"b", 5, 10}, {"w", 120, 60}}, *none));
  for (std::size_t i = 0; i < 70; ++i) {
    const float expected = i < 5    ? 2055.0F + static_cast<float>(i)
                           : i < 10 ? 0.0F
                           : i < 40 ? 2020.0F + static_cast<float>(i - 10)
                                    : 0.0F;
    CHECK(tail[i] == expected);
  }
  // What nobody has asked for is not lost: read, and saved again.
  CHECK(other.Read("w", 3) == std::vector<float>{1000, 1001, 1002});
  ResidualStore third;
  REQUIRE(third.Restore(SaveOf(other)).ok());
  CHECK(third.Read("w", 150) == store.Read("w", 150));
  CHECK(third.Read("b", 10) == store.Read("b", 10));
  CHECK(third.Read("unknown", 2) == std::vector<float>{0, 0});
}

TEST_CASE("restored values are given once", "[compressors][residual_store]") {
  const auto none = Make("none");
  ResidualStore store;
  Fill(GetFrom(store, 1, {{"w", 0, 10}}, *none), 1);
  const std::vector<std::byte> saved = SaveOf(store);
  ResidualStore other;
  REQUIRE(other.Restore(saved).ok());
  REQUIRE(other.Restore(saved).ok());  // again: the same, not twice
  CHECK(other.size_bytes() == 40);
  Residual& residual = GetFrom(other, 1, {{"w", 0, 10}}, *none);
  CHECK(residual.values[9] == 10.0F);
  CHECK(other.size_bytes() == 40);
  Fill(residual, 50);
  CHECK(other.Read("w", 1) == std::vector<float>{50});
}

TEST_CASE("damaged bytes change nothing", "[compressors][residual_store]") {
  const auto none = Make("none");
  ResidualStore source;
  Fill(GetFrom(source, 1, {{"weights", 0, 20}}, *none), 1);
  const std::vector<std::byte> saved = SaveOf(source);

  ResidualStore store;
  Residual& residual = GetFrom(store, 1, {{"weights", 0, 20}}, *none);
  Fill(residual, 500);
  const std::vector<std::byte> before = SaveOf(store);
  const auto refused = [&](const std::vector<std::byte>& bytes) {
    const Status status = store.Restore(bytes);
    CHECK(status.code() == StatusCode::kCorruptData);
    REQUIRE(SaveOf(store) == before);
  };
  for (std::size_t size = 0; size < saved.size(); ++size) {
    refused({saved.begin(), saved.begin() + static_cast<std::ptrdiff_t>(size)});
  }
  for (std::size_t bit = 0; bit < saved.size() * 8; ++bit) {
    std::vector<std::byte> damaged = saved;
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    refused(damaged);
  }
  std::vector<std::byte> longer = saved;
  longer.push_back(std::byte{0});
  refused(longer);
  REQUIRE(store.Restore(saved).ok());
  CHECK(residual.values[0] == 1.0F);
}

TEST_CASE("a residual goes from one codec to another without loss",
          "[compressors][residual_store]") {
  const auto onebit = Make("onebit");
  const auto topk = Make("topk(ratio=0.1)");
  ResidualStore store;
  const std::vector<TensorRange> ranges = {{"w", 0, 5000}};
  Residual& residual = GetFrom(store, 1, ranges, *onebit);
  Encode(*onebit, Gradient(5000, 1), &residual);
  const std::vector<float> expected = Explicit(*onebit, residual);
  // Without the change the other codec refuses a residual that is not its own.
  std::vector<std::byte> output(topk->MaxEncodedSize(5000));
  const std::vector<float> g = Gradient(5000, 2);
  CHECK(EncodeSpan(*topk, g, {}, residual, output).status().code() == StatusCode::kInvalidArgument);
  const bool by_get = GENERATE(false, true);
  if (by_get) {
    GetFrom(store, 1, ranges, *topk);
  } else {
    REQUIRE(store.ChangeCodec(1, *topk).ok());
  }
  CHECK(residual.is_explicit());
  CHECK(Bits(Values(residual)) == Bits(expected));
  CHECK(EncodeSpan(*topk, g, {}, residual, output).ok());
  CHECK(store.ChangeCodec(2, *topk).code() == StatusCode::kNotFound);
}

TEST_CASE("the weight is the rates' ratio times the loss scales', and 1 where one is not given",
          "[compressors][residual_store]") {
  constexpr double kHuge = std::numeric_limits<double>::max();
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  CHECK(ResidualWeight({}, {}) == 1);
  CHECK(ResidualWeight({0.2, 0}, {0.1, 0}) == 2);
  CHECK(ResidualWeight({0.1, 0}, {0.2, 0}) == 0.5);
  CHECK(ResidualWeight({0, 0}, {0.2, 0}) == 1);
  CHECK(ResidualWeight({0.2, 0}, {0, 0}) == 1);
  CHECK(ResidualWeight({0, 512}, {0, 2048}) == 4);
  CHECK(ResidualWeight({0, 512}, {0, 0}) == 1);
  CHECK(ResidualWeight({0.2, 512}, {0.1, 256}) == 1);
  CHECK(ResidualWeight({kHuge, 0}, {kTiny, 0}) == kHuge);
  CHECK(ResidualWeight({kTiny, 0}, {kHuge, 0}) == 0);
  CHECK(ResidualWeight({kHuge, kHuge}, {kTiny, kTiny}) == 1);
}

TEST_CASE("a residual is brought to another scale, and not touched where nothing changes",
          "[compressors][residual_store]") {
  const std::string spec = GENERATE("onebit", "topk(k=3)", "fp16");
  CAPTURE(spec);
  const auto codec = Make(spec);
  std::vector<float> values(300, 0.0F);
  Residual residual;
  residual.values = values;
  residual.scale = {0.1, 1024};
  Encode(*codec, Gradient(300, 1), &residual);
  const bool is_lazy = !residual.is_explicit();
  const std::vector<float> before = Explicit(*codec, residual);
  BringToScale(*codec, {0.1, 1024}, residual);
  BringToScale(*codec, {0.2, 2048}, residual);  // the same weight, other numbers
  CHECK(residual.is_explicit() != is_lazy);
  CHECK(residual.scale == GradientScale{0.2, 2048});
  CHECK(Bits(Explicit(*codec, residual)) == Bits(before));
  BringToScale(*codec, {0.3, 2048}, residual);
  CHECK(residual.is_explicit());
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double alpha = 0.2 / 0.3;
    REQUIRE(residual.values[i] == static_cast<float>(alpha * static_cast<double>(before[i])));
  }
}

TEST_CASE("a residual that overflows in another scale is the largest float",
          "[compressors][residual_store]") {
  constexpr float kMost = std::numeric_limits<float>::max();
  const auto none = Make("none");
  std::vector<float> values = {1.0F, -2.0F, 0.0F, -0.0F, kMost};
  Residual residual;
  residual.values = values;
  residual.scale = {1e300, 1};
  BringToScale(*none, {1e-300, 1}, residual);
  CHECK(Bits(values) == Bits(std::vector<float>{kMost, -kMost, 0.0F, -0.0F, kMost}));
}

TEST_CASE("saved residuals bring their scale along", "[compressors][residual_store]") {
  const auto onebit = Make("onebit");
  const std::vector<TensorRange> ranges = {{"w", 0, 300}, {"b", 0, 5}};
  ResidualStore store;
  Residual& residual = GetFrom(store, 1, ranges, *onebit);
  residual.scale = {0.1, 512};
  Encode(*onebit, Gradient(305, 1), &residual);
  const std::vector<std::byte> saved = SaveOf(store);

  const bool known_first = GENERATE(true, false);
  ResidualStore other;
  if (known_first) {
    Residual& early = GetFrom(other, 1, ranges, *onebit);
    early.scale = {0.7, 3};
    Encode(*onebit, Gradient(305, 2), &early);
  }
  REQUIRE(other.Restore(saved).ok());
  Residual& restored = GetFrom(other, 1, ranges, *onebit);
  CHECK(restored.scale == GradientScale{0.1, 512});
  CHECK(Bits(Values(restored)) == Bits(Values(residual)));
  CHECK(SaveOf(other) == saved);
  // A change of codec leaves it.
  REQUIRE(other.ChangeCodec(1, *Make("none")).ok());
  CHECK(restored.scale == GradientScale{0.1, 512});
}

TEST_CASE("what is restored in several scales is brought to one", "[compressors][residual_store]") {
  const auto none = Make("none");
  ResidualStore store;
  Residual& w = GetFrom(store, 1, {{"w", 0, 10}}, *none);
  Fill(w, 1);
  w.scale = {0.1, 512};
  Residual& b = GetFrom(store, 2, {{"b", 0, 10}}, *none);
  Fill(b, 100);
  b.scale = {0.2, 512};
  const std::vector<std::byte> saved = SaveOf(store);
  const std::vector<TensorRange> ranges = {{"w", 5, 5}, {"b", 0, 5}};
  const std::vector<float> expected = {6, 7, 8, 9, 10, 200, 202, 204, 206, 208};

  ResidualStore other;
  SECTION("into a unit that nobody has asked for yet") {
    REQUIRE(other.Restore(saved).ok());
    ResidualStore third;  // also over another save, with every range's own
    REQUIRE(third.Restore(SaveOf(other)).ok());
    const Residual& both = GetFrom(third, 1, ranges, *none);
    CHECK(both.scale == GradientScale{0.1, 512});
    CHECK(Values(both) == expected);
  }
  SECTION("into a unit alone") {
    REQUIRE(other.RestoreUnit(7, ranges, *none, saved).ok());
    const Residual& both = GetFrom(other, 7, ranges, *none);
    CHECK(both.scale == GradientScale{0.1, 512});
    CHECK(Values(both) == expected);
    CHECK(other.UnclaimedTensors().empty());
    const auto part = ResidualStore::Select({saved}, {{"b", 8, 9}, {"c", 0, 5}});
    REQUIRE(part.ok());
    REQUIRE(other.RestoreUnit(8, {{"b", 8, 3}}, *none, *part).ok());
    CHECK(Values(GetFrom(other, 8, {{"b", 8, 3}}, *none)) == std::vector<float>{108, 109, 0});
    other.ClearUnit(7);
    CHECK(Values(both) == std::vector<float>(10));
    REQUIRE(ResidualStore::Select({saved}, {{"c", 0, 5}})->empty());
  }
  SECTION("and the rest of what a unit held is gone") {
    Residual& both = GetFrom(other, 1, {{"w", 8, 4}, {"c", 0, 2}}, *none);
    Fill(both, 8);
    both.scale = {0.2, 256};
    REQUIRE(other.Restore(saved).ok());
    CHECK(both.scale == GradientScale{0.1, 512});
    CHECK(Values(both) == std::vector<float>{9, 10, 0, 0, 0, 0});
    CHECK(other.UnclaimedTensors() == std::vector<std::string>{"b", "w"});
  }
}

}  // namespace
}  // namespace gradwire::testing
