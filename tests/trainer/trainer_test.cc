#include "worker/trainer/trainer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/random.h"
#include "compressors/methods/method.h"
#include "tests/catch.h"
#include "tests/trainer/fake_clients.h"
#include "tests/trainer/patterns.h"
#include "worker/trainer/local_client.h"
#include "worker/trainer/schedule.h"
#include "worker/trainer/text.h"

namespace gradwire::trainer {
namespace {

/// `length` characters of random words out of eight, with spaces between them.
Text MakeSentences(std::size_t length, std::uint64_t seed = 1) {
  const std::vector<std::string> words = {"gradient", "worker", "server", "tensor",
                                          "pushes",   "pulls",  "every",  "step"};
  const std::string alphabet = " adeghiklnoprstuvwy";
  CounterRng rng(seed);
  std::vector<std::uint8_t> numbers;
  while (numbers.size() < length) {
    for (const char c : words[rng.NextBelow(words.size())] + " ") {
      numbers.push_back(static_cast<std::uint8_t>(alphabet.find(c)));
    }
  }
  return Text(std::move(numbers), alphabet.size(), 0);
}

TrainOptions Options(std::uint64_t steps, std::size_t batch) {
  TrainOptions options;
  options.steps = steps;
  options.batch = batch;
  options.rate = 0.05;
  options.seed = 3;
  return options;
}

std::vector<float> Values(const Parameter& p) {
  return {p.value.span().begin(), p.value.span().end()};
}

/// A layer that writes down its forward passes in the same list as the client its events.
class NotingLayer final : public Layer {
 public:
  NotingLayer(std::unique_ptr<Layer> layer, std::string event, std::vector<std::string>& events)
      : layer_(std::move(layer)), event_(std::move(event)), events_(events) {}
  std::span<Parameter> parameters() override { return layer_->parameters(); }
  std::size_t input_size() const override { return layer_->input_size(); }
  std::size_t output_size() const override { return layer_->output_size(); }
  void Forward(std::size_t batch, const float* in, float* out) override {
    events_.push_back(event_);
    layer_->Forward(batch, in, out);
  }
  Status Backward(std::size_t batch, const float* in, const float* out, float* grad_out,
                  float* grad_in, const GradientReady& ready) override {
    return layer_->Backward(batch, in, out, grad_out, grad_in, ready);
  }
  double ForwardFlops(std::size_t batch) const override { return layer_->ForwardFlops(batch); }

