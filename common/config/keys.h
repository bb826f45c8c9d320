#pragma once

#include <yaml-cpp/yaml.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "common/config/config.h"

namespace gradwire {

/// One key of the configuration: the only place where it is written down. YAML, environment,
/// assignments, descriptions and the handshake are made from the table of them.
struct Key {
  std::string path;            // "partition.credit"
  std::string expected;        // "a size from 64KiB to 16GiB"
  bool is_shared = false;      // workers and servers must agree on the written form
  bool is_collection = false;  // the value is a YAML list or map, also in one line of text
  /// Takes a value over. Errors: a message that goes on after the key's name: "is '4 bananas',
  /// expected a size from 64KiB to 16GiB".
  std::function<Status(const YAML::Node& value, Config&)> set;
  /// The written form, which `set` takes.
  std::function<std::string(const Config&)> print;
};

/// Says which compressors there are, so its value is set before those of other keys.
inline constexpr std::string_view kPluginsKey = "plugins";

/// Every key, in the order of the reference.
const std::vector<Key>& Keys();

/// The two directions whose maps also have the compressor's own parameters as keys.
inline constexpr std::string_view kLinkSections[] = {"compression.uplink", "compression.downlink"};
/// Precondition: `section` is one of kLinkSections.
LinkCompression& LinkOf(Config& config, std::string_view section);

/// Sets one parameter of the link's compressor. Errors: as Key::set, naming the nearest parameter.
Status SetParameter(const CompressorRegistry& registry, const std::string& name,
                    const YAML::Node& value, LinkCompression& link);
/// Errors: as Key::set, if the compressor can't be made with these parameters.
Status CheckCompressor(const CompressorRegistry& registry, const LinkCompression& link);

/// ", did you mean 'x'?" or nothing.
std::string Suggestion(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace gradwire
