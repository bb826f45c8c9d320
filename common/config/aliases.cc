#include "common/config/aliases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <optional>
#include <system_error>

namespace gradwire {
namespace {

// ---- Conversions --------------------------------------------------------------------------------

Status NotExpected(const std::string& text, std::string_view expected) {
  return InvalidArgument(fmt::format("is '{}', expected {}", text, expected));
}

/// As the key takes it, which the caller asks.
Result<std::string> Same(const std::string& text) { return text; }

template <std::uint32_t kMin, std::uint32_t kMax>
Result<std::string> Number(const std::string& text) {
  const auto number = ParseNumber(text, kMin, kMax);
  if (!number.ok()) return number.status();
  return std::to_string(*number);
}

/// An empty one would be the key's default, but says nothing of an interface.
Result<std::string> Interface(const std::string& text) {
  if (text.empty()) return NotExpected(text, "the name of a network interface");
  return text;
}

Result<std::string> RunId(const std::string& text) {
  if (text.empty()) return NotExpected(text, "the name of a run");
  // torchrun's name for a run that nobody named.
  return text == "none" ? std::string() : text;
}

Result<std::string> Host(const std::string& text) {
  const bool is_host =
      !text.empty() && text.size() <= 255 && std::all_of(text.begin(), text.end(), [](char c) {
        return c > ' ' && c < 0x7f && c != '/' && c != '\'' && c != '"';
      });
  if (!is_host) return NotExpected(text, "a host name or address");
  // An IPv6 address needs brackets before its port.
  if (text.find(':') != std::string::npos && text.front() != '[') return "[" + text + "]";
  return text;
}

/// torch's own store listens on MASTER_PORT, so Gradwire takes the port beside it.
Result<std::string> PortBeside(const std::string& text) {
  const auto port = ParseNumber(text, 1, 65534);
  if (!port.ok()) return port.status();
  return std::to_string(*port + 1);
}

Result<std::string> Bytes(const std::string& text) {
  const auto [end, error] = [&] {
    std::uint64_t bytes = 0;
    return std::from_chars(text.data(), text.data() + text.size(), bytes);
  }();
  if (error != std::errc() || end != text.data() + text.size()) {
    return NotExpected(text, "a whole number of bytes");
  }
  return text;
}

Result<std::string> Role(const std::string& text) {
  if (text == "worker" || text == "server" || text == "scheduler") return text;
  return NotExpected(text, "worker, server or scheduler");
}

Result<std::string> Level(const std::string& text) {
  struct Name {
    std::string_view theirs;
    const char* ours;
  };
  // A fatal fault is an error in our log, which must still be seen.
  constexpr Name kNames[] = {{"TRACE", "trace"},  {"DEBUG", "debug"}, {"INFO", "info"},
                             {"WARNING", "warn"}, {"ERROR", "error"}, {"FATAL", "error"}};
  std::string capitals = text;
  for (char& c : capitals) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const Name& name : kNames) {
    if (capitals == name.theirs) return std::string(name.ours);
  }
  return NotExpected(text, "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL");
}

Result<std::string> TraceOn(const std::string& text) {
  const auto number = ParseNumber(text, 0, 1);
  if (!number.ok()) return number.status();
  if (*number == 0) return std::string();
  return InvalidArgument(
      fmt::format("is '{}', but traces are not available yet; the only value is 0", text));
}

Result<std::string> TraceDir(const std::string& text) {
  if (text.empty()) return NotExpected(text, "a folder");
  return std::string();
}

Result<std::string> TraceStep(const std::string& text) {
  const auto number = ParseNumber(text, 0, 0x7fffffff);
  if (!number.ok()) return number.status();
  return std::string();
}

Result<std::string> Async(const std::string& text) {
  if (text == "0") return std::string();
  return InvalidArgument(
      fmt::format("is '{}', but training is synchronous: a round needs every worker; the only "
                  "value is 0",
                  text));
}

// ---- The tables ---------------------------------------------------------------------------------

using Reader = Alias::Reader;

constexpr Alias kAliases[] = {
    {"MASTER_ADDR", "torchrun", "endpoint.host", Reader::kAll, Host},
    {"MASTER_PORT", "torchrun", "endpoint.port", Reader::kAll, PortBeside},
    {"RANK", "torchrun", "rank", Reader::kWorker, Number<0, kMaxRank>},
    {"WORLD_SIZE", "torchrun", "job.workers", Reader::kAll, Same},
    {"LOCAL_RANK", "torchrun", "local_rank", Reader::kAll, Number<0, kMaxRank>},
    {"LOCAL_WORLD_SIZE", "torchrun", "local_size", Reader::kAll, Number<1, kMaxLocalSize>},
    {"TORCHELASTIC_RUN_ID", "torchrun", "job.id", Reader::kAll, RunId},

    {"DMLC_PS_ROOT_URI", "BytePS", "endpoint.host", Reader::kAll, Host},
    {"DMLC_PS_ROOT_PORT", "BytePS", "endpoint.port", Reader::kAll, Number<1, 65535>},
    {"DMLC_NUM_WORKER", "BytePS", "job.workers", Reader::kAll, Same},
    {"DMLC_NUM_SERVER", "BytePS", "job.servers", Reader::kAll, Same},
    {"DMLC_ROLE", "BytePS", "role", Reader::kAll, Role},
    {"DMLC_WORKER_ID", "BytePS", "rank", Reader::kWorker, Number<0, kMaxRank>},
    {"DMLC_SERVER_ID", "BytePS", "rank", Reader::kServer, Number<0, kMaxRank>},
    {"DMLC_INTERFACE", "BytePS", "server.interface", Reader::kAll, Interface},
    {"DMLC_NODE_HOST", "BytePS", "server.advertise", Reader::kAll, Same},
    {"BYTEPS_LOCAL_RANK", "BytePS", "local_rank", Reader::kAll, Number<0, kMaxRank>},
    {"BYTEPS_LOCAL_SIZE", "BytePS", "local_size", Reader::kAll, Number<1, kMaxLocalSize>},
    {"BYTEPS_PARTITION_BYTES", "BytePS", "partition.bytes", Reader::kAll, Bytes},
    {"BYTEPS_MIN_COMPRESS_BYTES", "BytePS", "compression.min_bytes", Reader::kAll, Bytes},
    {"BYTEPS_SERVER_ENGINE_THREAD", "BytePS", "server.threads", Reader::kAll, Number<0, 1024>},
    {"BYTEPS_LOG_LEVEL", "BytePS", "log.level", Reader::kAll, Level},
    {"BYTEPS_TRACE_ON", "BytePS", "", Reader::kAll, TraceOn},
    {"BYTEPS_TRACE_DIR", "BytePS", "", Reader::kAll, TraceDir},
    {"BYTEPS_TRACE_START_STEP", "BytePS", "", Reader::kAll, TraceStep},
    {"BYTEPS_TRACE_END_STEP", "BytePS", "", Reader::kAll, TraceStep},
    {"BYTEPS_ENABLE_ASYNC", "BytePS", "", Reader::kAll, Async},

    // One launch is of workers or of servers, so its rank and size are of the process's own kind.
    {"OMPI_COMM_WORLD_RANK", "Open MPI", "rank", Reader::kAll, Number<0, kMaxRank>},
    {"OMPI_COMM_WORLD_SIZE", "Open MPI", "job.workers", Reader::kWorker, Same},
    {"OMPI_COMM_WORLD_SIZE", "Open MPI", "job.servers", Reader::kServer, Same},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI", "local_rank", Reader::kAll, Number<0, kMaxRank>},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI", "local_size", Reader::kAll,
     Number<1, kMaxLocalSize>},