 private:
  std::unique_ptr<Layer> layer_;
  std::string event_;
  std::vector<std::string>& events_;
};

TEST_CASE("gradients go out layer by layer, last first, and come in as the forward pass needs them",
          "[trainer][order]") {
  RecordingClient client;
  std::vector<std::unique_ptr<Layer>> layers;
  layers.push_back(std::make_unique<NotingLayer>(MakeDense("a", kSide * kSide, 8, true),
                                                 "forward a", client.events));
  layers.push_back(
      std::make_unique<NotingLayer>(MakeDense("b", 8, 8, true), "forward b", client.events));
  layers.push_back(
      std::make_unique<NotingLayer>(MakeDense("c", 8, 10, false), "forward c", client.events));
  Model model(std::move(layers), 4, 1);
  // The network is slow with the last layer: it isn't there before the second forward pass has used
  // both others. A trainer that waited for it any earlier would be stuck.
  client.on_wait = [&](const std::string& name) {
    const auto passes = std::count(client.events.begin(), client.events.end(), "forward b");
    const auto ended = std::count(client.events.begin(), client.events.end(), "end");
    if (name.starts_with("c.") && ended == 1 && passes != 2) return Timeout("not there yet");
    return Status::Ok();
  };
  const Dataset data = MakePatterns(16);
  const auto report = Train(client, model, data, Options(2, 4));
  REQUIRE(report.ok());
  const std::vector<std::string> backward = {
      "push c.bias", "push c.weight", "push b.bias", "push b.weight",
      "push a.bias", "push a.weight", "end"};
  std::vector<std::string> expected = {"forward a", "forward b", "forward c"};
  expected.insert(expected.end(), backward.begin(), backward.end());
  for (const std::string layer : {"a", "b", "c"}) {
    expected.push_back("wait " + layer + ".weight");
    expected.push_back("wait " + layer + ".bias");
    expected.push_back("forward " + layer);
  }
  expected.insert(expected.end(), backward.begin(), backward.end());
  for (const std::string layer : {"a", "b", "c"}) {  // the updates of the last step
    expected.push_back("wait " + layer + ".weight");
    expected.push_back("wait " + layer + ".bias");
  }
  CHECK(client.events == expected);
  CHECK(client.in_flight() == 0);
}

TEST_CASE("tensors are declared by name and shape, front layers most urgent", "[trainer][order]") {
  RecordingClient client;
  const auto made = MakeModel("conv", kSide, kSide, 10, 4, 1);
  REQUIRE(made.ok());
  REQUIRE(Train(client, **made, MakePatterns(8), Options(1, 4)).ok());
  const auto tensors = client.plan()->tensors;
  REQUIRE(tensors.size() == 8);
  CHECK(tensors[0].name == "conv0.weight");
  CHECK(tensors[0].shape == std::vector<std::uint64_t>{16, 5, 5, 1});
  CHECK(tensors[1].name == "conv0.bias");
  CHECK(tensors[2].name == "conv1.weight");
  CHECK(tensors[7].name == "dense1.bias");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CHECK(tensors[i].dtype == DType::kFloat32);
    CHECK(tensors[i].op == ReduceOp::kAverage);
    CHECK(tensors[i].num_elements() == (*made)->parameters()[i]->value.size());
    if (i % 2 == 1) {
      CHECK(tensors[i].priority == tensors[i - 1].priority);
    } else if (i > 0) {
      CHECK(tensors[i].priority < tensors[i - 1].priority);
    }
  }
}

TEST_CASE("one step is the update that its formula says", "[trainer][update]") {
  // With a rate of r and no history, a weight moves by r (gradient + decay weight). The gradient
  // itself is what the client was handed.
  RecordingClient client;
  const auto model = MakeSmall(4);
  std::vector<std::vector<float>> before;
  for (const Parameter* p : model->parameters()) {
    // Biases start at 0, where a decay would not show.
    if (!p->is_weight()) std::fill_n(p->value.data(), p->value.size(), 0.5F);
    before.push_back(Values(*p));
  }
  std::map<std::string, std::vector<float>> gradients;
  client.on_result = [&](const std::string& name, std::span<float> values) {
    gradients[name].assign(values.begin(), values.end());
  };
  TrainOptions options = Options(1, 4);
  options.weight_decay = 0.25;
  REQUIRE(Train(client, *model, MakePatterns(8), options).ok());
  for (const Parameter* p : model->parameters()) {
    CAPTURE(p->name);
    const float decay = p->is_weight() ? 0.25F : 0.0F;
    const std::vector<float>& gradient = gradients[p->name];
    REQUIRE(gradient.size() == p->value.size());
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const float w = before[p->index][i];
      const volatile float decayed = decay * w;
      const volatile float total = gradient[i] + decayed;
      const volatile float change = 0.05F * total;
      REQUIRE(p->value.data()[i] == w - change);
    }
  }
}

TEST_CASE("the client is told the learning rate of each step before its gradients",
          "[trainer][update]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  TrainOptions options = Options(6, 4);
  options.rate = 0.5;
  options.warmup_steps = 2;
  REQUIRE(Train(client, *model, MakePatterns(8), options).ok());
  REQUIRE(client.rates.size() == 6);
  const LearningRate schedule{0.5, 2, 6};
  for (std::uint64_t step = 0; step < 6; ++step) {
    CHECK(client.rates[step] == static_cast<double>(static_cast<float>(schedule.At(step))));
  }
  CHECK(client.rates[0] < client.rates[1]);
  CHECK(client.rates[5] < client.rates[3]);
}

TEST_CASE("training lowers the loss and the parameters repeat bit by bit", "[trainer][training]") {
  const Dataset data = MakePatterns(400);
  for (const std::string name : {"dense", "conv"}) {
    CAPTURE(name);
    std::vector<std::uint64_t> digests;
    for (int run = 0; run < 2; ++run) {
      std::unique_ptr<Model> model;
      if (name == "dense") {
        model = MakeSmall(16);
      } else {
        std::vector<std::unique_ptr<Layer>> layers;
        layers.push_back(MakeConv("conv0", kSide, kSide, 1, 4, 3, true));
        layers.push_back(MakeMaxPool(kSide, kSide, 4));
        layers.push_back(MakeDense("dense0", kSide * kSide, 10, false));
        model = std::make_unique<Model>(std::move(layers), 16, 1);
      }
      RecordingClient client;
      std::vector<double> losses;
      TrainOptions options = Options(300, 16);
      options.on_step = [&](std::uint64_t step, double loss) {
        CHECK(step == losses.size());
        losses.push_back(loss);
      };
      const auto report = Train(client, *model, data, options);
      REQUIRE(report.ok());
      REQUIRE(losses.size() == 300);
      CHECK(report->steps == 300);
      CHECK(report->first_loss == losses[0]);
      CHECK(report->last_loss < 0.2 * report->first_loss);
      const TestResult test = Evaluate(*model, data);
      CHECK(test.accuracy > 0.95);
      CHECK(test.loss < 0.2 * report->first_loss);
      CHECK(report->digest == model->Digest());
      digests.push_back(report->digest);
    }
    CHECK(digests[0] == digests[1]);
  }
}

