// What trainers do to whole tensors between the codecs: the filter's pass over what it holds back
// and the methods' updates, one thread, as multiples of their memory traffic. A pass that reads r
// and writes w floats an element cannot be faster than (r + w) / 3 of a += b, which reads two and
// writes one, where the arrays are beyond the caches. Medians of interleaved repeats. What
// docs/results/updates.md is made with.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "compressors/filters/covap.h"
#include "compressors/methods/optimizer.h"
#include "worker/cli/baselines.h"

namespace gradwire {
namespace {

constexpr int kRepeats = 15;
constexpr double kMinSeconds = 0.01;
constexpr double kAddFloats = 3;

struct Pass {
  std::string name;
  double floats = 0;  // read and written, an element
  std::function<void()> run;
  std::vector<double> ratios = {};  // over the floor
};

double Seconds(const std::function<void()>& run, std::size_t calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < calls; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
         static_cast<double>(calls);
}

std::size_t CallsFor(const std::function<void()>& run) {
  run();
  return std::max<std::size_t>(1, static_cast<std::size_t>(kMinSeconds / Seconds(run, 1)));
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Fill(std::vector<float>& values, std::uint64_t seed) {
  CounterRng rng(seed);
  for (float& value : values) value = static_cast<float>(rng.NextGaussian());
}

// Floats a step moves at least: what Send and Update read and write, in as few passes as norms
// allow.
struct MethodFloor {
  const char* spec;
  double floats;
};
constexpr MethodFloor kMethods[] = {
    {"sgd", 5},                          // p v x, v x
    {"adamw", 7},                        // p m v x, m v x
    {"lamb", 10},                        // p m v x, m v; m v x, x
    {"lans", 11},                        // p; as lamb
    {"clan", 11},                        // as lans
    {"dist_ef_sgdm", 9},                 // g m, g m; p w x, w x
    {"onebit_adam(freeze_step=1)", 8},   // g m, g; p v x, m x
    {"onebit_lamb(freeze_step=1)", 13},  // g m, g; p m v fresh, m fresh; m v x, x
};

int Run(std::size_t n) {
  std::vector<float> gradient(n);
  std::vector<float> residual(n);
  std::vector<float> parameters(n);
  std::vector<float> output(n);
  std::vector<float> sent(n);
  Fill(gradient, 1);
  Fill(residual, 2);
  Fill(parameters, 3);
  const std::string_view target = kernels::TargetName(kernels::AvailableTargets().front());
  const baselines::Add add = baselines::AddFor(target);

  std::vector<Pass> passes;
  passes.push_back({"covap: hold back", 3, [&] {
                      SpanSource source({gradient.data(), n});
                      (void)covap::HoldBack(source, 0.5F, residual);
                    }});
  passes.push_back({"covap: hold back, zero_fill", 4, [&] {
                      SpanSource source({gradient.data(), n});
                      (void)covap::HoldBack(source, 0.5F, residual);
                      std::memset(output.data(), 0, n * sizeof(float));
                    }});
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (const MethodFloor& method : kMethods) {
    auto made = Optimizer::Create(method.spec, nullptr);
    if (!made.ok() || !(*made)->AddTensor("w", n).ok()) {
      std::fprintf(stderr, "%s: %s\n", method.spec, made.status().message().c_str());
      return 1;
    }
    optimizers.push_back(std::move(made).value());
    Optimizer& optimizer = *optimizers.back();
    const auto step = [&optimizer, &gradient, &sent, &parameters, n] {
      if (!optimizer.Send(0, {sent.data(), n}).ok()) std::abort();
      if (!optimizer.Update(0, gradient, 1e-6, {parameters.data(), n}).ok()) std::abort();
      optimizer.EndStep();
    };
    step();  // the freeze, where there is one
    passes.push_back({method.spec, method.floats, step});
  }

  std::vector<std::size_t> calls;
  for (Pass& pass : passes) calls.push_back(CallsFor(pass.run));
  const auto add_all = [&] { add(output.data(), gradient.data(), n); };
  const std::size_t add_calls = CallsFor(add_all);
  std::vector<double> add_rates;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (std::size_t i = 0; i < passes.size(); ++i) {
      const double before = Seconds(add_all, add_calls);
      const double took = Seconds(passes[i].run, calls[i]);
      const double floor =
          (before + Seconds(add_all, add_calls)) / 2 * passes[i].floats / kAddFloats;
      passes[i].ratios.push_back(took / floor);
      add_rates.push_back(4e-9 * static_cast<double>(n) / before);
    }
  }
  std::printf("\n%zu KiB, %.*s, a += b %.1f GB/s\n\n", n * 4 / 1024,
              static_cast<int>(target.size()), target.data(), Median(add_rates));
  std::printf(
      "| pass | floats an element | time over their floor | time over a += b "
      "|\n|---|---|---|---|\n");
  for (const Pass& pass : passes) {
    const double ratio = Median(pass.ratios);
    std::printf("| `%s` | %.0f | %.2f | %.2f |\n", pass.name.c_str(), pass.floats, ratio,
                ratio * pass.floats / kAddFloats);
  }
  return 0;
}

}  // namespace
}  // namespace gradwire

int main() {
  for (const std::size_t n :
       {std::size_t{1} << 16, std::size_t{1} << 18, std::size_t{1} << 20, std::size_t{1} << 24}) {
    if (const int failed = gradwire::Run(n); failed != 0) return failed;
  }
  return 0;
}
