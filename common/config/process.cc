#include "common/config/process.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/base/log.h"
#include "common/config/aliases.h"
#include "common/config/keys.h"
#include "compressors/methods/method.h"

namespace gradwire {
namespace {

/// "4 (job.yaml:3)"
std::string WithSource(std::string_view value, const Sources& sources, const std::string& path) {
  const auto found = sources.find(path);
  return fmt::format("{} ({})", value, found == sources.end() ? "default" : found->second);
}

std::map<std::string, std::string> ValuesOf(const Config& config) {
  std::map<std::string, std::string> values;
  for (auto& entry : DescribeConfig(config)) values.insert(std::move(entry));
  return values;
}

/// The role of GRADWIRE_ROLE, else of DMLC_ROLE; sets is_scheduler. The program's own is the last.
Status FindRole(const ProcessOptions& options, const Environment& environment,
                ProcessConfig& process) {
  std::string variable = "GRADWIRE_ROLE";
  auto found = environment.find(variable);
  if (found == environment.end()) {
    variable = "DMLC_ROLE";
    found = environment.find(variable);
  }
  process.role = options.role.value_or(ProcessRole::kWorker);
  process.sources["role"] = options.role ? "program" : "default";
  if (found == environment.end()) return Status::Ok();
  const std::string& text = found->second;
  if (variable == "DMLC_ROLE" && text == "scheduler") {
    process.is_scheduler = true;
    return Status::Ok();
  }
  if (text != "worker" && text != "server") {
    return InvalidArgument(
        fmt::format("{} is '{}', expected worker{}", variable, text,
                    variable == "DMLC_ROLE" ? ", server or scheduler" : " or server"));
  }
  const ProcessRole role = text == "server" ? ProcessRole::kServer : ProcessRole::kWorker;
  if (options.role && role != *options.role) {
    return InvalidArgument(fmt::format("{} is '{}', but this program is a {}", variable, text,
                                       ProcessRoleName(*options.role)));
  }
  process.role = role;
  process.sources["role"] = variable;
  return Status::Ok();
}

/// The aliases' part of the endpoint; a missing half is as the layers below say.
Status ApplyEndpoint(const AliasValues& values, Config& config, Sources& sources) {
  const auto host = values.find("endpoint.host");
  const auto port = values.find("endpoint.port");
  if (host == values.end() && port == values.end()) return Status::Ok();
  constexpr std::size_t kSchemeBytes = 6;  // tcp://
  const std::size_t colon = config.endpoint.rfind(':');
  std::string source;
  std::string endpoint = "tcp://";
  if (host != values.end()) {
    endpoint += host->second.text;
    source = host->second.source;
  } else {
    endpoint += config.endpoint.substr(kSchemeBytes, colon - kSchemeBytes);
  }
  endpoint += ':';
  if (port != values.end()) {
    endpoint += port->second.text;
    source += (source.empty() ? "" : ", ") + port->second.source;
  } else {
    endpoint += config.endpoint.substr(colon + 1);
  }
  return SetKey("endpoint", endpoint, source, config, &sources);
}

Status ApplyAliases(const AliasValues& values, Config& config, Sources& sources) {
  for (const auto& [target, value] : values) {
    const bool is_key = target.find('.') != std::string::npos && !target.starts_with("endpoint.");
    if (!is_key) continue;
    GRADWIRE_RETURN_IF_ERROR(SetKey(target, value.text, value.source, config, &sources));
  }
  return ApplyEndpoint(values, config, sources);
}

/// A number of the process: GRADWIRE_* before the aliases.
Result<std::optional<std::uint32_t>> FindNumber(const std::string& target,
                                                const std::string& variable, std::uint32_t min,
                                                std::uint32_t max, const Environment& environment,
                                                const AliasValues& aliases, Sources& sources) {
  const auto own = environment.find(variable);
  const auto alias = aliases.find(target);
  if (own == environment.end() && alias == aliases.end()) {
    return std::optional<std::uint32_t>();
  }
  const std::string& text = own != environment.end() ? own->second : alias->second.text;
  const std::string& source = own != environment.end() ? variable : alias->second.source;
  const auto number = ParseNumber(text, min, max);
  if (!number.ok()) return InvalidArgument(fmt::format("{} {}", source, number.status().message()));
  sources[target] = source;
  return std::optional<std::uint32_t>(*number);
}

/// Rank, local rank and local size.
Status FindPlace(const ProcessOptions& options, const Environment& environment,
                 const AliasValues& aliases, ProcessConfig& process) {
  Sources& sources = process.sources;
  const auto local_rank =
      FindNumber("local_rank", "GRADWIRE_LOCAL_RANK", 0, kMaxRank, environment, aliases, sources);
  if (!local_rank.ok()) return local_rank.status();
  const auto local_size = FindNumber("local_size", "GRADWIRE_LOCAL_SIZE", 1, kMaxLocalSize,
                                     environment, aliases, sources);
  if (!local_size.ok()) return local_size.status();
  process.local_rank = (*local_rank).value_or(0);
  process.local_size = *local_size;
  if (process.local_size && process.local_rank >= *process.local_size) {
    return InvalidArgument(
        fmt::format("the local rank is {}, expected below the local size {}",
                    WithSource(std::to_string(process.local_rank), sources, "local_rank"),
                    WithSource(std::to_string(*process.local_size), sources, "local_size")));
  }

  // Also checked if the command line overrules it.
  const auto rank = FindNumber("rank", "GRADWIRE_RANK", 0, kMaxRank, environment, aliases, sources);
  if (!rank.ok()) return rank.status();
  const bool is_server = process.role == ProcessRole::kServer;
  const std::string count_key = is_server ? "job.servers" : "job.workers";
  const std::uint32_t count = is_server ? process.config.job.servers : process.config.job.workers;
  process.rank = *rank;
  if (options.rank) {
    process.rank = options.rank;
    sources["rank"] = is_server ? "--index" : "--rank";
  }
  // The only one of its kind needs no number.
  if (!process.rank && count == 1) process.rank = 0;
  if (process.rank && *process.rank >= count) {
    return InvalidArgument(fmt::format(
        "{} is '{}', expected below {}, the value of {}", sources["rank"], *process.rank,
        WithSource(std::to_string(count), sources, count_key), count_key));
  }
  return Status::Ok();
}

/// Plug-ins of the command line or else of the environment, which count for every layer: the file
/// may name their compressors. Takes them out of both.
Status ApplyPlugins(std::vector<std::string>& assignments, Environment& environment, Config& config,
                    Sources& sources) {
  const std::string assigned = fmt::format("{}=", kPluginsKey);
  std::string text;
  std::string source;
  const auto variable = environment.find("GRADWIRE_PLUGINS");
  if (variable != environment.end()) {
    source = variable->first;
    text = variable->second;
    environment.erase(variable);
  }
  for (const std::string& assignment : assignments) {
    if (!assignment.starts_with(assigned)) continue;
    source = fmt::format("--set {}", kPluginsKey);
    text = assignment.substr(assigned.size());
  }
  std::erase_if(assignments, [&](const std::string& each) { return each.starts_with(assigned); });
  if (source.empty()) return Status::Ok();
  return SetKey(std::string(kPluginsKey), text, source, config, &sources);
}

/// What only all layers together can get wrong.
Status CheckTogether(const Config& config, const Sources& sources) {
  const auto values = ValuesOf(config);
  const auto show = [&](const std::string& path) {
    return WithSource(values.at(path), sources, path);
  };
  const Config::Timeouts& timeouts = config.timeouts;
  if (timeouts.heartbeat_ms > timeouts.dead_after_ms / 2) {
    return InvalidArgument(
        fmt::format("timeouts.heartbeat is {}, expected at most half of timeouts.dead_after, "
                    "which is {}",
                    show("timeouts.heartbeat"), show("timeouts.dead_after")));
  }
  const Config defaults;
  if (!config.server.interface.empty() && config.server.bind != defaults.server.bind) {
    return InvalidArgument(
        fmt::format("server.interface is {} and server.bind is {}, expected one of them only",
                    show("server.interface"), show("server.bind")));
  }
  if (config.compression.filter.type == FilterType::kNone) {
    for (const auto& [path, value] : ValuesOf(defaults)) {
      if (!path.starts_with("compression.filter.") || values.at(path) == value) continue;
      return InvalidArgument(
          fmt::format("{} is {}, but compression.filter.type is {}, expected covap", path,
                      show(path), show("compression.filter.type")));
    }
  }
  const auto method = JobMethodTraits(config.method, config.compression);
  if (!method.ok()) {
    return InvalidArgument(
        fmt::format("method is {}: {}", show("method"), method.status().message()));
  }
  return Status::Ok();
}

}  // namespace

std::string_view ProcessRoleName(ProcessRole role) {
  return role == ProcessRole::kServer ? "server" : "worker";
}

Result<ProcessConfig> LoadProcessConfig(const ProcessOptions& options,
                                        const Environment& given_environment) {
  Environment environment = given_environment;
  std::vector<std::string> assignments = options.assignments;
  ProcessConfig process;
  GRADWIRE_RETURN_IF_ERROR(FindRole(options, environment, process));
  if (process.is_scheduler) return process;
  const auto aliases = ReadAliases(environment, process.role);
  if (!aliases.ok()) return aliases.status();

  Config& config = process.config;
  Sources& sources = process.sources;
  const auto named = environment.find("GRADWIRE_CONFIG");
  process.config_path = options.config_path;
  if (!process.config_path.empty()) {
    sources["config"] = "--config";
  } else if (named != environment.end() && !named->second.empty()) {
    process.config_path = named->second;
    sources["config"] = "GRADWIRE_CONFIG";
  }
  GRADWIRE_RETURN_IF_ERROR(ApplyPlugins(assignments, environment, config, sources));
  if (!process.config_path.empty()) {
    const bool is_set = sources.contains(std::string(kPluginsKey));
    auto loaded = LoadConfig(process.config_path, &sources, is_set ? &config.plugins : nullptr);
    if (!loaded.ok()) return loaded.status();
    config = std::move(loaded).value();
  }
  const Sources file_sources = sources;
  const auto file_values = ValuesOf(config);
  GRADWIRE_RETURN_IF_ERROR(ApplyAliases(*aliases, config, sources));
  const Sources alias_sources = sources;
  GRADWIRE_RETURN_IF_ERROR(ApplyEnvironment(environment, config, &sources));
  GRADWIRE_RETURN_IF_ERROR(ApplyAssignments(assignments, config, &sources));

  // Whoever wrote a value into the file must notice that a launcher's variable overrules it.
  for (const auto& [path, value] : DescribeConfig(config)) {
    const auto file = file_sources.find(path);
    const auto now = sources.find(path);
    if (file == file_sources.end() || now->second == file->second) continue;
    const bool is_alias = now->second == alias_sources.at(path);
    if (!is_alias || value == file_values.at(path)) continue;
    process.warnings.push_back(fmt::format("{} is {} because of {}, which overrules {} in {}", path,
                                           value, now->second, file_values.at(path), file->second));
  }
  GRADWIRE_RETURN_IF_ERROR(CheckTogether(config, sources));
  GRADWIRE_RETURN_IF_ERROR(FindPlace(options, environment, *aliases, process));
  process.ignored = IgnoredVariables(environment);
  return process;
}

Result<ProcessConfig> LoadProcessConfig(const ProcessOptions& options) {
  return LoadProcessConfig(options, ProcessEnvironment());
}

Result<std::uint32_t> RequireRank(const ProcessConfig& process) {
  if (process.rank) return *process.rank;
  const bool is_server = process.role == ProcessRole::kServer;
  const Alias::Reader other = is_server ? Alias::Reader::kWorker : Alias::Reader::kServer;
  std::string variables = "GRADWIRE_RANK";
  for (const Alias& alias : Aliases()) {
    if (alias.target == "rank" && alias.reader != other) {
      variables += fmt::format(", {}", alias.variable);
    }
  }
  return InvalidArgument(fmt::format(
      "there are {} {}s ({}), so which one is this? {} is not given, and none of {} is set",
      is_server ? process.config.job.servers : process.config.job.workers,
      ProcessRoleName(process.role), is_server ? "job.servers" : "job.workers",
      is_server ? "--index" : "--rank", variables));
}

void LogWarnings(const ProcessConfig& process) {
  for (const std::string& warning : process.warnings) LogWarn("config", warning);
}

}  // namespace gradwire
