// gradwire-server: the daemon. One process is one server; server 0 is the root.

#include <pthread.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <string>
#include <thread>

#include "common/base/log.h"
#include "common/base/malloc.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "server/server.h"

int main(int argc, char** argv) {
  using namespace gradwire;
  KeepMessageMemory();

  ProcessOptions options;
  options.role = ProcessRole::kServer;
  std::string save_plan;
  CLI::App app{"gradwire-server: holds a shard of the keys; server 0 is the root"};
  app.add_option("--config", options.config_path, "configuration file (YAML)");
  app.add_option("--set", options.assignments, "key=value over the file and the environment");
  app.add_option("--index", options.rank,
                 "which server this is, 0 is the root (else GRADWIRE_RANK or a launcher's number)");
  app.add_option("--save-plan", save_plan,
                 "file that the root writes the plan to; `plan:` replays it");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? kExitOk : kExitUsage;
  }

  const auto process = LoadProcessConfig(options);
  if (!process.ok()) {
    LogError("config", process.status().message());
    return kExitUsage;
  }
  const Config& config = process.value().config;
  if (process.value().is_scheduler) {
    InitLog(config.log.level, config.log.format, "server");
    LogInfo("config", kNoScheduler);
    return kExitOk;
  }
  const auto index = RequireRank(*process);
  if (!index.ok()) {
    LogError("config", index.status().message());
    return kExitUsage;
  }
  InitLog(config.log.level, config.log.format, "server/" + std::to_string(*index));
  LogWarnings(*process);

  // Signals are taken by a thread of their own, so that a handler never interrupts the lanes.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGUSR1);  // ours: ends the thread
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  auto server = Server::Start(config, *index, save_plan);
  if (!server.ok()) {
    LogError("server", server.status().message());
    return ExitCodeOf(server.status(), /*started=*/false);
  }
  std::atomic<bool> interrupted{false};
  std::atomic<bool> done{false};
  std::thread watcher([&] {
    int signal = 0;
    while (sigwait(&signals, &signal) == 0) {
      if (done) return;
      if (signal == SIGUSR1) continue;  // somebody else's
      interrupted = true;
      (*server)->Stop();
    }
  });
  const Status status = (*server)->Run();
  done = true;
  pthread_kill(watcher.native_handle(), SIGUSR1);
  watcher.join();

  const ServerStats stats = (*server)->stats();
  std::string strangers = stats.traffic.strangers.Describe();
  const std::string refused = stats.refused.Describe();
  strangers += (strangers.empty() || refused.empty() ? "" : " ") + refused;
  LogInfo(
      "server", "done",
      {Field("rounds", stats.rounds), Field("void_rounds", stats.nonfinite_rounds),
       Field("bytes_in", stats.traffic.received_bytes),
       Field("bytes_out", stats.traffic.sent_bytes), Field("duplicates", stats.duplicate_pushes),
       Field("refused", stats.refused.total() + stats.traffic.refused_messages),
       Field("strangers", strangers.empty() ? "none" : strangers)});
  if (interrupted) return kExitInterrupted;
  // The server has logged what it failed with.
  return ExitCodeOf(status, stats.started);
}