TEST_CASE("tests on the way make a curve and leave the training alone", "[trainer][training]") {
  const Dataset data = MakePatterns(400);
  const Dataset test = MakePatterns(50);
  const auto plain = MakeSmall(16);
  const auto watched = MakeSmall(16);
  TrainOptions options = Options(25, 16);
  std::vector<double> losses;
  options.on_step = [&](std::uint64_t, double loss) { losses.push_back(loss); };
  RecordingClient client;
  const auto before = Train(client, *plain, data, options);
  REQUIRE(before.ok());
  CHECK(before->curve.empty());
  options.on_step = nullptr;

  options.test_every = 10;
  options.test_data = &test;
  RecordingClient other;
  const auto report = Train(other, *watched, data, options);
  REQUIRE(report.ok());
  CHECK(report->digest == before->digest);
  REQUIRE(report->curve.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(report->curve[i].step == 10 * (i + 1));
    const auto first = losses.begin() + static_cast<std::ptrdiff_t>(10 * i);
    CHECK(report->curve[i].loss == std::accumulate(first, first + 10, 0.0) / 10);
  }
  CHECK(report->curve[0].seconds <= report->curve[1].seconds);
  CHECK(report->curve[1].seconds <= report->seconds);

  CHECK(report->curve[1].test.loss < report->curve[0].test.loss);

  // A point at the end is of the final parameters.
  const auto stopped = MakeSmall(16);
  options.test_every = 25;
  RecordingClient last;
  const auto end = Train(last, *stopped, data, options);
  REQUIRE(end.ok());
  REQUIRE(end->curve.size() == 1);
  const TestResult result = Evaluate(*stopped, test);
  CHECK(end->curve[0].test.loss == result.loss);
  CHECK(end->curve[0].test.accuracy == result.accuracy);
}

TEST_CASE("another seed gives other parameters and other batches", "[trainer][training]") {
  CHECK(MakeSmall(1, 1)->Digest() == MakeSmall(1, 1)->Digest());
  CHECK(MakeSmall(1, 1)->Digest() != MakeSmall(1, 2)->Digest());
  const Dataset data = MakePatterns(64);
  std::vector<std::uint64_t> digests;
  for (const std::uint64_t seed : {1U, 2U}) {
    const auto model = MakeSmall(8, 1);
    TrainOptions options = Options(3, 8);
    options.seed = seed;
    RecordingClient client;
    const auto report = Train(client, *model, data, options);
    REQUIRE(report.ok());
    digests.push_back(report->digest);
  }
  CHECK(digests[0] != digests[1]);
}

TEST_CASE("weights start with a variance of 2 over the fan-in", "[trainer][training]") {
  std::vector<std::unique_ptr<Layer>> layers;
  layers.push_back(MakeDense("dense0", 200, 500, true));
  Model model(std::move(layers), 1, 9);
  double sum = 0.0;
  double squares = 0.0;
  const Parameter& weight = *model.parameters()[0];
  for (const float w : weight.value.span()) {
    sum += static_cast<double>(w);
    squares += static_cast<double>(w) * static_cast<double>(w);
  }
  const double n = 1e5;
  // Deviation of the mean: 0.1 / sqrt(n) = 3.2e-4; of the variance: 0.01 sqrt(2 / n) = 4.5e-5.
  // Five of each.
  CHECK(std::abs(sum / n) < 1.6e-3);
  CHECK(std::abs(squares / n - 0.01) < 2.3e-4);
  for (const float b : model.parameters()[1]->value.span()) CHECK(b == 0.0F);
}

using MakeTrained = std::function<std::unique_ptr<Model>(std::size_t, std::uint64_t)>;

