#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "tests/catch.h"
#include "worker/trainer/kernels.h"
#include "worker/trainer/layers.h"

namespace gradwire::trainer {
namespace {

// Dense, convolution, ReLU and pooling are linear in each argument between the places where ReLU or
// the maximum switches. All numbers here are small multiples of kGrid = 2^-4: products are
// multiples of 2^-8, sums of at most 2^7 products of numbers up to 2 stay below 2^9, and the
// weighted sum of outputs below, computed in double, is exact. float holds multiples of 2^-8 up to
// 2^16 exactly. So forward, backward and finite differences are all exact, whatever the order of
// summation, and the comparison needs no tolerance at all.
constexpr float kGrid = 0x1p-4F;

std::vector<float> GridNumbers(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> numbers(n);
  for (float& v : numbers) v = kGrid * (static_cast<float>(rng.NextBelow(33)) - 16.0F);
  return numbers;
}

/// sum_i weights[i] y[i] of a forward pass.
double Objective(Layer& layer, std::size_t batch, const std::vector<float>& in,
                 const std::vector<float>& weights) {
  std::vector<float> out(batch * layer.output_size());
  layer.Forward(batch, in.data(), out.data());
  double sum = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    sum += static_cast<double>(weights[i]) * static_cast<double>(out[i]);
  }
  return sum;
}

/// Compares a gradient with central differences at every element of `values` where the objective is
/// linear around it (both one-sided differences agree). Returns how many there were.
std::size_t CheckGradient(std::span<float> values, std::span<const float> gradient,
                          const std::function<double()>& objective) {
  std::size_t checked = 0;
  const double here = objective();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float kept = values[i];
    values[i] = kept + kGrid;
    const double above = objective();
    values[i] = kept - kGrid;
    const double below = objective();
    values[i] = kept;
    if (above - here != here - below) continue;  // a switch in between
    ++checked;
    CAPTURE(i);
    CHECK(static_cast<double>(gradient[i]) == (above - below) / (2.0 * kGrid));
  }
  return checked;
}

void CheckLayer(Layer& layer, std::size_t batch, double least_share) {
  std::vector<float> in = GridNumbers(batch * layer.input_size(), 1);
  std::uint64_t seed = 2;
  for (Parameter& p : layer.parameters()) {
    const std::vector<float> values = GridNumbers(p.value.size(), seed++);
    std::copy(values.begin(), values.end(), p.value.data());
    // What an earlier step left must not matter.
    std::fill_n(p.gradient.data(), p.gradient.size(), 99.0F);
  }
  const std::vector<float> weights = GridNumbers(batch * layer.output_size(), seed);
  std::vector<float> out(weights.size());
  layer.Forward(batch, in.data(), out.data());
  std::vector<float> grad_out = weights;
  std::vector<float> grad_in(in.size(), 99.0F);
  std::vector<std::string> order;
  REQUIRE(layer
              .Backward(batch, in.data(), out.data(), grad_out.data(), grad_in.data(),
                        [&](Parameter& p) {
                          order.push_back(p.name);
                          return Status::Ok();
                        })
              .ok());
  CHECK(order.size() == layer.parameters().size());  // each is handed over once

  const auto objective = [&] { return Objective(layer, batch, in, weights); };
  std::size_t checked = CheckGradient(in, grad_in, objective);
  std::size_t all = in.size();
  for (Parameter& p : layer.parameters()) {
    CAPTURE(p.name);
    checked += CheckGradient(p.value.span(), p.gradient.span(), objective);
    all += p.value.size();
  }
  CAPTURE(checked, all);
  CHECK(static_cast<double>(checked) >= least_share * static_cast<double>(all));

  // Without anybody to take the input's gradient the rest is the same.
  std::vector<std::vector<float>> before;
  for (Parameter& p : layer.parameters()) {
    before.emplace_back(p.gradient.span().begin(), p.gradient.span().end());
  }
  grad_out = weights;
  REQUIRE(layer
              .Backward(batch, in.data(), out.data(), grad_out.data(), nullptr,
                        [](Parameter&) { return Status::Ok(); })
              .ok());
  std::size_t at = 0;
  for (Parameter& p : layer.parameters()) {
    CHECK(std::equal(before[at].begin(), before[at].end(), p.gradient.data()));
    ++at;
  }
}

