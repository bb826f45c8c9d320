// `gradwire bench net`, a whole job (a script's work), and `gradwire bench net-worker`, a rank of
// it.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/malloc.h"
#include "common/config/process.h"
#include "common/plan/model_list.h"
#include "worker/cli/commands.h"
#include "worker/cli/net_bench.h"

namespace gradwire {
namespace {

constexpr const char* kScript = "gradwire-bench-net";

struct Arguments {
  ProcessOptions process;
  std::string model;
  std::string compute = "sleep";
  NetBenchOptions bench;
};

int Fail(const Status& status, int exit_code) {
  LogError("bench", status.message());
  return exit_code;
}

std::string ToJson(const NetBenchStep& step) {
  return fmt::format(
      R"({{"step_ms": {:.4f}, "compute_ms": {:.4f}, "exposed_ms": {:.4f}, "hand_over_ms": {:.4f}, )"
      R"("sent_bytes": {}, "received_bytes": {}, "interval": {}}})",
      step.step_ms, step.compute_ms, step.exposed_ms, step.hand_over_ms, step.sent_bytes,
      step.received_bytes, step.interval);
}

/// One line a step, and then one with `servers` for the whole.
void PrintReport(const NetBenchReport& report, std::uint32_t rank, const std::string& compute) {
  for (const NetBenchStep& step : report.steps) fmt::print("{}\n", ToJson(step));
  std::vector<std::string> servers;
  for (const NetBenchServerBytes& bytes : report.servers) {
    servers.push_back(fmt::format(R"({{"up": {:.0f}, "down": {:.0f}}})", bytes.up, bytes.down));
  }
  const OverlapFigures& overlap = report.stats.overlap;
  fmt::print(
      R"({{"rank": {}, "compute": "{}", "cpu_ms": {:.4f}, "units": {}, "interval": {}, )"
      R"("servers": [{}], "overlap": {{"steps": {}, "step_ms": {:.4f}, "comm_ms": {:.4f}, "compute_ms": {:.4f}, )"
      R"("exposed_ms": {:.4f}, "ccr": {:.4f}, "full_comm_ms": {:.4f}, "full_ccr": {:.4f}, )"
      R"("up_bytes": {:.0f}, "down_bytes": {:.0f}, "goodput": {:.0f}}}, "resent_pushes": {}, )"
      R"("reconnects": {}}})"
      "\n",
      rank, compute, report.cpu_ms, report.num_units, report.stats.interval,
      fmt::join(servers, ", "), overlap.steps, overlap.step_ms, overlap.comm_ms, overlap.compute_ms,
      overlap.exposed_ms, overlap.ccr(), overlap.full_comm_ms, overlap.full_ccr(), overlap.up_bytes,
      overlap.down_bytes, overlap.goodput, report.stats.resent_pushes, report.stats.reconnects);
}

int RunWorker(Arguments arguments) {
  KeepMessageMemory();
  InitLog(LogLevel::kInfo, LogFormat::kText, "worker");
  auto tensors = ReadModelList(arguments.model);
  if (!tensors.ok()) return Fail(tensors.status(), kExitUsage);
  arguments.bench.tensors = std::move(*tensors);
  arguments.bench.compute =
      arguments.compute == "burn" ? EmulatedCompute::kBurn : EmulatedCompute::kSleep;
  arguments.process.role = ProcessRole::kWorker;
  const auto process = LoadProcessConfig(arguments.process);
  if (!process.ok()) return Fail(process.status(), kExitUsage);
  const auto rank = RequireRank(*process);
  if (!rank.ok()) return Fail(rank.status(), kExitUsage);
  const Config& config = process->config;
  InitLog(config.log.level, config.log.format, fmt::format("worker/{}", *rank));
  LogWarnings(*process);
  const auto client = Client::Connect(config, *rank);
  if (!client.ok()) return Fail(client.status(), ExitCodeOf(client.status(), false));
  const auto report = RunNetBench(**client, config, arguments.bench);
  if (!report.ok()) return Fail(report.status(), ExitCodeOf(report.status(), true));
  PrintReport(*report, *rank, arguments.compute);
  const Status closed = (*client)->Close();
  return closed.ok() ? kExitOk : Fail(closed, ExitCodeOf(closed, true));
}

/// Becomes the script that lies beside this program.
int RunScript(const std::vector<std::string>& arguments) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string script = (self.parent_path() / kScript).string();
  std::vector<char*> words;
  std::vector<std::string> texts = {script};
  texts.insert(texts.end(), arguments.begin(), arguments.end());
  for (std::string& text : texts) words.push_back(text.data());
  words.push_back(nullptr);
  execv(script.c_str(), words.data());
  fmt::print(stderr, "gradwire bench net: cannot run '{}': {}\n", Escape(script),
             std::strerror(errno));
  return kExitFailed;
}

}  // namespace

void AddNetBenchCommands(CLI::App& bench, CommandAction& action) {
  CLI::App* net = bench.add_subcommand(
      "net", "push-pull of a model beside emulated compute: servers and workers on this machine");
  net->set_help_flag();  // the script has its own
  net->prefix_command();
  net->callback(
      [net, &action] { action = [arguments = net->remaining()] { return RunScript(arguments); }; });

  CLI::App* command = bench.add_subcommand("net-worker", "one rank of it, in any job");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--config", arguments->process.config_path, "YAML file");
  command->add_option("--set", arguments->process.assignments, "key=value, before everything else")
      ->allow_extra_args(false);
  command->add_option("--rank", arguments->process.rank, "else as the launcher says");
  command->add_option("--model", arguments->model, "tensor list, as in configs/models")->required();
  command->add_option("--steps", arguments->bench.steps, "that are measured")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_option("--warm-up", arguments->bench.warm_up, "steps before")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->add_option("--compute-ms", arguments->bench.compute_ms, "emulated compute of a step")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--backward-share", arguments->bench.backward_share, "of it")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--compute", arguments->compute, "sleep, or burn the thread's CPU time")
      ->check(CLI::IsMember({"sleep", "burn"}))
      ->capture_default_str();
  command->callback(
      [arguments, &action] { action = [arguments] { return RunWorker(*arguments); }; });
}

}  // namespace gradwire