struct Outcome {
  std::optional<Result<TrainReport>> report;
  std::unique_ptr<Model> model;
};

std::vector<Outcome> TrainTogether(std::uint32_t workers, const Samples& data,
                                   const TrainOptions& options,
                                   const std::function<void(AveragingClient&)>& prepare = {},
                                   const MakeTrained& make = MakeSmall) {
  Meeting meeting(workers);
  std::vector<Outcome> outcomes(workers);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      AveragingClient client(meeting, rank);
      if (prepare) prepare(client);
      // Other initial parameters on each rank: the broadcast has to make them equal.
      outcomes[rank].model = make(options.batch, 1 + rank);
      outcomes[rank].report.emplace(Train(client, *outcomes[rank].model, data, options));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

TEST_CASE("two workers equal one with twice the batch", "[trainer][workers]") {
  const Dataset data = MakePatterns(100);
  const auto outcomes = TrainTogether(2, data, Options(20, 8));
  REQUIRE(outcomes[0].report->ok());
  REQUIRE(outcomes[1].report->ok());
  CHECK((*outcomes[0].report)->digest == (*outcomes[1].report)->digest);

  RecordingClient client;
  const auto model = MakeSmall(16);
  REQUIRE(Train(client, *model, data, Options(20, 16)).ok());
  // The gradient is the same sum of 16 samples in another order: it differs by at most
  // 16 * 2^-24 = 1e-6 of the sum of magnitudes, which is about 1 at the start. Over 20 steps of
  // rate 0.05, with momentum worth a factor of 10, that is 20 * 0.05 * 10 * 1e-6 = 1e-5; the loss's
  // curvature may grow it a little. A wrong slice or a missing division moves weights by 1e-2.
  double worst = 0.0;
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const auto one = model->parameters()[i]->value.span();
    const auto two = outcomes[0].model->parameters()[i]->value.span();
    for (std::size_t k = 0; k < one.size(); ++k) {
      worst = std::max(worst, std::abs(static_cast<double>(one[k]) - static_cast<double>(two[k])));
    }
  }
  CHECK(worst < 1e-4);
}

TEST_CASE("the loss of a text falls far below what counting characters gives", "[trainer][text]") {
  const Text text = MakeSentences(20000);
  std::vector<double> counts(text.shape().classes);
  for (std::size_t i = 0; i < text.size(); ++i) ++counts[text.label(i)];
  double unigram_entropy = 0.0;
  for (const double count : counts) {
    const double share = count / static_cast<double>(text.size());
    if (count > 0.0) unigram_entropy -= share * std::log(share);
  }
  const auto model = MakeModel(kTextModel, 1, kTextContext, text.shape().classes, 32, 1);
  REQUIRE(model.ok());
  RecordingClient client;
  const auto report = Train(client, **model, text, Options(150, 32));
  REQUIRE(report.ok());
  CHECK(report->first_loss > unigram_entropy);
  // Half would be near: a character inside a word is certain, and the first one a choice of eight.
  CHECK(Evaluate(**model, MakeSentences(2000, 2)).loss < 0.6 * unigram_entropy);
}

TEST_CASE("two workers train a text to the same bits, again and again", "[trainer][text]") {
  const Text text = MakeSentences(2000);
  const auto make = [&](std::size_t max_batch, std::uint64_t seed) {
    return MakeModel(kTextModel, 1, kTextContext, text.shape().classes, max_batch, seed).value();
  };
  std::vector<std::uint64_t> digests;
  for (int run = 0; run < 2; ++run) {
    for (const Outcome& outcome : TrainTogether(2, text, Options(5, 8), {}, make)) {
      CAPTURE(outcome.report->status().message());
      REQUIRE(outcome.report->ok());
      CHECK((*outcome.report)->digest == outcome.model->Digest());
      digests.push_back((*outcome.report)->digest);
    }
  }
  CHECK(digests == std::vector<std::uint64_t>(4, digests[0]));
}

TEST_CASE("all ranks fail if one ends with other parameters", "[trainer][workers]") {
  const auto outcomes =
      TrainTogether(3, MakePatterns(50), Options(2, 4), [](AveragingClient& client) {
        if (client.rank() != 1) return;
        client.on_broadcast = [](const std::string& name, MutableBytes data) {
          if (name == "dense0.bias.initial") data[0] ^= std::byte{1};
        };
      });
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.report->status().code() == StatusCode::kInternal);
    CHECK(outcome.report->status().message().find("rank 1") != std::string::npos);
  }
}