    {"SLURM_PROCID", "Slurm", "rank", Reader::kAll, Number<0, kMaxRank>},
    {"SLURM_NTASKS", "Slurm", "job.workers", Reader::kWorker, Same},
    {"SLURM_NTASKS", "Slurm", "job.servers", Reader::kServer, Same},
    {"SLURM_LOCALID", "Slurm", "local_rank", Reader::kAll, Number<0, kMaxRank>},
    {"SLURM_JOB_ID", "Slurm", "job.id", Reader::kAll, Same},

    {"JOB_COMPLETION_INDEX", "Kubernetes", "rank", Reader::kAll, Number<0, kMaxRank>},
};

/// Variables that BytePS documents or reads, whose work is done otherwise here.
constexpr std::pair<std::string_view, std::string_view> kInstead[] = {
    {"BYTEPS_SCHEDULING_CREDIT", "see partition.credit, in bytes"},
    {"BYTEPS_THREADPOOL_SIZE", "see worker.threads"},
    {"BYTEPS_OMP_THREAD_PER_GPU", "see worker.threads"},
    {"BYTEPS_FORCE_DISTRIBUTED", "a worker always goes through a server"},
    {"BYTEPS_SERVER_ENABLE_SCHEDULE", "priorities are always on"},
    {"BYTEPS_KEY_HASH_FN", "keys are placed by size, see the plan"},
    {"BYTEPS_ENABLE_MIXED_MODE", "keys are placed by size, see the plan"},
    {"BYTEPS_TRACE_DIR", "traces are not available yet"},
    {"BYTEPS_TRACE_START_STEP", "traces are not available yet"},
    {"BYTEPS_TRACE_END_STEP", "traces are not available yet"},
    {"DMLC_ENABLE_RDMA", "the network is TCP"},
    {"PS_VERBOSE", "see log.level"},
};

