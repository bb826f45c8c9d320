#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/base/status.h"
#include "compressors/compression_rules.h"
#include "compressors/registry.h"

namespace gradwire {

/// Ports from first to last, both included; 0, 0: any.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
  bool empty() const { return last == 0; }
  bool operator==(const PortRange&) const = default;
};

/// Shared libraries with more compressors, loaded when the key is set.
struct Plugins {
  std::vector<std::string> paths;
  /// The built-in compressors and theirs; null: the built-in ones.
  std::shared_ptr<const CompressorRegistry> registry;
  bool operator==(const Plugins& other) const { return paths == other.paths; }
};

/// The whole configuration, typed, with the defaults in place. Mirrors the YAML (docs and
/// configs/reference.yaml explain each key). Sizes in bytes, times in milliseconds.
struct Config {
  struct Job {
    std::string id = "demo";
    std::uint32_t workers = 1;
    std::uint32_t servers = 1;
    std::uint64_t seed = 1;
    bool operator==(const Job&) const = default;
  } job;

  /// Where the root listens and everyone connects.
  std::string endpoint = "tcp://127.0.0.1:5701";

  struct Server {
    std::string bind = "127.0.0.1";  // interface address to listen on
    std::string advertise = "auto";  // host that peers are told; auto: see docs/operations.md
    std::string interface;           // network interface to listen on, instead of `bind`
    PortRange port_range;            // of lanes; the root's first lane has the endpoint's port
    std::uint32_t lanes = 1;
    std::optional<std::uint32_t> threads;  // compute threads; auto: see docs/thread_model.md
    bool operator==(const Server&) const = default;
  } server;

  struct Worker {
    std::optional<std::uint32_t> threads;  // compute threads; auto
    bool operator==(const Worker&) const = default;
  } worker;

  struct Partition {
    std::uint64_t bytes = 0;  // 0: auto
    std::uint64_t fuse_below = 64 * 1024;
    std::uint64_t credit = 2 * 1024 * 1024;
    bool operator==(const Partition&) const = default;
  } partition;

  CompressionRules compression;
  /// Who updates parameters: a method of compressors/methods, or "none", the caller.
  CompressorSpec method;
  Plugins plugins;
  /// Every compressor that this configuration may name. Lives as long as any copy of it.
  const CompressorRegistry& compressors() const {
    return plugins.registry == nullptr ? BuiltinCompressors() : *plugins.registry;
  }

  struct Timeouts {
    int start_ms = 60000;
    int stall_warn_ms = 10000;
    int stall_stop_ms = 60000;
    int heartbeat_ms = 0;  // between signs of life; 0: auto, an eighth of dead_after, at most 1 s
    int dead_after_ms = 10000;
    int auto_heartbeat() const { return std::clamp(dead_after_ms / 8, 20, 1000); }
    int heartbeat() const { return heartbeat_ms > 0 ? heartbeat_ms : auto_heartbeat(); }
    bool operator==(const Timeouts&) const = default;
  } timeouts;

  struct Log {
    LogLevel level = LogLevel::kInfo;
    LogFormat format = LogFormat::kText;
    bool operator==(const Log&) const = default;
  } log;

  struct Security {
    bool insecure = false;  // allow binding to other addresses than loopback
    bool operator==(const Security&) const = default;
  } security;

  std::string plan;  // path of a saved plan to replay

  bool operator==(const Config&) const = default;
};

/// Where each value came from, by the key's path, for people: "job.yaml:3",
/// "GRADWIRE_PARTITION_CREDIT", "--set partition.credit". A compressor's parameters have paths
/// beside it ("compression.uplink.ratio"). What is not there has its default.
using Sources = std::map<std::string, std::string>;

/// The functions below that take `sources` write down there what they set, unless it is null.

/// Parses YAML text. `origin` (a file name) goes into error messages.
/// Errors: InvalidArgument naming origin, line, key, text, unit and range; an unknown key names the
/// nearest one; a key whose feature is not there yet is refused as such.
/// `plugins`: those of a layer above, if it has the key; the document's own are then not looked at.
Result<Config> ParseConfig(const std::string& yaml_text, const std::string& origin,
                           Sources* sources = nullptr, const Plugins* plugins = nullptr);
Result<Config> LoadConfig(const std::string& path, Sources* sources = nullptr,
                          const Plugins* plugins = nullptr);

/// Applies GRADWIRE_* variables over a configuration: a key's path in capitals joined by
/// underscores (GRADWIRE_PARTITION_CREDIT=4MiB). Unknown GRADWIRE_ names are errors, apart from the
/// process's own (RANK, LOCAL_RANK, LOCAL_SIZE, ROLE, CONFIG, LOG_DIR). `environment` maps name to
/// value. Errors: InvalidArgument naming variable, text and range. Threads: as all of these
/// functions, safe. On an error the configuration is unchanged.
Status ApplyEnvironment(const std::map<std::string, std::string>& environment, Config& config,
                        Sources* sources = nullptr);

/// Applies command-line assignments "partition.credit=4MiB" together: the order of a compressor and
/// its parameters does not matter, and of two for one key the last counts. Lists are in YAML's
/// one-line form.  Errors: InvalidArgument naming key, text and range.
Status ApplyAssignments(const std::vector<std::string>& assignments, Config& config,
                        Sources* sources = nullptr);
Status ApplyAssignment(const std::string& assignment, Config& config);

/// Sets one key to a text; `source` stands before the message if it is refused.
/// Precondition: `path` is a key.
Status SetKey(const std::string& path, const std::string& text, const std::string& source,
              Config& config, Sources* sources = nullptr);

/// This process's environment as a map.
std::map<std::string, std::string> ProcessEnvironment();
/// The part of it that is Gradwire's own (GRADWIRE_* only).
std::map<std::string, std::string> GradwireEnvironment();

/// The part of a configuration that workers and servers must share, as keys and values in written
/// form; exchanged at the handshake. Of plug-ins these are names and versions of their compressors,
/// since paths may differ.
std::map<std::string, std::string> SharedConfig(const Config& config);

/// Every key with its value in written form, in the order of the reference.
std::vector<std::pair<std::string, std::string>> DescribeConfig(const Config& config);

/// A key or a compressor's parameter with its value in written form and where that came from.
struct DescribedValue {
  std::string path;
  std::string value;
  std::string source;  // "default" if nobody set it
  bool operator==(const DescribedValue&) const = default;
};
/// Every key in the order of the reference, and after each direction's compressor the parameters
/// that it has a value for.
std::vector<DescribedValue> DescribeSources(const Config& config, const Sources& sources);

/// "64KiB", "4MB", "123" -> bytes.  Errors: InvalidArgument with the text and the units there are.
Result<std::uint64_t> ParseSize(const std::string& text);
/// "5s", "200ms", "2m" -> milliseconds.
Result<int> ParseDuration(const std::string& text);

/// The candidate with the smallest edit distance to `word`, empty if none is near.
std::string NearestName(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace gradwire
