#include "compressors/plugin/plugins.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "common/base/escape.h"
#include "compressors/plugin/plugin_compressor.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr const char* kEntry = "gradwire_get_plugin";
// More than anybody will want, so that a wrong count is not taken for one.
constexpr std::size_t kMostCompressors = 256;
constexpr std::size_t kMostParameters = 256;
constexpr std::size_t kMostVersionBytes = 64;

Status InPlugin(std::string_view library, std::string_view fault) {
  std::string text = fmt::format("plug-in '{}' ", library);
  AppendEscaped(fault, false, text);
  return InvalidArgument(std::move(text));
}

std::string LinkerError() {
  const char* const text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

Result<LoadedPlugin> Load(const std::string& path) {
  // Its symbols stay its own. The handle is never closed: codecs may live as long as the process.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const bool is_file = path.find('/') != std::string::npos;
    return InPlugin(path, fmt::format("cannot be loaded: {}{}", LinkerError(),
                                      is_file ? "" : "; a file here is named ./FILE"));
  }
  void* const symbol = dlsym(handle, kEntry);
  if (symbol == nullptr) {
    return InPlugin(path, fmt::format("has no function {}: {}", kEntry, LinkerError()));
  }
  const auto entry = reinterpret_cast<decltype(&gradwire_get_plugin)>(symbol);
  const gradwire_plugin* const plugin = entry(GRADWIRE_PLUGIN_ABI_VERSION);
  return LoadedPlugin{path, plugin};
}

std::string_view Text(const char* text) { return text == nullptr ? std::string_view() : text; }

/// Names, values and versions that others read: printable and on one line.
bool IsPrintable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < '\x7f'; });
}

Result<ParameterInfo> ReadParameter(const gradwire_parameter_info& from) {
  ParameterInfo info;
  info.name = Text(from.name);
  const auto wrong = [&](std::string_view fault) {
    return InvalidArgument(fmt::format("has a parameter '{}' {}", info.name, fault));
  };
  if (info.name.empty() || !IsPrintable(info.name)) return wrong("without a printable name");
  info.default_value = Text(from.default_value);
  info.min = from.min;
  info.max = from.max;
  info.description = Text(from.description);
  switch (from.kind) {
    case GRADWIRE_PARAMETER_NUMBER:
      info.kind = ParameterInfo::Kind::kNumber;
      break;
    case GRADWIRE_PARAMETER_INTEGER:
      info.kind = ParameterInfo::Kind::kInteger;
      break;
    case GRADWIRE_PARAMETER_BOOL:
      info.kind = ParameterInfo::Kind::kBool;
      break;
    case GRADWIRE_PARAMETER_CHOICE:
      info.kind = ParameterInfo::Kind::kChoice;
      break;
    default:
      return wrong(fmt::format("of kind {}, expected 0 to 3", from.kind));
  }
  if (info.kind == ParameterInfo::Kind::kChoice) {
    if (from.choices == nullptr || from.num_choices == 0) return wrong("without choices");
    for (std::size_t i = 0; i < from.num_choices; ++i) {
      info.choices.emplace_back(Text(from.choices[i]));
      if (info.choices.back().empty()) return wrong("with an empty choice");
    }
  }
  return info;
}

/// Checks a description and copies what the registry wants of it.
Result<CompressorInfo> ReadCompressor(const std::string& library, const gradwire_compressor* from) {
  if (from == nullptr) return InvalidArgument("is missing");
  if (from->size < sizeof(gradwire_compressor)) {
    return InvalidArgument(fmt::format("says that its description is {} bytes, expected {}",
                                       from->size, sizeof(gradwire_compressor)));
  }
  for (const auto& [name, is_there] :
       {std::pair{"create", from->create != nullptr},
        std::pair{"destroy", from->destroy != nullptr},
        std::pair{"max_encoded_size", from->max_encoded_size != nullptr},
        std::pair{"encode", from->encode != nullptr},
        std::pair{"validate", from->validate != nullptr},
        std::pair{"decode", from->decode != nullptr}}) {
    if (!is_there) return InvalidArgument(fmt::format("has no function {}", name));
  }
  CompressorInfo info;
  info.name = Text(from->name);
  info.plugin_path = library;
  info.version = Text(from->version);
  if (info.version.empty() || info.version.size() > kMostVersionBytes ||
      !IsPrintable(info.version)) {
    return InvalidArgument(
        fmt::format("has the version '{}', expected 1 to {} printable characters", info.version,
                    kMostVersionBytes));
  }
  info.description = Text(from->description);
  info.source = Text(from->source);
  if (from->num_parameters > kMostParameters ||
      (from->num_parameters != 0 && from->parameters == nullptr)) {
    return InvalidArgument(fmt::format("has no list of its {} parameters", from->num_parameters));
  }
  for (std::size_t i = 0; i < from->num_parameters; ++i) {
    auto parameter = ReadParameter(from->parameters[i]);
    if (!parameter.ok()) return parameter.status();
    info.parameters.push_back(std::move(parameter).value());
  }
  info.create = [library, from](const Parameters& parameters) {
    return MakePluginCompressor(library, *from, parameters);
  };
  return info;
}

}  // namespace