TEST_CASE("a gradient that is not finite leaves its tensor alone for that step",
          "[trainer][nonfinite]") {
  const float bad =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  RecordingClient client;
  const auto model = MakeSmall(4);
  std::vector<std::vector<float>> before;
  for (const Parameter* p : model->parameters()) before.push_back(Values(*p));
  client.on_result = [&](const std::string& name, std::span<float> values) {
    if (name == "dense1.weight") values[values.size() / 2] = bad;
  };
  const auto report = Train(client, *model, MakePatterns(8), Options(1, 4));
  REQUIRE(report.ok());
  CHECK(report->skipped_updates == 1);
  for (const Parameter* p : model->parameters()) {
    CAPTURE(p->name);
    CHECK((Values(*p) == before[p->index]) == (p->name == "dense1.weight"));
    if (p->name != "dense1.weight") continue;
    for (const float v : p->velocity.span()) CHECK(v == 0.0F);
  }
}

/// Options of a job that every method goes with; nothing is really compressed by these clients.
TrainOptions MethodOptions(const std::string& method, std::uint64_t steps, std::size_t batch) {
  TrainOptions options = Options(steps, batch);
  options.method = method;
  options.rate = DefaultRate(method);
  options.compression.uplink.compressor.name = "onebit";
  options.compression.downlink.compressor.name = "onebit";
  options.compression.warmup_steps = steps / 4;
  return options;
}

TEST_CASE("every method trains, in its own way, and repeats itself", "[trainer][method]") {
  const Dataset data = MakePatterns(400);
  std::set<std::uint64_t> digests;
  for (const MethodInfo& info : Methods()) {
    CAPTURE(info.name);
    std::vector<std::uint64_t> runs;
    const TrainOptions options = MethodOptions(info.name, 300, 16);
    double last_loss = 0;
    for (int run = 0; run < 2; ++run) {
      RecordingClient client;
      const auto model = MakeSmall(16);
      const auto report = Train(client, *model, data, options);
      REQUIRE(report.status() == Status::Ok());
      CHECK(report->skipped_updates == 0);
      CHECK(report->last_loss < 0.1 * report->first_loss);
      CHECK(Evaluate(*model, data).accuracy > 0.95);
      runs.push_back(report->digest);
      last_loss = report->last_loss;
    }
    CHECK(runs[0] == runs[1]);
    digests.insert(runs[0]);
    // SGD without a method is not that far with the same rate.
    TrainOptions plain = options;
    plain.method = "none";
    RecordingClient client;
    const auto model = MakeSmall(16);
    const auto report = Train(client, *model, data, plain);
    REQUIRE(report.ok());
    CAPTURE(last_loss, report->last_loss);
    CHECK(last_loss < 0.8 * report->last_loss);
  }
  // clan is lans where nothing is compressed.
  CHECK(digests.size() == Methods().size() - 1);
}

TEST_CASE("workers that push what their own history made of a gradient end alike",
          "[trainer][method][workers]") {
  for (const std::string method : {"dist_ef_sgdm", "onebit_adam", "onebit_lamb", "lans"}) {
    CAPTURE(method);
    const auto outcomes = TrainTogether(2, MakePatterns(100), MethodOptions(method, 40, 8));
    REQUIRE(outcomes[0].report->status() == Status::Ok());
    REQUIRE(outcomes[1].report->status() == Status::Ok());
    CHECK((*outcomes[0].report)->digest == (*outcomes[1].report)->digest);
    CHECK((*outcomes[0].report)->last_loss < (*outcomes[0].report)->first_loss);
  }
}

