#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
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

enum class ProcessRole { kWorker, kServer };
std::string_view ProcessRoleName(ProcessRole role);

/// Variable to value.
using Environment = std::map<std::string, std::string>;

/// What a program and its command line say of its configuration.
struct ProcessOptions {
  /// What the program is. Without one the environment decides, and it is a worker if that says
  /// nothing.
  std::optional<ProcessRole> role;
  std::string config_path;               // empty: GRADWIRE_CONFIG, else the defaults
  std::vector<std::string> assignments;  // key=value
  std::optional<std::uint32_t> rank;     // --rank or --index
};

/// A variable of another launcher that means nothing here.
struct IgnoredVariable {
  std::string name;
  std::string note;  // what to use instead, or empty
  bool operator==(const IgnoredVariable&) const = default;
};

/// A program's configuration, who the process is, and where both came from.
struct ProcessConfig {
  Config config;
  /// As Sources says, and for "rank", "local_rank", "local_size", "role" and "config" too.
  Sources sources;
  std::string config_path;  // empty: there is no file
  ProcessRole role = ProcessRole::kWorker;
  std::optional<std::uint32_t> rank;  // of the worker or server; 0 if it is the only one
  std::uint32_t local_rank = 0;
  std::optional<std::uint32_t> local_size;  // if anybody said so
  std::vector<std::string> warnings;        // for the log
  std::vector<IgnoredVariable> ignored;
  /// The environment asks for a scheduler, which Gradwire has not: say kNoScheduler and exit with
  /// 0. Nothing else is filled in then.
  bool is_scheduler = false;
};

inline constexpr std::string_view kNoScheduler =
    "DMLC_ROLE is scheduler, and Gradwire has none: server 0, the root, does its work. There is "
    "nothing to do here";

/// Command line > GRADWIRE_* > variables of other launchers > YAML > defaults.
/// Errors: InvalidArgument naming file and line, variable or assignment, text and range; also for
/// values that don't fit together, a role that is not the program's, and a rank beyond the job.
/// Threads: safe.
Result<ProcessConfig> LoadProcessConfig(const ProcessOptions& options);
/// The same over a given environment.
Result<ProcessConfig> LoadProcessConfig(const ProcessOptions& options,
                                        const Environment& environment);

/// The process's rank.  Errors: InvalidArgument naming where one was looked for, if there is none.
Result<std::uint32_t> RequireRank(const ProcessConfig& process);

/// Writes the warnings to the log.
void LogWarnings(const ProcessConfig& process);

}  // namespace gradwire