TEST_CASE("the dense layer's gradients equal finite differences", "[trainer][gradient]") {
  CheckLayer(*MakeDense("d", 13, 7, false), 3, 1.0);
  CheckLayer(*MakeDense("d", 13, 7, true), 3, 0.5);
  CheckLayer(*MakeDense("d", 17, 150, false), 2, 1.0);  // more rows than one panel
  CheckLayer(*MakeDense("d", 1, 1, false), 1, 1.0);
}

TEST_CASE("the convolution's gradients equal finite differences", "[trainer][gradient]") {
  CheckLayer(*MakeConv("c", 5, 6, 2, 3, 3, false), 2, 1.0);
  CheckLayer(*MakeConv("c", 5, 4, 1, 4, 3, true), 2, 0.2);   // a weight reaches many switches
  CheckLayer(*MakeConv("c", 4, 3, 2, 2, 5, false), 1, 1.0);  // the kernel is larger than the image
  CheckLayer(*MakeConv("c", 2, 2, 3, 2, 1, false), 1, 1.0);
}

TEST_CASE("the pooling layer's gradients equal finite differences", "[trainer][gradient]") {
  CheckLayer(*MakeMaxPool(4, 6, 3), 2, 0.7);
}

TEST_CASE("the embedding's gradients equal finite differences", "[trainer][gradient]") {
  constexpr std::size_t kBatch = 3;
  constexpr std::size_t kLength = 4;
  constexpr std::size_t kRows = 6;
  constexpr std::size_t kWidth = 5;
  const auto layer = MakeEmbedding("e", kLength, kRows, kWidth);
  CHECK(layer->input_size() == kLength);
  CHECK(layer->output_size() == kLength * kWidth);
  REQUIRE(layer->parameters().size() == 1);
  Parameter& table = layer->parameters()[0];
  CHECK(table.name == "e.weight");
  CHECK(table.shape == std::vector<std::uint64_t>{kRows, kWidth});
  const std::vector<float> values = GridNumbers(kRows * kWidth, 1);
  std::copy(values.begin(), values.end(), table.value.data());
  std::fill_n(table.gradient.data(), table.gradient.size(), 99.0F);
  // Some rows more than once in a sample, row 4 never.
  const std::vector<float> in = {0, 5, 5, 1, 2, 2, 2, 2, 3, 0, 5, 1};
  const std::vector<float> weights = GridNumbers(kBatch * kLength * kWidth, 2);
  std::vector<float> grad_out = weights;
  std::vector<float> out(weights.size());
  layer->Forward(kBatch, in.data(), out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    CAPTURE(i);
    CHECK(out[i] == values[static_cast<std::size_t>(in[i / kWidth]) * kWidth + i % kWidth]);
  }
  std::vector<float> grad_in(in.size(), 99.0F);
  int handed_over = 0;
  REQUIRE(layer
              ->Backward(kBatch, in.data(), out.data(), grad_out.data(), grad_in.data(),
                         [&](Parameter& p) {
                           handed_over += &p == &table ? 1 : 100;
                           return Status::Ok();
                         })
              .ok());
  CHECK(handed_over == 1);
  const std::size_t checked = CheckGradient(table.value.span(), table.gradient.span(),
                                            [&] { return Objective(*layer, kBatch, in, weights); });
  CHECK(checked == kRows * kWidth);
  CHECK(grad_in == std::vector<float>(in.size(), 0.0F));
}