/// BytePS counts hosts, and each has as many workers as local ranks.
Status CountLocalRanks(const Environment& environment, AliasValues& values) {
  const auto size_text = environment.find("BYTEPS_LOCAL_SIZE");
  if (size_text == environment.end()) return Status::Ok();
  const auto size = ParseNumber(size_text->second, 1, kMaxLocalSize);
  if (!size.ok()) return size.status();
  if (*size == 1) return Status::Ok();
  const auto workers = values.find("job.workers");
  if (workers != values.end() && workers->second.source == "DMLC_NUM_WORKER") {
    const auto hosts = ParseNumber(workers->second.text, 1, kMaxRank + 1);
    if (!hosts.ok()) return hosts.status();
    workers->second = {std::to_string(std::uint64_t{*hosts} * *size),
                       "DMLC_NUM_WORKER * BYTEPS_LOCAL_SIZE"};
  }
  const auto rank = values.find("rank");
  if (rank == values.end() || rank->second.source != "DMLC_WORKER_ID") return Status::Ok();
  const auto local_text = environment.find("BYTEPS_LOCAL_RANK");
  if (local_text == environment.end()) {
    return InvalidArgument(
        fmt::format("BYTEPS_LOCAL_SIZE is '{}', but BYTEPS_LOCAL_RANK is not set, so which of the "
                    "{} workers of host DMLC_WORKER_ID {} is this?",
                    size_text->second, *size, rank->second.text));
  }
  const auto host = ParseNumber(rank->second.text, 0, kMaxRank);
  const auto local = ParseNumber(local_text->second, 0, kMaxRank);
  if (!host.ok()) return host.status();
  if (!local.ok()) return local.status();
  if (*local >= *size) {
    return InvalidArgument(
        fmt::format("BYTEPS_LOCAL_RANK is '{}', expected below {} "
                    "(BYTEPS_LOCAL_SIZE)",
                    local_text->second, *size));
  }
  rank->second = {std::to_string(std::uint64_t{*host} * *size + *local),
                  "DMLC_WORKER_ID * BYTEPS_LOCAL_SIZE + BYTEPS_LOCAL_RANK"};
  return Status::Ok();
}

}  // namespace

std::span<const Alias> Aliases() { return kAliases; }

Result<std::uint32_t> ParseNumber(const std::string& text, std::uint32_t min, std::uint32_t max) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < min || number > max) {
    return NotExpected(text, fmt::format("a whole number from {} to {}", min, max));
  }
  return number;
}

Result<AliasValues> ReadAliases(const Environment& environment, ProcessRole role) {
  AliasValues values;
  Config scratch;  // what a key refuses is refused whoever it counts for
  std::string endpoint_family;
  for (const Alias& alias : kAliases) {
    const auto found = environment.find(std::string(alias.variable));
    if (found == environment.end()) continue;
    const std::string variable(alias.variable);
    const std::string target(alias.target);
    const auto text = alias.convert(found->second);
    if (!text.ok()) {
      return InvalidArgument(fmt::format("{} {}", variable, text.status().message()));
    }
    const bool is_key = target.find('.') != std::string::npos && !target.starts_with("endpoint.");
    if (is_key && !(text->empty() && alias.convert != Same)) {
      GRADWIRE_RETURN_IF_ERROR(SetKey(target, *text, variable, scratch));
    }
    const Reader other = role == ProcessRole::kWorker ? Reader::kServer : Reader::kWorker;
    if (target.empty() || alias.reader == other || (text->empty() && alias.convert != Same)) {
      continue;
    }
    if (target.starts_with("endpoint.")) {
      // Half an endpoint of one launcher and half of another lead nowhere.
      if (endpoint_family.empty()) endpoint_family = alias.family;
      if (alias.family != endpoint_family) continue;
    }
    values.emplace(target, AliasValue{*text, variable});  // the first launcher that says it
  }
  GRADWIRE_RETURN_IF_ERROR(CountLocalRanks(environment, values));
  return values;
}

std::vector<IgnoredVariable> IgnoredVariables(const Environment& environment) {
  std::vector<IgnoredVariable> ignored;
  for (const auto& entry : environment) {
    const std::string& name = entry.first;
    const auto* instead = std::find_if(std::begin(kInstead), std::end(kInstead),
                                       [&](const auto& known) { return known.first == name; });
    const bool has_note = instead != std::end(kInstead);
    const bool is_alias = std::any_of(std::begin(kAliases), std::end(kAliases),
                                      [&](const Alias& alias) { return alias.variable == name; });
    const bool is_theirs = name.starts_with("BYTEPS_") || name.starts_with("DMLC_");
    if (!has_note && (is_alias || !is_theirs)) continue;
    ignored.push_back({name, has_note ? std::string(instead->second) : std::string()});
  }
  return ignored;
}

}  // namespace gradwire
