#include "compressors/methods/optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

constexpr std::uint64_t kFreezeStep = 3;

/// Every registered method as it is written; those with a warm-up have one of kFreezeStep steps.
std::vector<std::string> Specs() {
  std::vector<std::string> specs;
  for (const MethodInfo& info : Methods()) {
    const bool has_phases = std::any_of(info.parameters.begin(), info.parameters.end(),
                                        [](const auto& p) { return p.name == "freeze_step"; });
    specs.push_back(has_phases ? fmt::format("{}(freeze_step={})", info.name, kFreezeStep)
                               : info.name);
  }
  return specs;
}

std::unique_ptr<Optimizer> Make(const std::string& spec) {
  auto made = Optimizer::Create(spec, nullptr);
  REQUIRE(made.status() == Status::Ok());
  return std::move(made).value();
}

std::vector<float> Random(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(rng.NextGaussian());
  return values;
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

/// A step of one tensor as rank 0 of a job of one worker. Returns what was sent.
std::vector<float> Step(Optimizer& optimizer, std::size_t tensor, std::vector<float> gradient,
                        std::vector<float>& x, double rate = 0.01) {
  REQUIRE(optimizer.Send(tensor, gradient) == Status::Ok());
  REQUIRE(optimizer.Update(tensor, gradient, rate, x).status() == Status::Ok());
  return gradient;
}

TEST_CASE("there are the methods that the documentation names", "[methods]") {
  std::vector<std::string> names;
  for (const MethodInfo& info : Methods()) names.push_back(info.name);
  CHECK(names == std::vector<std::string>{"sgd", "adamw", "lamb", "lans", "clan", "dist_ef_sgdm",
                                          "onebit_adam", "onebit_lamb"});
}

TEST_CASE("zero gradients, zero parameters and every size stay finite", "[methods][conformance]") {
  for (const std::string& spec : Specs()) {
    for (const std::size_t n : std::vector<std::size_t>{0, 1, 7, 15, 16, 17, 64, 1000, 4097}) {
      for (const int kind : {0, 1, 2, 3}) {
        CAPTURE(spec, n, kind);
        auto optimizer = Make(spec);
        REQUIRE(optimizer->AddTensor("w", n).ok());
        const float size = kind == 0 ? 0.0F : kind == 3 ? 1e18F : 1.0F;
        std::vector<float> x = kind == 1 ? std::vector<float>(n) : Random(n, 1);
        const std::vector<float> start = x;
        for (std::uint64_t step = 0; step < 8; ++step) {
          std::vector<float> gradient = Random(n, 2 + step);
          for (float& g : gradient) g *= size;
          CHECK(AllFinite(Step(*optimizer, 0, gradient, x)));
          optimizer->EndStep();
          REQUIRE(AllFinite(x));
        }
        if (kind != 0 && n > 0) CHECK(x != start);
        CHECK(optimizer->updates() == 8);
      }
    }
  }
}

TEST_CASE("a tensor whose pulled values are not finite is skipped", "[methods][conformance]") {
  for (const std::string& spec : Specs()) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      for (const std::size_t at : std::vector<std::size_t>{0, 16, 99}) {
        CAPTURE(spec, bad, at);
        auto optimizer = Make(spec);
        REQUIRE(optimizer->AddTensor("w", 100).ok());
        std::vector<float> x = Random(100, 1);
        for (std::uint64_t step = 0; step < 5; ++step) {
          Step(*optimizer, 0, Random(100, step), x);
          optimizer->EndStep();
        }
        std::vector<float> gradient = Random(100, 9);
        REQUIRE(optimizer->Send(0, gradient) == Status::Ok());
        const std::vector<float> before = x;
        std::vector<float> pulled = gradient;
        pulled[at] = bad;
        const auto outcome = optimizer->Update(0, pulled, 0.01, x);
        REQUIRE(outcome.status() == Status::Ok());
        CHECK(*outcome == Optimizer::Outcome::kSkipped);
        CHECK(x == before);
        CHECK(optimizer->skipped() == 1);
        CHECK(optimizer->updates() == 5);
        optimizer->EndStep();
        // And the state is sound: it goes on.
        Step(*optimizer, 0, Random(100, 10), x);
        CHECK(AllFinite(x));
        CHECK(x != before);
      }
    }
  }
}