TEST_CASE("what is pushed is what the method makes of the gradient", "[trainer][method]") {
  // With a rate of 0 and a batch of all samples every step has the same gradient g, but for the
  // order of its sum: 4 samples differ by 4 * 2^-24 of the sum of their magnitudes.
  struct Case {
    std::string method;
    std::vector<double> pushed;  // over g
  };
  const std::vector<Case> cases = {
      {"adamw", {1, 1, 1}},
      // m is g, 1.9 g, 2.71 g; pushed is g + 0.9 m.
      {"dist_ef_sgdm", {1.9, 2.71, 3.439}},
      // Two steps of warm-up leave m = 0.19 g; then 0.9 m + 0.1 g is pushed and pulled.
      {"onebit_adam(freeze_step=2)", {1, 1, 0.271, 0.3439}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.method);
    RecordingClient client;
    std::vector<std::vector<float>> pushed;
    client.on_result = [&](const std::string& name, std::span<float> values) {
      if (name == "dense1.weight") pushed.emplace_back(values.begin(), values.end());
    };
    const auto model = MakeSmall(4);
    TrainOptions options = MethodOptions(c.method, c.pushed.size(), 4);
    options.compression.warmup_steps = 2;
    options.rate = 0;
    REQUIRE(Train(client, *model, MakePatterns(4), options).status() == Status::Ok());
    REQUIRE(pushed.size() == c.pushed.size());
    std::size_t tested = 0;
    for (std::size_t i = 0; i < pushed[0].size(); ++i) {
      const double g = static_cast<double>(pushed[0][i]) / c.pushed[0];
      if (std::abs(g) < 1e-3) continue;
      ++tested;
      for (std::size_t step = 0; step < pushed.size(); ++step) {
        REQUIRE(static_cast<double>(pushed[step][i]) == Approx(c.pushed[step] * g).epsilon(1e-3));
      }
    }
    CHECK(tested > 100);
  }
}

TEST_CASE("a method leaves a tensor whose gradient is not finite alone for that step",
          "[trainer][method][nonfinite]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  std::vector<std::vector<float>> before;
  for (const Parameter* p : model->parameters()) before.push_back(Values(*p));
  client.on_result = [&](const std::string& name, std::span<float> values) {
    if (name == "dense1.weight") values[0] = std::numeric_limits<float>::quiet_NaN();
  };
  const auto report = Train(client, *model, MakePatterns(8), MethodOptions("adamw", 1, 4));
  REQUIRE(report.ok());
  CHECK(report->skipped_updates == 1);
  for (const Parameter* p : model->parameters()) {
    CAPTURE(p->name);
    CHECK((Values(*p) == before[p->index]) == (p->name == "dense1.weight"));
  }
}

/// Sends the two halves of dense1.weight in turn, and leaves alone what it does not send. If the
/// interval is measured, its first plan sends all in each step, as long as nothing is known.
class HalvingClient final : public FakeClientBase {
 public:
  explicit HalvingClient(bool is_measured) : FakeClientBase(0, 1), is_measured_(is_measured) {
    plan_.filter.skips_inactive = true;
  }

  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override {
    auto ids = FakeClientBase::Declare(batch);
    plan_.filter.stages = {{.interval = is_measured_ ? 1U : 2U}};
    const std::uint32_t second = is_measured_ ? 0 : 1;
    for (std::uint32_t t = 0; t < plan_.tensors.size(); ++t) {
      const std::uint64_t n = plan_.tensors[t].num_elements();
      if (plan_.tensors[t].name != "dense1.weight") {
        AddUnit({t, 0, 0, n}, {});
        continue;
      }
      half_ = n / 2;
      // In three units, of which the last two go together.
      AddUnit({t, 0, 0, half_}, {0});
      AddUnit({t, half_, 0, 8}, {second});
      AddUnit({t, half_ + 8, 0, n - half_ - 8}, {second});
    }
    return ids;
  }
  Result<Handle> PushPullAsync(TensorId tensor, ByteView, MutableBytes) override {
    return Handle{tensor, step_ + 1};
  }
  Status Wait(const Handle&) override { return Status::Ok(); }
  bool Poll(const Handle&) override { return true; }
  Result<std::vector<ElementRange>> ActiveRanges(const Handle& handle) const override {
    const std::uint64_t n = plan_.tensors[handle.tensor.index].num_elements();
    if (NameOf(handle.tensor) != "dense1.weight") return std::vector<ElementRange>{{0, n}};
    if (handle.generation % 2 == 1) return std::vector<ElementRange>{{0, half_}};
    return std::vector<ElementRange>{{half_, n - half_}};
  }
  Status EndStep() override {
    ++step_;
    return Status::Ok();
  }
  Status Broadcast(const std::string&, MutableBytes, std::uint32_t) override {
    return Status::Ok();
  }
  std::size_t half() const { return half_; }

 private:
  void AddUnit(const UnitMember& member, std::vector<std::uint32_t> classes) {
    Unit unit;
    unit.members = {member};
    unit.filter_classes = std::move(classes);
    plan_.units.push_back(std::move(unit));
  }

  const bool is_measured_;
  std::uint64_t step_ = 0;
  std::size_t half_ = 0;
};

