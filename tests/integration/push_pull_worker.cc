// A worker that push-pulls a list of equal tensors for some rounds: for tests with real processes
// and for the benchmark. Prints "pushed R" and "done R" for each round with --verbose, and at the
// end one line of JSON with the time of each measured round.

#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <thread>
#include <vector>

#include "common/base/malloc.h"
#include "common/base/random.h"
#include "common/config/process.h"
#include "worker/client/client.h"

namespace {

using Clock = std::chrono::steady_clock;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradwire;
  KeepMessageMemory();

  ProcessOptions options;
  std::uint32_t rank = 0;
  std::size_t tensors = 8;
  std::size_t elements = 1024000;
  int rounds = 20;
  int warm_up = 5;
  bool check = false;
  bool verbose = false;
  int stop_at = -1;
  int delay_at = -1;
  int delay_ms = 0;
  CLI::App app{"push-pulls equal tensors"};
  app.add_option("--config", options.config_path);
  app.add_option("--set", options.assignments);
  app.add_option("--rank", rank)->envname("GRADWIRE_RANK");
  app.add_option("--tensors", tensors);
  app.add_option("--elements", elements);
  app.add_option("--rounds", rounds);
  app.add_option("--warm-up", warm_up);
  app.add_flag("--check", check, "every element must be the mean of what the ranks pushed");
  app.add_flag("--verbose", verbose);
  app.add_option("--stop-at", stop_at, "raise SIGSTOP just after the push of this round");
  app.add_option("--delay-at", delay_at, "push this round late");
  app.add_option("--delay-ms", delay_ms);
  CLI11_PARSE(app, argc, argv);

  const auto config = LoadProcessConfig(options);
  if (!config.ok()) {
    std::cerr << config.status().ToString() << "\n";
    return kExitUsage;
  }
  auto connected = Client::Connect(*config, rank);
  if (!connected.ok()) {
    std::cerr << connected.status().ToString() << "\n";
    return ExitCodeOf(connected.status(), false);
  }
  Client& client = **connected;
  std::vector<TensorDeclaration> batch(tensors);
  for (std::size_t t = 0; t < tensors; ++t) {
    batch[t].name = fmt::format("tensor{}", t);
    batch[t].shape = {elements};
    batch[t].priority = -static_cast<std::int32_t>(t);
  }
  const auto ids = client.Declare(batch);
  if (!ids.ok()) {
    std::cerr << ids.status().ToString() << "\n";
    return kExitFailed;
  }
  std::vector<std::vector<float>> inputs(tensors, std::vector<float>(elements));
  std::vector<std::vector<float>> outputs(tensors, std::vector<float>(elements));
  CounterRng rng(rank);
  for (auto& input : inputs) {
    for (float& value : input) value = static_cast<float>(rng.NextGaussian());
  }

  std::vector<double> milliseconds;
  double cpu_start = 0.0;
  for (int round = 0; round < rounds + warm_up; ++round) {
    if (check) {
      for (auto& input : inputs) {
        std::fill(input.begin(), input.end(), static_cast<float>(rank) + static_cast<float>(round));
      }
    }
    if (round == delay_at) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    if (round == warm_up) {
      if (!client.Barrier().ok()) return kExitFailed;
      cpu_start = CpuSeconds();
    }
    const Clock::time_point start = Clock::now();
    std::vector<Handle> handles;
    for (std::size_t t = 0; t < tensors; ++t) {
      const auto handle = client.PushPullAsync(ids.value()[t], std::as_bytes(std::span(inputs[t])),
                                               std::as_writable_bytes(std::span(outputs[t])));
      if (!handle.ok()) {
        std::cerr << handle.status().ToString() << "\n";
        return kExitFailed;
      }
      handles.push_back(*handle);
    }
    if (verbose) std::cout << "pushed " << round << std::endl;
    if (round == stop_at) {
      // Long enough for the pushes to leave: the peer is late, so no reply can come before.
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      raise(SIGSTOP);
    }
    for (const Handle& handle : handles) {
      if (const Status status = client.Wait(handle); !status.ok()) {
        std::cerr << status.ToString() << "\n";
        return ExitCodeOf(status, true);
      }
    }
    if (round >= warm_up) {
      milliseconds.push_back(
          std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    if (verbose) std::cout << "done " << round << std::endl;
    if (check) {
      const float expected =
          static_cast<float>(round) + (static_cast<float>(client.num_workers()) - 1.0F) / 2.0F;
      for (const auto& output : outputs) {
        for (const float value : output) {
          if (value == expected) continue;
          std::cerr << fmt::format("round {}: got {}, expected {}\n", round, value, expected);
          return kExitFailed;
        }
      }
    }
  }
  const double cpu = CpuSeconds() - cpu_start;
  const ClientStats stats = client.stats();
  std::string list;
  for (const double ms : milliseconds) list += fmt::format("{}{:.3f}", list.empty() ? "" : ",", ms);
  std::cout << fmt::format(
                   "{{\"rank\":{},\"milliseconds\":[{}],\"cpu_ms_per_round\":{:.3f},"
                   "\"sent_bytes\":{},\"received_bytes\":{},\"reconnects\":{}}}",
                   rank, list, cpu * 1e3 / std::max(rounds, 1), stats.traffic.sent_bytes,
                   stats.traffic.received_bytes, stats.reconnects)
            << std::endl;
  const Status closed = client.Close();
  if (!closed.ok()) std::cerr << closed.ToString() << "\n";
  return closed.ok() ? kExitOk : kExitFailed;
}
