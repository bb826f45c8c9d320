#pragma once

#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/config/config.h"

namespace gradwire {

/// Exit codes of every Gradwire program.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;  // command line or configuration
inline constexpr int kExitNotStarted = 3;
inline constexpr int kExitStalled = 4;
inline constexpr int kExitPeerLost = 5;
inline constexpr int kExitInterrupted = 130;

/// The exit code that tells a status. `started` says whether the job had begun its first round.
inline int ExitCodeOf(const Status& status, bool started) {
  switch (status.code()) {
    case StatusCode::kOk:
      return kExitOk;
    case StatusCode::kInvalidArgument:
      return started ? kExitFailed : kExitUsage;
    case StatusCode::kTimeout:
      return started ? kExitStalled : kExitNotStarted;
    case StatusCode::kUnavailable:
      return started ? kExitPeerLost : kExitNotStarted;
    default:
      return kExitFailed;
  }
}

/// What a program's command line says of its configuration.
struct ProcessOptions {
  std::string config_path;               // empty: GRADWIRE_CONFIG, else the defaults
  std::vector<std::string> assignments;  // key=value
};

/// A program's configuration: command line > GRADWIRE_* > YAML > defaults.
inline Result<Config> LoadProcessConfig(const ProcessOptions& options) {
  const auto environment = GradwireEnvironment();
  std::string path = options.config_path;
  if (path.empty()) {
    const auto found = environment.find("GRADWIRE_CONFIG");
    if (found != environment.end()) path = found->second;
  }
  Config config;
  if (!path.empty()) {
    auto loaded = LoadConfig(path);
    if (!loaded.ok()) return loaded.status();
    config = std::move(loaded).value();
  }
  GRADWIRE_RETURN_IF_ERROR(ApplyEnvironment(environment, config));
  for (const std::string& assignment : options.assignments) {
    GRADWIRE_RETURN_IF_ERROR(ApplyAssignment(assignment, config));
  }
  return config;
}

}  // namespace gradwire