TEST_CASE("under a filter that skips a method updates just what was sent", "[trainer][method]") {
  const bool is_measured = GENERATE(false, true);
  for (const std::string method : {"lans", "sgd", "dist_ef_sgdm"}) {
    for (const std::uint64_t steps : {1U, 2U, 3U}) {
      CAPTURE(is_measured, method, steps);
      HalvingClient client(is_measured);
      TrainOptions options = MethodOptions(method, steps, 4);
      options.compression.filter.type = FilterType::kCovap;
      options.compression.filter.interval = is_measured ? 0 : 2;
      options.compression.filter.inactive = FilterInactive::kSkip;
      const auto model = MakeSmall(4);
      const auto same = MakeSmall(4);
      const auto report = Train(client, *model, MakePatterns(8), options);
      REQUIRE(report.status() == Status::Ok());
      for (const Parameter* p : model->parameters()) {
        CAPTURE(p->name);
        const std::vector<float> now = Values(*p);
        const std::vector<float> before = Values(*same->parameters()[p->index]);
        if (p->name != "dense1.weight") {
          CHECK(now != before);
          continue;
        }
        const auto half = static_cast<std::ptrdiff_t>(client.half());
        CHECK_FALSE(std::equal(now.begin(), now.begin() + half, before.begin()));
        CHECK(std::equal(now.begin() + half, now.end(), before.begin() + half) == (steps == 1));
      }
    }
  }
}

TEST_CASE("a method that does not exist or does not go with the job is refused",
          "[trainer][method][errors]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  const Dataset data = MakePatterns(8);
  CHECK(Train(client, *model, data, MethodOptions("lams", 1, 4)).status().code() ==
        StatusCode::kNotFound);
  TrainOptions options = MethodOptions("clan", 1, 4);
  options.compression = {};
  CHECK(Train(client, *model, data, options).status().message() ==
        "method clan wants a compressor in both directions, and compression.uplink.compressor is "
        "none; method lans does without");
}

TEST_CASE("an error of the client ends the run with nothing in flight", "[trainer][errors]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  client.on_wait = [&](const std::string& name) {
    return name == "dense1.weight" ? Unavailable("server 0 is gone") : Status::Ok();
  };
  const auto report = Train(client, *model, MakePatterns(8), Options(5, 4));
  CHECK(report.status() == Unavailable("server 0 is gone"));
  CHECK(client.in_flight() == 0);
}

TEST_CASE("options that make no sense are refused", "[trainer][errors]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  const Dataset data = MakePatterns(8);
  std::vector<TrainOptions> wrong(8, Options(1, 4));
  wrong[0].batch = 0;
  wrong[1].batch = 5;
  wrong[2].rate = -1.0;
  wrong[3].rate = std::numeric_limits<double>::quiet_NaN();
  wrong[4].momentum = 1.0;
  wrong[5].momentum = std::numeric_limits<double>::quiet_NaN();
  wrong[6].weight_decay = -1.0;
  wrong[7].test_every = 1;  // without data
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    CAPTURE(i);
    CHECK(Train(client, *model, data, wrong[i]).status().code() == StatusCode::kInvalidArgument);
  }
  CHECK(Train(client, *model, Dataset(), Options(1, 4)).status().code() ==
        StatusCode::kInvalidArgument);
  CHECK(MakeModel("vgg", 28, 28, 10, 4, 1).status().code() == StatusCode::kInvalidArgument);
  CHECK(MakeModel("conv", 30, 28, 10, 4, 1).status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE("gradient rounds and the initial broadcast are counted apart", "[trainer][report]") {
  RecordingClient client;
  const auto model = MakeSmall(4);
  std::vector<Progress> lines;
  TrainOptions options = Options(3, 4);
  options.progress_every_s = 1e9;  // the last step reports anyway
  options.on_progress = [&](const Progress& progress) { lines.push_back(progress); };
  const auto report = Train(client, *model, MakePatterns(8), options);
  REQUIRE(report.ok());
  const std::uint64_t bytes = 4 * model->num_parameters();
  CHECK(report->broadcast.raw_push_bytes == bytes);
  CHECK(report->broadcast.sent_bytes == bytes);
  CHECK(report->gradients.raw_push_bytes == 3 * bytes);
  CHECK(report->gradients.raw_pull_bytes == 3 * bytes);
  CHECK(report->gradients.sent_bytes == 3 * bytes / 2);
  CHECK(report->gradients.received_bytes == 3 * bytes / 2);
  CHECK(report->flops == 3 * model->StepFlops(4));
  CHECK(model->StepFlops(4) == 2.0 * 4 * (2 * 64 * 32 + 3 * 32 * 24 + 3 * 24 * 10));
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].step == 3);
  CHECK(lines[0].ratio == 2.0);
}

