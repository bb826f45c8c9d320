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

#include "common/base/log.h"
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

int Fail(const gradwire::Status& status, int exit_code) {
  gradwire::LogError("worker", status.message());
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradwire;
  KeepMessageMemory();

  InitLog(LogLevel::kInfo, LogFormat::kText, "worker");
  ProcessOptions options;
  options.role = ProcessRole::kWorker;
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
  app.add_option("--rank", options.rank);
  app.add_option("--tensors", tensors);
  app.add_option("--elements", elements);
  app.add_option("--rounds", rounds);
  app.add_option("--warm-up", warm_up);
  app.add_flag("--check", check, "every element must be the mean of what the ranks pushed");
  app.add_flag("--verbose", verbose);
  app.add_option("--stop-at", stop_at, "raise SIGSTOP just after the push of this round");
  app.add_option("--delay-at", delay_at, "push this round late");
  app.add_option("--delay-ms", delay_ms);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }

  const auto process = LoadProcessConfig(options);
  if (!process.ok()) return Fail(process.status(), kExitUsage);
  if (process.value().is_scheduler) {
    LogInfo("config", kNoScheduler);
    return kExitOk;
  }
  const Config& config = process.value().config;
  const auto found_rank = RequireRank(*process);
  if (!found_rank.ok()) return Fail(found_rank.status(), kExitUsage);
  const std::uint32_t rank = *found_rank;
  InitLog(config.log.level, config.log.format, fmt::format("worker/{}", rank));
  LogWarnings(*process);
  auto connected = Client::Connect(config, rank);
  if (!connected.ok()) return Fail(connected.status(), ExitCodeOf(connected.status(), false));
  Client& client = **connected;
  std::vector<TensorDeclaration> batch(tensors);
  for (std::size_t t = 0; t < tensors; ++t) {
    batch[t].name = fmt::format("tensor{}", t);
    batch[t].shape = {elements};
    batch[t].priority = -static_cast<std::int32_t>(t);
  }
  const auto ids = client.Declare(batch);
  if (!ids.ok()) return Fail(ids.status(), ExitCodeOf(ids.status(), true));
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
      if (const Status status = client.Barrier(); !status.ok()) {
        return Fail(status, ExitCodeOf(status, true));
      }
      cpu_start = CpuSeconds();
    }
    const Clock::time_point start = Clock::now();
    std::vector<Handle> handles;
    for (std::size_t t = 0; t < tensors; ++t) {
      const auto handle = client.PushPullAsync(ids.value()[t], std::as_bytes(std::span(inputs[t])),
                                               std::as_writable_bytes(std::span(outputs[t])));
      if (!handle.ok()) return Fail(handle.status(), ExitCodeOf(handle.status(), true));
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
        return Fail(status, ExitCodeOf(status, true));
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
                   "\"sent_bytes\":{},\"received_bytes\":{},\"reconnects\":{},\"goodput\":{:.0f}}}",
                   rank, list, cpu * 1e3 / std::max(rounds, 1), stats.traffic.sent_bytes,
                   stats.traffic.received_bytes, stats.reconnects, stats.goodput)
            << std::endl;
  const Status closed = client.Close();
  return closed.ok() ? kExitOk : Fail(closed, ExitCodeOf(closed, true));
}