TEST_CASE("a gradient that is not finite is sent so and leaves the state sound",
          "[methods][conformance]") {
  for (const std::string& spec : Specs()) {
    CAPTURE(spec);
    auto optimizer = Make(spec);
    REQUIRE(optimizer->AddTensor("w", 40).ok());
    std::vector<float> x = Random(40, 1);
    for (std::uint64_t step = 0; step < 5; ++step) {
      // Element 3 has no gradient in the warm-up: also what is masked shows what is not finite.
      std::vector<float> gradient = Random(40, step);
      gradient[3] = 0;
      Step(*optimizer, 0, gradient, x);
      optimizer->EndStep();
    }
    for (const std::size_t at : std::vector<std::size_t>{3, 39}) {
      CAPTURE(at);
      std::vector<float> gradient = Random(40, 9);
      gradient[at] = std::numeric_limits<float>::quiet_NaN();
      REQUIRE(optimizer->Send(0, gradient) == Status::Ok());
      CHECK(std::isnan(gradient[at]));
      const std::vector<float> nan(40, std::numeric_limits<float>::quiet_NaN());
      REQUIRE(optimizer->Update(0, nan, 0.01, x).status() == Status::Ok());
      optimizer->EndStep();
      CHECK(AllFinite(Step(*optimizer, 0, Random(40, 10), x)));
      optimizer->EndStep();
      CHECK(AllFinite(x));
    }
  }
}