TEST_CASE("the report is written as JSON, with nulls for what is not there", "[trainer][report]") {
  RunSummary run;
  run.model = "a\"b\\c\nd";
  run.report.first_loss = std::numeric_limits<double>::quiet_NaN();
  run.report.last_loss = 0.5;
  run.report.digest = 0xabc;
  const std::string json = ToJson(run);
  CHECK(json.find("\"model\": \"a\\\"b\\\\c\\u000ad\"") != std::string::npos);
  CHECK(json.find("\"first_loss\": null") != std::string::npos);
  CHECK(json.find("\"last_loss\": 0.5,") != std::string::npos);
  CHECK(json.find("\"test_loss\": null") != std::string::npos);
  CHECK(json.find("\"accuracy\": null") != std::string::npos);
  CHECK(json.find("\"push_ratio\": null") != std::string::npos);
  CHECK(json.find("\"ccr\": null") != std::string::npos);
  CHECK(json.find("\"digest\": \"0000000000000abc\"\n}") != std::string::npos);
  CHECK(json.find("\"interval\": null") != std::string::npos);
  run.report.interval = 4;
  CHECK(ToJson(run).find("\"interval\": 4,") != std::string::npos);
  CHECK(json.find("\"restored_step\": null") != std::string::npos);
  run.report.steps = 30;
  run.report.first_step = 20;
  run.report.seconds = 2.0;
  CHECK(ToJson(run).find("\"steps_per_second\": 5,\n  \"restored_step\": 20,") !=
        std::string::npos);
  CHECK(json.find("\"curve\": [],") != std::string::npos);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  run.report.curve = {{10, 0.5, 2.25, {2.0, 0.25}}, {20, 1.0, nan, {nan, 0.0}}};
  CHECK(ToJson(run).find(
            "\"curve\": [{\"step\": 10, \"seconds\": 0.5, \"loss\": 2.25, \"test_loss\": 2, "
            "\"accuracy\": 0.25}, {\"step\": 20, \"seconds\": 1, \"loss\": null, "
            "\"test_loss\": null, \"accuracy\": 0}],") != std::string::npos);
  run.report.overlap.comm_ms = 3.0;
  run.report.overlap.compute_ms = 2.0;
  CHECK(ToJson(run).find("\"ccr\": 1.5,") != std::string::npos);
  run.has_test = true;
  run.test = {0.5625, 0.875};
  run.report.gradients = {800, 900, 100, 300};
  const std::string full = ToJson(run);
  CHECK(full.find("\"test_loss\": 0.5625") != std::string::npos);
  CHECK(full.find("\"accuracy\": 0.875") != std::string::npos);
  CHECK(full.find("\"push_ratio\": 8,") != std::string::npos);
  CHECK(full.find("\"pull_ratio\": 3,") != std::string::npos);
}

TEST_CASE("the client without servers gives gradients back and checks sizes", "[trainer][local]") {
  const auto client = MakeLocalClient();
  CHECK(client->num_workers() == 1);
  const TensorDeclaration tensor{.name = "t", .shape = {3}};
  const auto ids = client->Declare(std::span(&tensor, 1));
  REQUIRE(ids.ok());
  std::vector<float> in = {1, 2, 3};
  std::vector<float> out(3);
  const auto handle = client->PushPullAsync((*ids)[0], AsBytes(std::span(in)),
                                            std::as_writable_bytes(std::span(out)));
  REQUIRE(handle.ok());
  CHECK(client->Wait(*handle).ok());
  CHECK(out == in);
  CHECK(client->stats().raw_push_bytes == 12);
  CHECK(client
            ->PushPullAsync((*ids)[0], AsBytes(std::span(in)).first(8),
                            std::as_writable_bytes(std::span(out)))
            .status()
            .code() == StatusCode::kInvalidArgument);
  CHECK(client->PushPullAsync({7}, {}, {}).status().code() == StatusCode::kInvalidArgument);
  CHECK_FALSE(client->Broadcast("b", {}, 1).ok());
}

}  // namespace
}  // namespace gradwire::trainer