Result<std::shared_ptr<const CompressorRegistry>> LoadPlugins(
    const std::vector<std::string>& paths) {
  std::vector<LoadedPlugin> plugins;
  for (const std::string& path : paths) {
    auto loaded = Load(path);
    if (!loaded.ok()) return loaded.status();
    plugins.push_back(std::move(loaded).value());
  }
  return RegisterPlugins(plugins);
}

Result<std::shared_ptr<const CompressorRegistry>> RegisterPlugins(
    const std::vector<LoadedPlugin>& plugins) {
  const auto registry = std::make_shared<CompressorRegistry>();
  GRADWIRE_RETURN_IF_ERROR(RegisterBuiltinCompressors(*registry));
  std::map<std::string, CompressorInfo> found;
  for (const auto& [library, plugin] : plugins) {
    if (plugin == nullptr) return InPlugin(library, fmt::format("{} returned nothing", kEntry));
    if (plugin->abi_version != GRADWIRE_PLUGIN_ABI_VERSION) {
      return InPlugin(library, fmt::format("has plug-in ABI version {}, this program has {}; build "
                                           "it with this program's gradwire/plugin.h",
                                           plugin->abi_version, GRADWIRE_PLUGIN_ABI_VERSION));
    }
    if (plugin->compressors == nullptr || plugin->num_compressors == 0 ||
        plugin->num_compressors > kMostCompressors) {
      return InPlugin(library, fmt::format("has {} compressors, expected 1 to {}",
                                           plugin->num_compressors, kMostCompressors));
    }
    for (std::size_t i = 0; i < plugin->num_compressors; ++i) {
      const gradwire_compressor* const description = plugin->compressors[i];
      auto info = ReadCompressor(library, description);
      if (!info.ok()) {
        const bool has_name = description != nullptr &&
                              description->size >= sizeof(gradwire_compressor) &&
                              description->name != nullptr;
        return InPlugin(library, fmt::format("has a faulty compressor {}: it {}",
                                             has_name ? description->name : std::to_string(i),
                                             info.status().message()));
      }
      const auto other = found.find(info->name);
      if (registry->Find(info->name) != nullptr || other != found.end()) {
        return InPlugin(library,
                        fmt::format("has a compressor {}, but that name is taken by {}", info->name,
                                    other == found.end()
                                        ? "a built-in compressor"
                                        : fmt::format("plug-in '{}'", other->second.plugin_path)));
      }
      std::string name = info->name;
      found.emplace(std::move(name), std::move(info).value());
    }
  }
  // Sorted, so that processes which load the same compressors in another order agree.
  std::uint16_t id = wire_id::kFirstPluginId;
  for (auto& [name, info] : found) {
    info.wire_id = id++;
    const std::string library = info.plugin_path;
    if (const Status status = registry->Register(std::move(info)); !status.ok()) {
      return InPlugin(library, fmt::format("has a faulty compressor: {}", status.message()));
    }
  }
  return std::shared_ptr<const CompressorRegistry>(registry);
}

std::string DescribePluginCompressors(const CompressorRegistry& registry) {
  std::vector<std::string> found;
  for (const CompressorInfo& info : registry.entries()) {
    if (!info.plugin_path.empty()) found.push_back(fmt::format("{} {}", info.name, info.version));
  }
  return fmt::format("[{}]", fmt::join(found, ", "));
}

}  // namespace gradwire
