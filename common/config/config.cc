#include "common/config/config.h"

#include <fmt/format.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cassert>
#include <cctype>
#include <cerrno>
#include <exception>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/config/keys.h"
#include "compressors/plugin/plugins.h"
#include "compressors/registry.h"

extern char** environ;  // NOLINT: POSIX's name

namespace gradwire {
namespace {

constexpr std::size_t kMaxConfigBytes = std::size_t{1} << 20;
constexpr std::string_view kPrefix = "GRADWIRE_";
/// Variables that are a process's own and no part of the configuration.
constexpr std::string_view kProcessVariables[] = {
    "GRADWIRE_RANK",   "GRADWIRE_LOCAL_RANK", "GRADWIRE_LOCAL_SIZE", "GRADWIRE_ROLE",
    "GRADWIRE_CONFIG", "GRADWIRE_LOG_DIR",    "GRADWIRE_TEST_SEED"};

/// A value that somebody gave to a key, or to a parameter of a direction's compressor.
struct Assignment {
  const Key* key = nullptr;
  std::string_view link_section;  // of kLinkSections; parameters only
  std::string parameter;
  YAML::Node value;
  std::string where;   // how messages name it: "job.yaml:3: partition.credit"
  std::string source;  // how provenance names it: "job.yaml:3"
};

const Key* FindKey(std::string_view path) {
  for (const Key& key : Keys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

/// True if there are keys below this path.
bool IsSection(std::string_view path) {
  return std::any_of(Keys().begin(), Keys().end(), [&](const Key& key) {
    return key.path.size() > path.size() + 1 && key.path.starts_with(path) &&
           key.path[path.size()] == '.';
  });
}

/// The names directly below a section; "" is the top.
std::vector<std::string> NamesBelow(const std::string& section) {
  const std::string prefix = section.empty() ? "" : section + ".";
  std::vector<std::string> names;
  for (const Key& key : Keys()) {
    if (!key.path.starts_with(prefix)) continue;
    const std::string rest = key.path.substr(prefix.size());
    const std::string name = rest.substr(0, rest.find('.'));
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  return names;
}

/// A hint for a name that is not in its section: a neighbour's name, or the same name elsewhere.
std::string SuggestionIn(const std::string& section, const std::string& name) {
  const std::string near = Suggestion(name, NamesBelow(section));
  if (!near.empty()) return near;
  for (const Key& key : Keys()) {
    if (key.path.ends_with("." + name)) return fmt::format(", did you mean '{}'?", key.path);
  }
  return "";
}

/// Writes down where the values of an assignment came from.
void NoteSource(const Assignment& assignment, Config& config, Sources& sources) {
  if (assignment.key == nullptr) {
    sources[fmt::format("{}.{}", assignment.link_section, assignment.parameter)] =
        assignment.source;
    return;
  }
  sources[assignment.key->path] = assignment.source;
  for (const std::string_view section : kLinkSections) {
    if (assignment.key->path != fmt::format("{}.compressor", section)) continue;
    // A compressor's name resets its parameters, and may bring some in brackets.
    const std::string prefix = fmt::format("{}.", section);
    std::erase_if(sources, [&](const auto& entry) {
      return entry.first.starts_with(prefix) && FindKey(entry.first) == nullptr;
    });
    for (const auto& entry : LinkOf(config, section).compressor.parameters) {
      sources[prefix + entry.first] = assignment.source;
    }
  }
}

/// Plug-ins come first, since they say which compressors there are, and parameters after
/// compressors, since a compressor's name resets them, in whatever order they are written. Nothing
/// changes if anything is wrong.
Status Apply(const std::vector<Assignment>& assignments, Config& config, Sources* sources) {
  Sources noted;
  if (sources != nullptr) noted = *sources;
  Config next = config;
  for (const bool plugins : {true, false}) {
    for (const Assignment& assignment : assignments) {
      if (assignment.key == nullptr || (assignment.key->path == kPluginsKey) != plugins) continue;
      const Status status = assignment.key->set(assignment.value, next);
      if (!status.ok()) {
        return InvalidArgument(fmt::format("{} {}", assignment.where, status.message()));
      }
      NoteSource(assignment, next, noted);
    }
  }
  for (const Assignment& assignment : assignments) {
    if (assignment.key != nullptr) continue;
    const Status status = SetParameter(next.compressors(), assignment.parameter, assignment.value,
                                       LinkOf(next, assignment.link_section));
    if (!status.ok()) {
      return InvalidArgument(fmt::format("{} {}", assignment.where, status.message()));
    }
    NoteSource(assignment, next, noted);
  }
  for (const std::string_view section : kLinkSections) {
    if (LinkOf(next, section) == LinkOf(config, section) && next.plugins == config.plugins) {
      continue;
    }
    const Status status = CheckCompressor(next.compressors(), LinkOf(next, section));
    if (status.ok()) continue;
    // The last one who touched this direction's compressor is who is told; else who took its
    // plug-in away.
    std::string where = fmt::format("{}.compressor", section);
    for (const Assignment& assignment : assignments) {
      const bool is_compressor = assignment.key != nullptr &&
                                 assignment.key->path == fmt::format("{}.compressor", section);
      if (is_compressor || assignment.link_section == section) where = assignment.where;
    }
    return InvalidArgument(fmt::format("{} {}", where, status.message()));
  }
  config = std::move(next);
  if (sources != nullptr) *sources = std::move(noted);
  return Status::Ok();
}

std::string_view LinkSectionOf(std::string_view path) {
  for (const std::string_view section : kLinkSections) {
    if (path == section) return section;
  }
  return {};
}

/// "job.yaml:3: partition.credit"
std::string WhereInFile(const std::string& origin, const YAML::Node& node,
                        const std::string& path) {
  return fmt::format("{}:{}: {}", origin, node.Mark().line + 1, path);
}

/// Collects the assignments of a document, descending through the sections.
Status Walk(const std::string& origin, const std::string& section, const YAML::Node& node,
            std::vector<Assignment>& assignments) {
  if (node.IsNull()) return Status::Ok();
  if (!node.IsMap()) {
    return InvalidArgument(
        fmt::format("{} {}, expected a map with the keys {}",
                    WhereInFile(origin, node, section.empty() ? "the document" : section),
                    node.IsScalar() ? fmt::format("is '{}'", node.Scalar()) : "is a list",
                    fmt::join(NamesBelow(section), ", ")));
  }
  std::set<std::string> seen;
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) {
      return InvalidArgument(
          fmt::format("{}:{}: a key is no text", origin, entry.first.Mark().line + 1));
    }
    const std::string& name = entry.first.Scalar();
    const std::string path = section.empty() ? name : section + "." + name;
    const std::string where = WhereInFile(origin, entry.first, path);
    const std::string source = fmt::format("{}:{}", origin, entry.first.Mark().line + 1);
    if (!seen.insert(name).second) return InvalidArgument(where + " is there twice");
    if (const Key* key = FindKey(path); key != nullptr) {
      assignments.push_back({key, {}, {}, entry.second, where, source});
    } else if (IsSection(path)) {
      GRADWIRE_RETURN_IF_ERROR(Walk(origin, path, entry.second, assignments));
    } else if (const std::string_view link = LinkSectionOf(section); !link.empty()) {
      assignments.push_back({nullptr, link, name, entry.second, where, source});
    } else {
      return InvalidArgument(
          fmt::format("{} is no key of the configuration{}", where, SuggestionIn(section, name)));
    }
  }
  return Status::Ok();
}

/// The node of a value that is given as text: lists and maps in YAML's one-line form.
Result<YAML::Node> NodeOfText(const Key* key, const std::string& text, const std::string& where) {
  if (key == nullptr || !key->is_collection) return YAML::Node(text);
  try {
    return YAML::Load(text);
  } catch (const std::exception& error) {
    return InvalidArgument(
        fmt::format("{} is '{}', expected {} ({})", where, text, key->expected, error.what()));
  }
}

std::string VariableOf(std::string_view path) {
  std::string name(kPrefix);
  for (const char c : path) {
    name += c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

Result<Assignment> AssignmentOfVariable(const std::string& name, const std::string& text) {
  Assignment assignment;
  assignment.where = name;
  assignment.source = name;
  std::vector<std::string> variables;
  for (const Key& key : Keys()) {
    variables.push_back(VariableOf(key.path));
    if (variables.back() == name) assignment.key = &key;
  }
  if (assignment.key == nullptr) {
    for (const std::string_view section : kLinkSections) {
      const std::string prefix = VariableOf(section) + "_";
      if (!name.starts_with(prefix)) continue;
      assignment.link_section = section;
      assignment.parameter = name.substr(prefix.size());
      for (char& c : assignment.parameter) {
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      }
    }
    if (assignment.link_section.empty()) {
      return InvalidArgument(
          fmt::format("{} is no variable of Gradwire{}", name, Suggestion(name, variables)));
    }
  }
  auto node = NodeOfText(assignment.key, text, assignment.where);
  if (!node.ok()) return node.status();
  assignment.value.reset(*node);
  return assignment;
}

Result<Assignment> AssignmentOfText(const std::string& assignment) {
  const std::size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    return InvalidArgument(fmt::format(
        "'{}' is no assignment, expected KEY=VALUE such as partition.credit=4MiB", assignment));
  }
  const std::string path = assignment.substr(0, equals);
  const std::string text = assignment.substr(equals + 1);
  Assignment parsed;
  parsed.where = path;
  parsed.source = "--set " + path;
  parsed.key = FindKey(path);
  if (parsed.key == nullptr) {
    const std::size_t dot = path.rfind('.');
    const std::string section = dot == std::string::npos ? "" : path.substr(0, dot);
    const std::string name = dot == std::string::npos ? path : path.substr(dot + 1);
    parsed.link_section = LinkSectionOf(section);
    parsed.parameter = name;
    if (IsSection(path)) {
      return InvalidArgument(fmt::format("{} is a section, expected one of its keys {}", path,
                                         fmt::join(NamesBelow(path), ", ")));
    }
    if (parsed.link_section.empty()) {
      std::vector<std::string> paths;
      for (const Key& key : Keys()) paths.push_back(key.path);
      const std::string near = Suggestion(path, paths);
      return InvalidArgument(fmt::format("{} is no key of the configuration{}", path,
                                         near.empty() ? SuggestionIn(section, name) : near));
    }
  }
  auto node = NodeOfText(parsed.key, text, parsed.where);
  if (!node.ok()) return node.status();
  parsed.value.reset(*node);
  return parsed;
}

/// Passes over a document.
class Skip final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

/// Not LoadAll: where a document begins with a comma, yaml-cpp finds another one there without end.
bool HasMoreDocuments(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Skip skip;
  return parser.HandleNextDocument(skip) && parser.HandleNextDocument(skip);
}

}  // namespace

Result<Config> ParseConfig(const std::string& yaml_text, const std::string& origin,
                           Sources* sources, const Plugins* plugins) {
  if (yaml_text.size() > kMaxConfigBytes) {
    return InvalidArgument(fmt::format("{} is {} bytes, a configuration has at most {}", origin,
                                       yaml_text.size(), kMaxConfigBytes));
  }
  try {
    if (HasMoreDocuments(yaml_text)) {
      return InvalidArgument(
          fmt::format("{} has more than one YAML document, expected one", origin));
    }
    Config config;
    std::vector<Assignment> assignments;
    GRADWIRE_RETURN_IF_ERROR(Walk(origin, "", YAML::Load(yaml_text), assignments));
    if (plugins == nullptr) {
      GRADWIRE_RETURN_IF_ERROR(Apply(assignments, config, sources));
      return config;
    }
    config.plugins = *plugins;
    // A list of its own: YAML's nodes write through when they are assigned to, as erasing would do.
    std::vector<Assignment> others;
    for (const Assignment& assignment : assignments) {
      if (assignment.key == nullptr || assignment.key->path != kPluginsKey) {
        others.push_back(assignment);
      }
    }
    GRADWIRE_RETURN_IF_ERROR(Apply(others, config, sources));
    return config;
  } catch (const YAML::Exception& error) {
    return InvalidArgument(
        fmt::format("{}:{}: no YAML: {}", origin, error.mark.line + 1, error.msg));
  } catch (const std::exception& error) {
    return InvalidArgument(fmt::format("{}: no YAML: {}", origin, error.what()));
  }
}

Result<Config> LoadConfig(const std::string& path, Sources* sources, const Plugins* plugins) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxConfigBytes + 1, '\0');
  // Reading a directory fails here, opening it did not.
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    return InvalidArgument(fmt::format("cannot read configuration '{}': {}", path,
                                       std::generic_category().message(errno)));
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return ParseConfig(text, path, sources, plugins);
}

Status ApplyEnvironment(const std::map<std::string, std::string>& environment, Config& config,
                        Sources* sources) {
  try {
    std::vector<Assignment> assignments;
    for (const auto& [name, text] : environment) {
      if (!name.starts_with(kPrefix)) continue;
      if (std::find(std::begin(kProcessVariables), std::end(kProcessVariables), name) !=
          std::end(kProcessVariables)) {
        continue;
      }
      auto assignment = AssignmentOfVariable(name, text);
      if (!assignment.ok()) return assignment.status();
      assignments.push_back(std::move(*assignment));
    }
    return Apply(assignments, config, sources);
  } catch (const std::exception& error) {
    return InvalidArgument(fmt::format("environment: {}", error.what()));
  }
}

Status ApplyAssignments(const std::vector<std::string>& assignments, Config& config,
                        Sources* sources) {
  try {
    std::vector<Assignment> parsed;
    for (const std::string& text : assignments) {
      auto assignment = AssignmentOfText(text);
      if (!assignment.ok()) return assignment.status();
      parsed.push_back(std::move(*assignment));
    }
    return Apply(parsed, config, sources);
  } catch (const std::exception& error) {
    return InvalidArgument(fmt::format("command line: {}", error.what()));
  }
}

Status ApplyAssignment(const std::string& assignment, Config& config) {
  return ApplyAssignments({assignment}, config);
}

Status SetKey(const std::string& path, const std::string& text, const std::string& source,
              Config& config, Sources* sources) {
  try {
    Assignment assignment;
    assignment.key = FindKey(path);
    assert(assignment.key != nullptr);
    assignment.where = source;
    assignment.source = source;
    auto node = NodeOfText(assignment.key, text, source);
    if (!node.ok()) return node.status();
    assignment.value.reset(*node);
    return Apply({assignment}, config, sources);
  } catch (const std::exception& error) {
    return InvalidArgument(fmt::format("{}: {}", source, error.what()));
  }
}

std::map<std::string, std::string> ProcessEnvironment() {
  std::map<std::string, std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

std::map<std::string, std::string> GradwireEnvironment() {
  auto found = ProcessEnvironment();
  std::erase_if(found, [](const auto& entry) { return !entry.first.starts_with(kPrefix); });
  return found;
}

std::map<std::string, std::string> SharedConfig(const Config& config) {
  std::map<std::string, std::string> shared;
  for (const Key& key : Keys()) {
    if (key.is_shared) shared.emplace(key.path, key.print(config));
  }
  shared.emplace(kPluginsKey, DescribePluginCompressors(config.compressors()));
  return shared;
}

std::vector<std::pair<std::string, std::string>> DescribeConfig(const Config& config) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Key& key : Keys()) all.emplace_back(key.path, key.print(config));
  return all;
}

std::vector<DescribedValue> DescribeSources(const Config& config, const Sources& sources) {
  const auto source_of = [&](const std::string& path) {
    const auto found = sources.find(path);
    return found == sources.end() ? std::string("default") : found->second;
  };
  std::vector<DescribedValue> all;
  Config copy = config;
  for (const Key& key : Keys()) {
    all.push_back({key.path, key.print(config), source_of(key.path)});
    for (const std::string_view section : kLinkSections) {
      if (key.path != fmt::format("{}.compressor", section)) continue;
      const CompressorSpec& spec = LinkOf(copy, section).compressor;
      all.back().value = spec.name;
      const CompressorInfo* info = config.compressors().Find(spec.name);
      if (info == nullptr) continue;
      for (const ParameterInfo& parameter : info->parameters) {
        const auto given = spec.parameters.find(parameter.name);
        const std::string& value =
            given == spec.parameters.end() ? parameter.default_value : given->second;
        // Without a value and a default it is left out: there is nothing to show.
        if (value.empty()) continue;
        const std::string path = fmt::format("{}.{}", section, parameter.name);
        all.push_back({path, value, source_of(path)});
      }
    }
  }
  return all;
}

}  // namespace gradwire