TEST_CASE("every instruction set gives the same bits", "[methods][conformance]") {
  for (const std::string& spec : Specs()) {
    std::vector<std::vector<float>> results;
    for (const std::int64_t target : kernels::AvailableTargets()) {
      kernels::UseTarget(target);
      auto optimizer = Make(spec);
      REQUIRE(optimizer->AddTensor("w", 4133).ok());
      std::vector<float> x = Random(4133, 1);
      for (std::uint64_t step = 0; step < 10; ++step) {
        const std::vector<float> sent = Step(*optimizer, 0, Random(4133, 2 + step), x);
        optimizer->EndStep();
        if (step == 9) results.push_back(sent);
      }
      results.back().insert(results.back().end(), x.begin(), x.end());
      kernels::UseTarget(0);
    }
    CAPTURE(spec);
    for (const std::vector<float>& result : results) {
      CHECK(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("a tensor that a step leaves out is untouched and keeps its own count", "[methods]") {
  for (const std::string& spec : Specs()) {
    CAPTURE(spec);
    auto optimizer = Make(spec);
    auto alone = Make(spec);
    REQUIRE(optimizer->AddTensor("always", 20).ok());
    REQUIRE(optimizer->AddTensor("often", 20).ok());
    REQUIRE(alone->AddTensor("often", 20).ok());
    std::vector<float> always = Random(20, 1);
    std::vector<float> often = Random(20, 2);
    std::vector<float> expected = often;
    for (std::uint64_t step = 0; step < 8; ++step) {
      Step(*optimizer, 0, Random(20, 100 + step), always);
      // Left out once in the warm-up's range and once after it; the other optimizer has just the
      // steps that were not left out, and the same warm-up of it.
      if (step != 1 && step != 5) {
        Step(*optimizer, 1, Random(20, step), often);
        Step(*alone, 0, Random(20, step), expected);
      }
      optimizer->EndStep();
      alone->EndStep();
      CHECK(often == expected);
    }
    CHECK(optimizer->updates() == 8 + 6);
  }
}

TEST_CASE("after the freeze a momentum is sent, masked where the warm-up had no gradient",
          "[methods]") {
  for (const std::string name : {"onebit_adam", "onebit_lamb"}) {
    CAPTURE(name);
    auto optimizer = Make(name + "(freeze_step=2,weight_decay=0)");
    CHECK(optimizer->traits().pushes_state);
    CHECK(optimizer->traits().freeze_step == 2);
    REQUIRE(optimizer->AddTensor("w", 4).ok());
    std::vector<float> x{1, 1, 1, 1};
    const std::vector<float> gradient{1, -2, 0, 3};
    for (int step = 0; step < 2; ++step) {
      CHECK(Step(*optimizer, 0, gradient, x) == gradient);
      optimizer->EndStep();
    }
    CHECK(x[2] == 1);
    const std::vector<float> later{1, -2, 5, 3};
    const std::vector<float> sent = Step(*optimizer, 0, later, x);
    CHECK(sent != later);
    CHECK(sent[0] > 0);
    CHECK(sent[1] == Approx(-2 * sent[0]));
    CHECK(sent[2] == 0);
    CHECK(x[2] == 1);
    // With noise where nothing was learned, as a sign codec makes it.
    optimizer->EndStep();
    std::vector<float> again = later;
    REQUIRE(optimizer->Send(0, again) == Status::Ok());
    CHECK(optimizer->Update(0, std::vector<float>{1, -1, 1, 1}, 0.1, x).status() == Status::Ok());
    CHECK(x[2] == 1);
  }
}

TEST_CASE("an element whose gradient was next to nothing moves no further than v_floor lets it",
          "[methods]") {
  // A sign codec sends the mean magnitude of all for each: 0.75 for one whose gradient was 1e-6.
  const std::vector<float> gradient{1, 1e-6F, -1, 1};
  const std::vector<float> pulled{0.75F, 0.75F, -0.75F, 0.75F};
  for (const double floor : {0.0, 0.1, 0.5}) {
    CAPTURE(floor);
    auto optimizer = Make(fmt::format("onebit_adam(freeze_step=2,v_floor={})", floor));
    REQUIRE(optimizer->AddTensor("w", 4).ok());
    std::vector<float> x{1, 1, 1, 1};
    for (int step = 0; step < 2; ++step) {
      Step(*optimizer, 0, gradient, x);
      optimizer->EndStep();
    }
    const std::vector<float> before = x;
    std::vector<float> sent = gradient;
    REQUIRE(optimizer->Send(0, sent) == Status::Ok());
    REQUIRE(optimizer->Update(0, pulled, 0.001, x).status() == Status::Ok());
    // sqrt(v) is 1 for three of them, so sqrt(0.75) is its root mean square.
    CHECK(static_cast<double>(before[0] - x[0]) == Approx(0.001 * 0.75).epsilon(1e-3));
    const double divisor = std::max(floor * std::sqrt(0.75), 1e-6);
    CHECK(static_cast<double>(before[1] - x[1]) == Approx(0.001 * 0.75 / divisor).epsilon(0.02));
  }
}

TEST_CASE("the factor of onebit_lamb changes by a tenth a step and stays within its bounds",
          "[methods]") {
  auto optimizer =
      Make("onebit_lamb(freeze_step=1,weight_decay=0,beta2=0.5,bias_correction=false)");
  REQUIRE(optimizer->AddTensor("w", 1).ok());
  std::vector<float> x{1};
  Step(*optimizer, 0, {1}, x);
  optimizer->EndStep();
  // The momentum falls as if gradients were zero, so the fresh second moment falls and the factor
  // rises; the change of x over the momentum shows it.
  double m = 0.1;
  std::vector<double> factors;
  std::vector<float> sent{0};
  const double unit = 1 / 0.1;  // one value is sent at a mean square of 1
  for (int step = 0; step < 25; ++step) {
    REQUIRE(optimizer->Send(0, sent) == Status::Ok());
    m *= 0.9;
    const float before = x[0];
    const std::vector<float> pulled{static_cast<float>(m * unit)};
    REQUIRE(optimizer->Update(0, pulled, 0.001, x).status() == Status::Ok());
    factors.push_back((static_cast<double>(before) - static_cast<double>(x[0])) / m);
    sent[0] = 0;
    optimizer->EndStep();
  }
  CHECK(factors[1] / factors[0] == Approx(1.1).epsilon(0.01));
  CHECK(factors[10] / factors[9] == Approx(1.1).epsilon(0.01));
  CHECK(factors[24] / factors[0] == Approx(4 / 1.1).epsilon(0.02));
}

TEST_CASE("weight decay spares the tensors that were added without", "[methods]") {
  for (const char* spec :
       {"sgd(weight_decay=0.1)", "adamw(weight_decay=0.1)", "lamb(weight_decay=0.1)",
        "lans(weight_decay=0.1)", "dist_ef_sgdm(weight_decay=0.1)"}) {
    CAPTURE(spec);
    auto optimizer = Make(spec);
    REQUIRE(optimizer->AddTensor("w", 3, true).ok());
    REQUIRE(optimizer->AddTensor("b", 3, false).ok());
    std::vector<float> w{1, 2, 3};
    std::vector<float> b{1, 2, 3};
    Step(*optimizer, 0, {0, 0, 0}, w);
    Step(*optimizer, 1, {0, 0, 0}, b);
    CHECK(w[2] < 3);
    CHECK(b == std::vector<float>{1, 2, 3});
  }
}

TEST_CASE("the wrong order and the wrong sizes are refused by name", "[methods]") {
  auto optimizer = Make("adamw");
  REQUIRE(optimizer->AddTensor("w", 3).ok());
  CHECK(optimizer->AddTensor("w", 4).status().message() ==
        "method adamw: tensor 'w' is there already, with 3 values");
  std::vector<float> three(3);
  std::vector<float> four(4);
  CHECK(optimizer->Send(1, three).message() ==
        "method adamw: there is no tensor 1, expected below 1");
  CHECK(optimizer->Send(0, four).message() ==
        "method adamw: the gradient of tensor 'w' has 4 values, expected 3");
  CHECK(optimizer->Update(0, three, 0.1, three).status().message() ==
        "method adamw: tensor 'w' is updated, but was not sent");
  REQUIRE(optimizer->Send(0, three).ok());
  CHECK(optimizer->Send(0, three).message() ==
        "method adamw: tensor 'w' is sent again before its update");
  CHECK(optimizer->Save().status().message() ==
        "method adamw: tensor 'w' was sent and waits for its update, so nothing can be saved");
  CHECK(
      optimizer->Update(0, three, -0.1, three).status().message() ==
      "method adamw: the learning rate of tensor 'w' is -0.1, expected a finite one of 0 or more");
  REQUIRE(optimizer->Cancel(0).ok());
  CHECK(optimizer->Save().ok());

  auto frozen = Make("onebit_adam(freeze_step=2)");
  REQUIRE(frozen->AddTensor("late", 3).ok());
  frozen->EndStep();
  frozen->EndStep();
  CHECK(
      frozen->Send(0, three).message() ==
      "method onebit_adam: tensor 'late' had no update in the 2 steps of the warm-up, so there is "
      "nothing to freeze");
}

TEST_CASE("specs are checked, and against the job's compression", "[methods]") {
  const auto error = [](std::string_view spec, const CompressionRules* job = nullptr) {
    return Optimizer::Create(spec, job).status().message();
  };
  CHECK(error("lams") ==
        "no method is named 'lams'; did you mean 'lamb'? There are: sgd, adamw, "
        "lamb, lans, clan, dist_ef_sgdm, onebit_adam, onebit_lamb");
  CHECK(error("lans(beta1)") ==
        "'lans(beta1)' is not a method, expected name or name(key=value,...), each key once");
  CHECK(error("sgd(momentum=1)") ==
        "momentum of method sgd is '1', expected a number from 0 to 0.9999");
  CHECK(error("lamb(norm_low=2,norm_high=1)") ==
        "method lamb has norm_low 2, expected at most norm_high 1");
  CHECK(error("onebit_adam") ==
        "method onebit_adam has no freeze_step, expected the first step "
        "after its warm-up, which is compression.warmup_steps");
  CompressionRules job;
  job.uplink.compressor.name = "onebit";
  CHECK(error("clan", &job) ==
        "method clan wants a compressor in both directions, and compression.downlink.compressor is "
        "none; method lans does without");
  CHECK(error("lans", &job).empty());
  job.downlink.compressor.name = "onebit";
  CHECK(error("clan", &job).empty());
  job.warmup_steps = 100;
  CHECK(error("onebit_lamb", &job).empty());
  CHECK(error("onebit_lamb(freeze_step=100)", &job).empty());
  CHECK(error("onebit_lamb(freeze_step=50)", &job) ==
        "freeze_step of method onebit_lamb is 50, expected compression.warmup_steps, which is 100: "
        "what is frozen is learned without compression");
  // A rule that compresses counts as well.
  CompressionRules ruled;
  ruled.warmup_steps = 10;
  CHECK(error("onebit_adam(freeze_step=5)", &ruled).empty());
  ruled.rules.resize(1);
  ruled.rules[0].downlink = job.downlink;
  CHECK(
      error("onebit_adam(freeze_step=5)", &ruled).find("freeze_step of method onebit_adam is 5") ==
      0);
}

TEST_CASE("a method that does not go with the job's filter is refused", "[methods]") {
  CompressionRules job;
  job.uplink.compressor.name = "onebit";
  job.downlink.compressor.name = "onebit";
  job.warmup_steps = 10;
  job.filter.type = FilterType::kCovap;
  job.filter.interval = 4;
  for (const std::string name : {"onebit_adam", "onebit_lamb"}) {
    for (const FilterInactive inactive : {FilterInactive::kZeroFill, FilterInactive::kSkip}) {
      job.filter.inactive = inactive;
      CHECK(Optimizer::Create(name, &job).status().message() ==
            "method " + name +
                " sends momenta, and compression.filter.type is covap, which would send the sum of "
                "those it has held back; expected none");
    }
  }
  for (const std::string name : {"lans", "clan"}) {
    job.filter.inactive = FilterInactive::kZeroFill;
    CHECK(Optimizer::Create(name, &job).status().message() ==
          "method " + name +
              " shrinks parameters whose gradient is zero, and compression.filter.inactive is "
              "zero_fill, which gives zeros where the filter sends nothing; expected skip");
    job.filter.inactive = FilterInactive::kSkip;
    CHECK(Optimizer::Create(name, &job).ok());
  }
  job.filter.inactive = FilterInactive::kZeroFill;
  for (const std::string name : {"sgd", "adamw", "lamb", "dist_ef_sgdm"}) {
    CAPTURE(name);
    CHECK(Optimizer::Create(name, &job).ok());
  }
}

TEST_CASE("what a job must know of its method follows from the setting", "[methods]") {
  CompressionRules job;
  job.warmup_steps = 7;
  const auto traits = [&](std::string_view spec) {
    return JobMethodTraits(*ParseMethodSpec(spec), job);
  };
  CHECK_FALSE(traits("none")->pushes_state);
  CHECK(traits("lans")->needs_skip);
  CHECK(traits("onebit_adam")->pushes_state);
  CHECK(traits("onebit_adam")->freeze_step == 7);
  CHECK(traits("none(eps=1)").status().message() ==
        "method none has the parameter eps, expected none");
}

TEST_CASE("tensors without elements are sent, updated, saved and restored", "[methods]") {
  for (const std::string& spec : Specs()) {
    CAPTURE(spec);
    auto optimizer = Make(spec);
    REQUIRE(optimizer->AddTensor("empty", 0).ok());
    REQUIRE(optimizer->AddTensor("w", 5).ok());
    std::vector<float> none;
    std::vector<float> x = Random(5, 1);
    for (std::uint64_t step = 0; step < kFreezeStep + 2; ++step) {
      Step(*optimizer, 0, {}, none);
      Step(*optimizer, 1, Random(5, step), x);
      optimizer->EndStep();
    }
    CHECK(optimizer->updates() == 2 * (kFreezeStep + 2));
    CHECK(optimizer->skipped() == 0);
    auto restored = Make(spec);
    REQUIRE(restored->AddTensor("empty", 0).ok());
    REQUIRE(restored->AddTensor("w", 5).ok());
    REQUIRE(restored->Restore(*optimizer->Save()) == Status::Ok());
    CHECK(*restored->Save() == *optimizer->Save());
    std::vector<float> same = x;
    Step(*optimizer, 1, Random(5, 9), x);
    Step(*restored, 1, Random(5, 9), same);
    CHECK(x == same);
  }
}

TEST_CASE("two threads step different tensors as one thread would", "[methods][threads]") {
  constexpr std::size_t kTensors = 2;
  constexpr std::uint64_t kSteps = 40;
  constexpr std::size_t kSize = 2000;
  for (const std::string& spec : Specs()) {
    CAPTURE(spec);
    std::vector<std::vector<float>> results;
    for (const bool is_threaded : {false, true}) {
      auto optimizer = Make(spec);
      std::vector<std::vector<float>> x;
      for (std::size_t t = 0; t < kTensors; ++t) {
        REQUIRE(optimizer->AddTensor(fmt::format("w{}", t), kSize).ok());
        x.push_back(Random(kSize, t));
      }
      std::vector<Status> ends(kTensors);
      const auto work = [&](std::size_t t, std::uint64_t step) {
        std::vector<float> gradient = Random(kSize, 10 + step * kTensors + t);
        ends[t] = optimizer->Send(t, gradient);
        if (ends[t].ok()) ends[t] = optimizer->Update(t, gradient, 0.01, x[t]).status();
      };
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        if (is_threaded) {
          std::thread other([&] { work(1, step); });
          work(0, step);
          other.join();
        } else {
          for (std::size_t t = 0; t < kTensors; ++t) work(t, step);
        }
        for (const Status& end : ends) REQUIRE(end == Status::Ok());
        optimizer->EndStep();
      }
      CHECK(optimizer->updates() == kTensors * kSteps);
      results.push_back(x[0]);
      results.back().insert(results.back().end(), x[1].begin(), x[1].end());
    }
    CHECK(results[0] == results[1]);
  }
}

TEST_CASE("saved states that do not fit are refused and change nothing", "[methods]") {
  auto optimizer = Make("adamw");
  REQUIRE(optimizer->AddTensor("w", 5).ok());
  std::vector<float> x = Random(5, 1);
  Step(*optimizer, 0, Random(5, 2), x);
  optimizer->EndStep();
  const std::vector<std::byte> saved = *optimizer->Save();

  SECTION("damage anywhere") {
    for (std::size_t i = 0; i < saved.size(); ++i) {
      std::vector<std::byte> damaged = saved;
      damaged[i] ^= std::byte{1};
      CHECK(optimizer->Restore(damaged).code() == StatusCode::kCorruptData);
      CHECK(optimizer->Restore(ByteView(saved).first(i)).code() == StatusCode::kCorruptData);
    }
  }
  SECTION("another method") {
    CHECK(Make("lamb")->Restore(saved).message() ==
          "the saved state is of method adamw, expected lamb");
  }
  SECTION("other tensors") {
    auto other = Make("adamw");
    CHECK(other->Restore(saved).message() ==
          "method adamw: the saved state has 1 tensors, expected 0");
    REQUIRE(other->AddTensor("b", 5).ok());
    CHECK(other->Restore(saved).message() ==
          "method adamw: the saved state has a tensor 'w' that was not added");
    auto shorter = Make("adamw");
    REQUIRE(shorter->AddTensor("w", 4).ok());
    CHECK(shorter->Restore(saved).message() ==
          "method adamw: tensor 'w' has 5 values in the saved state, expected 4");
  }
  CHECK(*optimizer->Save() == saved);
}

TEST_CASE("a state is restored whatever the order of the tensors", "[methods]") {
  auto first = Make("adamw");
  REQUIRE(first->AddTensor("a", 5).ok());
  REQUIRE(first->AddTensor("b", 6).ok());
  std::vector<float> a = Random(5, 1);
  std::vector<float> b = Random(6, 2);
  Step(*first, 0, Random(5, 3), a);
  Step(*first, 1, Random(6, 4), b);
  first->EndStep();
  auto second = Make("adamw");
  REQUIRE(second->AddTensor("b", 6).ok());
  REQUIRE(second->AddTensor("a", 5).ok());
  REQUIRE(second->Restore(*first->Save()) == Status::Ok());
  CHECK(second->step() == 1);
  std::vector<float> same = a;
  Step(*first, 0, Random(5, 5), a);
  Step(*second, 1, Random(5, 5), same);
  CHECK(a == same);
}

}  // namespace
}  // namespace gradwire
