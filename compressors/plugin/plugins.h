#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "compressors/plugin/gradwire_plugin.h"
#include "compressors/registry.h"

namespace gradwire {

/// Loads shared libraries and returns a registry with the built-in compressors and theirs. Each
/// path is one for dlopen: without a '/' the system looks for the library, else it is a file, from
/// the working directory. What was loaded stays in the process, also after an error.
/// Errors: InvalidArgument naming library and compressor: not loadable (the linker's reason), no
/// entry function, another ABI version (both), a faulty description, a name that is taken (by
/// whom).
/// Threads: safe.
Result<std::shared_ptr<const CompressorRegistry>> LoadPlugins(
    const std::vector<std::string>& paths);

/// The same for descriptions that are in the process already; `library` is for messages.
struct LoadedPlugin {
  std::string library;
  const gradwire_plugin* plugin = nullptr;
};
Result<std::shared_ptr<const CompressorRegistry>> RegisterPlugins(
    const std::vector<LoadedPlugin>& plugins);

/// The compressors of plug-ins with their versions, sorted by name: "[fixed 1, other 2]". What
/// workers and servers compare.
std::string DescribePluginCompressors(const CompressorRegistry& registry);

}  // namespace gradwire