TEST_CASE("pooling hands a tie's gradient to one input only", "[trainer][gradient]") {
  const auto pool = MakeMaxPool(2, 2, 1);
  const std::vector<float> in = {0, 5, 5, 5};
  std::vector<float> out(1);
  pool->Forward(1, in.data(), out.data());
  CHECK(out[0] == 5.0F);
  std::vector<float> grad_out = {3};
  std::vector<float> grad_in(4, 9.0F);
  REQUIRE(pool->Backward(1, in.data(), out.data(), grad_out.data(), grad_in.data(),
                         [](Parameter&) { return Status::Ok(); })
              .ok());
  CHECK(grad_in == std::vector<float>{0, 3, 0, 0});
}

TEST_CASE("an error while a gradient is handed over ends the layer's backward pass",
          "[trainer][gradient]") {
  for (const auto& layer : {MakeDense("d", 2, 2, true), MakeConv("c", 2, 2, 1, 1, 1, true),
                            MakeEmbedding("e", 1, 2, 2)}) {
    std::vector<float> in(layer->input_size(), 1.0F);
    std::vector<float> out(layer->output_size(), 1.0F);
    std::vector<float> grad_out = out;
    int calls = 0;
    const Status status =
        layer->Backward(1, in.data(), out.data(), grad_out.data(), nullptr, [&](Parameter&) {
          ++calls;
          return Unavailable("gone");
        });
    CHECK(status.code() == StatusCode::kUnavailable);
    CHECK(calls == 1);
  }
}

TEST_CASE("the gradient of softmax and cross entropy equals finite differences",
          "[trainer][gradient]") {
  // The loss is computed in double from float logits. With a step h = 2^-10, exact in float at
  // logits that are multiples of it, a central difference is off by h^2 / 6 |f'''|; the third
  // derivative p (1 - p) (1 - 2 p) is below 0.1, which makes 1.6e-8. Rounding in double adds
  // 1e-16 / h = 1e-13, and the gradient is rounded to float: at most 2^-24 = 6e-8.
  constexpr float kStep = 0x1p-10F;
  constexpr double kTolerance = 1e-7;
  constexpr std::size_t kRows = 4;
  constexpr std::size_t kClasses = 10;
  std::vector<float> logits = GridNumbers(kRows * kClasses, 5);
  for (float& v : logits) v *= 4.0F;
  const std::vector<std::uint8_t> labels = {0, 9, 3, 3};
  std::vector<float> gradient(logits.size());
  std::size_t correct = 0;
  const auto loss = [&] {
    double value = 0.0;
    gradwire_nn_softmax_cross_entropy(kRows, kClasses, logits.data(), labels.data(), nullptr,
                                      &value, &correct);
    return value;
  };
  double value = 0.0;
  gradwire_nn_softmax_cross_entropy(kRows, kClasses, logits.data(), labels.data(), gradient.data(),
                                    &value, &correct);
  CHECK(value == loss());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float kept = logits[i];
    logits[i] = kept + kStep;
    const double above = loss();
    logits[i] = kept - kStep;
    const double below = loss();
    logits[i] = kept;
    CAPTURE(i);
    CHECK(std::abs(static_cast<double>(gradient[i]) -
                   (above - below) / (2.0 * static_cast<double>(kStep))) < kTolerance);
  }
}

TEST_CASE("softmax stands large logits and counts what is right", "[trainer][gradient]") {
  const std::vector<float> logits = {1e30F, -1e30F, 0, 0, 0, 7};
  const std::vector<std::uint8_t> labels = {0, 0};
  std::vector<float> gradient(6);
  double loss = 0.0;
  std::size_t correct = 0;
  gradwire_nn_softmax_cross_entropy(2, 3, logits.data(), labels.data(), gradient.data(), &loss,
                                    &correct);
  CHECK(correct == 1);
  // The first row is certain and right; the second loses log(2 + e^7).
  CHECK(loss == Approx(std::log(2.0 + std::exp(7.0)) / 2.0));
  CHECK(gradient[0] == 0.0F);
  for (const float g : gradient) CHECK(std::isfinite(g));
}

}  // namespace
}  // namespace gradwire::trainer
