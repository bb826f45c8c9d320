#include "common/config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "common/config/text.h"
#include "compressors/methods/method.h"
#include "compressors/plugin/plugins.h"
#include "compressors/registry.h"

namespace gradwire {
namespace {

constexpr std::size_t kMaxRules = 256;
constexpr std::size_t kMaxPatternBytes = 128;

std::string Show(const YAML::Node& value) {
  switch (value.Type()) {
    case YAML::NodeType::Scalar:
      return fmt::format("'{}'", value.Scalar());
    case YAML::NodeType::Sequence:
      return "a list";
    case YAML::NodeType::Map:
      return "a map";
    case YAML::NodeType::Null:
    case YAML::NodeType::Undefined:
      break;
  }
  return "empty";
}

Status Wrong(const YAML::Node& value, std::string_view expected) {
  return InvalidArgument(fmt::format("is {}, expected {}", Show(value), expected));
}

// ---- Kinds of keys. `field` maps a Config& to the member, const or not. -------------------------

/// A key whose value is one scalar: parse(text, Field&) says whether the text is one.
template <typename Access, typename Parse, typename Print>
Key ScalarKey(std::string path, bool is_shared, std::string expected, Access field, Parse parse,
              Print print) {
  Key key;
  key.path = std::move(path);
  key.expected = expected;
  key.is_shared = is_shared;
  key.set = [field, parse, expected](const YAML::Node& value, Config& config) {
    if (!value.IsScalar() || !parse(value.Scalar(), field(config))) return Wrong(value, expected);
    return Status::Ok();
  };
  key.print = [field, print](const Config& config) { return std::string(print(field(config))); };
  return key;
}

bool ParseInteger(const std::string& text, std::uint64_t min, std::uint64_t max,
                  std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= min && value <= max;
}

template <typename Access>
Key IntegerKey(std::string path, bool is_shared, std::uint64_t min, std::uint64_t max,
               Access field) {
  return ScalarKey(
      std::move(path), is_shared, fmt::format("a whole number from {} to {}", min, max), field,
      [min, max](const std::string& text, auto& member) {
        std::uint64_t value = 0;
        if (!ParseInteger(text, min, max, value)) return false;
        member = static_cast<std::remove_reference_t<decltype(member)>>(value);
        return true;
      },
      [](const auto& member) { return std::to_string(member); });
}

/// A number of threads, or `auto`.
template <typename Access>
Key ThreadsKey(std::string path, Access field) {
  constexpr std::uint64_t kMaxThreads = 1024;
  return ScalarKey(
      std::move(path), false, fmt::format("auto or a whole number from 0 to {}", kMaxThreads),
      field,
      [](const std::string& text, std::optional<std::uint32_t>& member) {
        std::uint64_t value = 0;
        if (text == "auto") {
          member.reset();
          return true;
        }
        if (!ParseInteger(text, 0, kMaxThreads, value)) return false;
        member = static_cast<std::uint32_t>(value);
        return true;
      },
      [](const std::optional<std::uint32_t>& member) {
        return member ? std::to_string(*member) : "auto";
      });
}

/// Bytes. With `has_auto`, 0 is written `auto`.
template <typename Access>
Key SizeKey(std::string path, bool is_shared, std::uint64_t min, std::uint64_t max, bool has_auto,
            Access field) {
  return ScalarKey(
      std::move(path), is_shared,
      fmt::format("{}a size from {} to {} (bytes, or with KB, MB, GB, KiB, MiB, GiB)",
                  has_auto ? "auto or " : "", FormatSize(min), FormatSize(max)),
      field,
      [min, max, has_auto](const std::string& text, std::uint64_t& member) {
        if (has_auto && text == "auto") {
          member = 0;
          return true;
        }
        const auto size = ParseSize(text);
        if (!size.ok() || *size < min || *size > max) return false;
        member = *size;
        return true;
      },
      [has_auto](std::uint64_t member) {
        return has_auto && member == 0 ? "auto" : FormatSize(member);
      });
}

template <typename Access>
Key DurationKey(std::string path, Access field) {
  constexpr int kMaxMs = 7 * 24 * 3600 * 1000;
  return ScalarKey(
      std::move(path), false, "a time from 1ms to 168h (with ms, s, m or h)", field,
      [](const std::string& text, int& member) {
        const auto time = ParseDuration(text);
        if (!time.ok() || *time < 1 || *time > kMaxMs) return false;
        member = *time;
        return true;
      },
      [](int member) { return FormatDuration(member); });
}

template <typename Access>
Key BoolKey(std::string path, Access field) {
  return ScalarKey(
      std::move(path), false, "true or false", field,
      [](const std::string& text, bool& member) {
        member = text == "true";
        return text == "true" || text == "false";
      },
      [](bool member) { return member ? "true" : "false"; });
}

/// Text that a predicate accepts.
template <typename Access>
Key TextKey(std::string path, bool is_shared, std::string expected,
            bool (*is_valid)(const std::string&), Access field) {
  return ScalarKey(
      std::move(path), is_shared, std::move(expected), field,
      [is_valid](const std::string& text, std::string& member) {
        if (!is_valid(text)) return false;
        member = text;
        return true;
      },
      [](const std::string& member) { return member; });
}

/// A key whose feature does not exist yet: it takes the value that means so and no other.
Key FutureKey(std::string path, std::string off, std::string feature) {
  Key key;
  key.path = std::move(path);
  key.expected = off.empty() ? "''" : off;
  key.is_collection = off == "[]" || off == "{}";
  key.set = [off, feature, expected = key.expected, is_collection = key.is_collection](
                const YAML::Node& value, Config&) {
    const bool is_off = is_collection ? value.IsNull() || (!value.IsScalar() && value.size() == 0)
                                      : value.IsScalar() && value.Scalar() == off;
    if (is_off) return Status::Ok();
    return InvalidArgument(fmt::format("is {}, but {} not available yet; the only value is {}",
                                       Show(value), feature, expected));
  };
  key.print = [off](const Config&) { return off; };
  return key;
}

// ---- Text ---------------------------------------------------------------------------------------

bool IsJobId(const std::string& text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

bool IsHost(const std::string& text) {
  return !text.empty() && text.size() <= 255 && std::all_of(text.begin(), text.end(), [](char c) {
    return c > ' ' && c < 0x7f && c != '/' && c != '\'' && c != '"';
  });
}

bool IsInterface(const std::string& text) {
  constexpr std::size_t kMaxNameBytes = 15;  // IFNAMSIZ without its zero
  return text.empty() ||
         (text.size() <= kMaxNameBytes && text.find('/') == std::string::npos && IsHost(text));
}

bool ParsePortRange(const std::string& text, PortRange& range) {
  if (text.empty()) {
    range = {};
    return true;
  }
  const std::size_t dash = text.find('-');
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  if (dash == std::string::npos || !ParseInteger(text.substr(0, dash), 1, 65535, first) ||
      !ParseInteger(text.substr(dash + 1), first, 65535, last)) {
    return false;
  }
  range = {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(last)};
  return true;
}

std::string FormatPortRange(const PortRange& range) {
  return range.empty() ? "" : fmt::format("{}-{}", range.first, range.last);
}

bool IsEndpoint(const std::string& text) {
  constexpr std::string_view kScheme = "tcp://";
  if (!text.starts_with(kScheme)) return false;
  const std::size_t colon = text.rfind(':');
  std::uint64_t port = 0;
  return colon > kScheme.size() && ParseInteger(text.substr(colon + 1), 0, 65535, port) &&
         IsHost(text.substr(kScheme.size(), colon - kScheme.size()));
}

bool IsPath(const std::string& text) {
  return text.size() <= 4096 && text.find('\0') == std::string::npos;
}

/// In double quotes as YAML reads them back.
std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

// ---- Log ----------------------------------------------------------------------------------------

constexpr const char* kLogLevels[] = {"trace", "debug", "info", "warn", "error", "off"};

std::string FormatLogLevel(LogLevel level) {
  for (const char* name : kLogLevels) {
    const auto parsed = ParseLogLevel(name);
    if (parsed.ok() && *parsed == level) return name;
  }
  return "invalid";
}

// ---- Compression --------------------------------------------------------------------------------

struct FeedbackName {
  const char* name;
  FeedbackMode mode;
};
constexpr FeedbackName kFeedbackNames[] = {{"auto", FeedbackMode::kAuto},
                                           {"off", FeedbackMode::kOff},
                                           {"ef", FeedbackMode::kEf},
                                           {"ef_lr", FeedbackMode::kEfLr}};
constexpr const char* kFeedbackExpected = "auto, off, ef or ef_lr";

bool ParseFeedback(const std::string& text, FeedbackMode& mode) {
  for (const FeedbackName& entry : kFeedbackNames) {
    if (text == entry.name) {
      mode = entry.mode;
      return true;
    }
  }
  return false;
}

std::string FormatFeedback(FeedbackMode mode) {
  for (const FeedbackName& entry : kFeedbackNames) {
    if (mode == entry.mode) return entry.name;
  }
  return "invalid";
}

constexpr const char* kCompressorExpected = "a compressor such as onebit or topk(ratio=0.01)";

Status SetCompressor(const YAML::Node& value, LinkCompression& link) {
  if (!value.IsScalar()) return Wrong(value, kCompressorExpected);
  auto spec = ParseCompressorSpec(value.Scalar());
  if (!spec.ok()) {
    return InvalidArgument(fmt::format("is {}: {}", Show(value), spec.status().message()));
  }
  link.compressor = std::move(*spec);
  return Status::Ok();
}

template <typename Access>
Key CompressorKey(std::string path, Access field) {
  Key key;
  key.path = std::move(path);
  key.expected = kCompressorExpected;
  key.is_shared = true;
  key.set = [field](const YAML::Node& value, Config& config) {
    return SetCompressor(value, field(config));
  };
  key.print = [field](const Config& config) { return ToString(field(config).compressor); };
  return key;
}

template <typename Access>
Key FeedbackKey(std::string path, Access field) {
  return ScalarKey(std::move(path), true, kFeedbackExpected, field, ParseFeedback, FormatFeedback);
}

/// One of a few words.
template <typename Enum>
struct Choice {
  const char* name;
  Enum value;
};

template <typename Enum, std::size_t kCount, typename Access>
Key ChoiceKey(std::string path, const Choice<Enum> (&choices)[kCount], Access field) {
  std::string expected;
  for (std::size_t i = 0; i < kCount; ++i) {
    expected += fmt::format("{}{}", i == 0 ? "" : i + 1 == kCount ? " or " : ", ", choices[i].name);
  }
  return ScalarKey(
      std::move(path), true, expected, field,
      [&choices](const std::string& text, Enum& member) {
        for (const auto& choice : choices) {
          if (text != choice.name) continue;
          member = choice.value;
          return true;
        }
        return false;
      },
      [&choices](Enum member) {
        for (const auto& choice : choices) {
          if (member == choice.value) return choice.name;
        }
        return "invalid";
      });
}

constexpr Choice<FilterType> kFilterTypes[] = {{"none", FilterType::kNone},
                                               {"covap", FilterType::kCovap}};
constexpr Choice<FilterAssign> kFilterAssigns[] = {{"balanced", FilterAssign::kBalanced},
                                                   {"index", FilterAssign::kIndex}};
constexpr Choice<FilterInactive> kFilterInactives[] = {{"zero_fill", FilterInactive::kZeroFill},
                                                       {"skip", FilterInactive::kSkip}};

bool ParseShare(const std::string& text, double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= 1;
}

/// A value with a predicate, or `auto`, which is none.
template <typename Value, typename Access, typename Parse>
Key AutoKey(std::string path, const std::string& expected, Access field, Parse parse) {
  return ScalarKey(
      std::move(path), true, "auto or " + expected, field,
      [parse](const std::string& text, std::optional<Value>& member) {
        Value value{};
        const bool is_auto = text == "auto";
        if (!is_auto && !parse(text, value)) return false;
        member = is_auto ? std::nullopt : std::optional(value);
        return true;
      },
      [](const std::optional<Value>& member) {
        return member ? fmt::format("{}", *member) : std::string("auto");
      });
}

void AddFilterKeys(std::vector<Key>& keys) {
  const auto filter = [](auto& config) -> auto& { return config.compression.filter; };
  keys.push_back(ChoiceKey(
      "compression.filter.type",
      kFilterTypes, [filter](auto& config) -> auto& { return filter(config).type; }));
  keys.push_back(ScalarKey(
      "compression.filter.interval", true,
      fmt::format("auto or a whole number from 1 to {}", kMaxFilterInterval),
      [filter](auto& config) -> auto& { return filter(config).interval; },
      [](const std::string& text, std::uint32_t& member) {
        std::uint64_t value = 0;
        if (text != "auto" && !ParseInteger(text, 1, kMaxFilterInterval, value)) return false;
        member = static_cast<std::uint32_t>(value);
        return true;
      },
      [](std::uint32_t member) { return member == 0 ? "auto" : std::to_string(member); }));
  keys.push_back(ChoiceKey(
      "compression.filter.assign",
      kFilterAssigns, [filter](auto& config) -> auto& { return filter(config).assign; }));
  keys.push_back(ChoiceKey(
      "compression.filter.inactive",
      kFilterInactives, [filter](auto& config) -> auto& { return filter(config).inactive; }));
  keys.push_back(AutoKey<double>(
      "compression.filter.c0",
      "a number from 0 to 1", [filter](auto& config) -> auto& { return filter(config).c0; },
      ParseShare));
  keys.push_back(ScalarKey(
      "compression.filter.step", true,
      "a number from 0 to 1", [filter](auto& config) -> auto& { return filter(config).step; },
      ParseShare, [](double member) { return fmt::format("{}", member); }));
  constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 40;
  keys.push_back(AutoKey<std::uint64_t>(
      "compression.filter.every", fmt::format("a whole number from 1 to {}", kMostSteps),
      [filter](auto& config) -> auto& { return filter(config).every; },
      [](const std::string& text, std::uint64_t& value) {
        return ParseInteger(text, 1, kMostSteps, value);
      }));
}

// A rule's faults say where they are: "has a fault in rule 2, whose uplink has no compressor".

Status InRule(std::size_t index, std::string_view part, const Status& status) {
  return InvalidArgument(
      fmt::format("has a fault in rule {}, {} {}", index + 1, part, status.message()));
}

/// The keys of a rule or of a direction in it: each a scalar and there once.
Status CheckRuleKeys(const YAML::Node& map) {
  std::set<std::string> seen;
  for (const auto& entry : map) {
    if (!entry.first.IsScalar()) return InvalidArgument("has a key that is not text");
    if (!seen.insert(entry.first.Scalar()).second) {
      return InvalidArgument(fmt::format("has the key '{}' twice", entry.first.Scalar()));
    }
  }
  return Status::Ok();
}

/// compressor, feedback and parameters out of a map; `skip` holds keys that mean something else.
Status ParseRuleLink(const CompressorRegistry& registry, const YAML::Node& map,
                     const std::set<std::string>& skip, LinkCompression& link) {
  const YAML::Node compressor = map["compressor"];
  if (!compressor) return InvalidArgument("has no key 'compressor'");
  GRADWIRE_RETURN_IF_ERROR(SetCompressor(compressor, link));
  for (const auto& entry : map) {
    const std::string& name = entry.first.Scalar();
    if (name == "compressor" || skip.contains(name)) continue;
    if (name != "feedback") {
      const Status status = SetParameter(registry, name, entry.second, link);
      if (!status.ok()) {
        return InvalidArgument(fmt::format("has '{}', which {}", name, status.message()));
      }
    } else if (!entry.second.IsScalar() || !ParseFeedback(entry.second.Scalar(), link.feedback)) {
      return InvalidArgument(
          fmt::format("has feedback {}, expected {}", Show(entry.second), kFeedbackExpected));
    }
  }
  return CheckCompressor(registry, link);
}

constexpr const char* kRulesExpected =
    "a list of rules such as {match: \"*.bias\", compressor: none}";

Status ParseRule(const CompressorRegistry& registry, std::size_t index, const YAML::Node& node,
                 TensorRule& rule) {
  if (!node.IsMap()) {
    return InRule(index, "which",
                  InvalidArgument(fmt::format("is {}, expected a map", Show(node))));
  }
  if (const Status status = CheckRuleKeys(node); !status.ok()) {
    return InRule(index, "which", status);
  }
  const YAML::Node match = node["match"];
  const bool is_pattern = match && match.IsScalar() && !match.Scalar().empty() &&
                          match.Scalar().size() <= kMaxPatternBytes &&
                          std::all_of(match.Scalar().begin(), match.Scalar().end(), [](char c) {
                            return static_cast<unsigned char>(c) >= ' ' && c != 0x7f;
                          });
  if (!is_pattern) {
    return InRule(index, "whose match",
                  InvalidArgument(fmt::format("is {}, expected a pattern of 1 to {} characters",
                                              match ? Show(match) : "missing", kMaxPatternBytes)));
  }
  rule.match = match.Scalar();

  const YAML::Node filter = node["filter"];
  if (filter) {
    if (!filter.IsScalar() || filter.Scalar() != "none") {
      return InRule(index, "whose filter",
                    InvalidArgument(fmt::format("is {}, expected none", Show(filter))));
    }
    rule.is_filtered = false;
  }

  const YAML::Node uplink = node["uplink"];
  const YAML::Node downlink = node["downlink"];
  if (filter && node.size() == 2) return Status::Ok();  // compressed as everything else
  if (!uplink && !downlink) {
    LinkCompression both;
    if (const Status status = ParseRuleLink(registry, node, {"match", "filter"}, both);
        !status.ok()) {
      return InRule(index, "which", status);
    }
    rule.uplink = both;
    rule.downlink = both;
    return Status::Ok();
  }
  for (const auto& entry : node) {
    const std::string& name = entry.first.Scalar();
    if (name == "match" || name == "filter" || name == "uplink" || name == "downlink") continue;
    return InRule(index, "which",
                  InvalidArgument(fmt::format(
                      "has '{}' beside uplink or downlink, expected it "
                      "inside of them{}",
                      name, Suggestion(name, {"match", "filter", "uplink", "downlink"}))));
  }
  for (const auto& [part, link_node, target] : {std::tuple{"uplink", uplink, &rule.uplink},
                                                std::tuple{"downlink", downlink, &rule.downlink}}) {
    if (!link_node) continue;
    Status status = Status::Ok();
    if (!link_node.IsMap()) {
      status = InvalidArgument(fmt::format("is {}, expected a map", Show(link_node)));
    }
    if (status.ok()) status = CheckRuleKeys(link_node);
    LinkCompression link;
    if (status.ok()) status = ParseRuleLink(registry, link_node, {}, link);
    if (!status.ok()) return InRule(index, fmt::format("whose {}", part), status);
    *target = link;
  }
  return Status::Ok();
}

Status SetRules(const YAML::Node& value, Config& config) {
  if (!value.IsSequence() && !value.IsNull()) return Wrong(value, kRulesExpected);
  if (value.size() > kMaxRules) {
    return InvalidArgument(
        fmt::format("has {} rules, at most {} are possible", value.size(), kMaxRules));
  }
  std::vector<TensorRule> rules(value.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    GRADWIRE_RETURN_IF_ERROR(ParseRule(config.compressors(), i, value[i], rules[i]));
  }
  config.compression.rules = std::move(rules);
  return Status::Ok();
}

std::string FormatRules(const Config& config) {
  std::string text = "[";
  for (const TensorRule& rule : config.compression.rules) {
    if (text.size() > 1) text += ", ";
    text += "{match: " + Quote(rule.match);
    for (const auto& [name, link] :
         {std::pair{"uplink", &rule.uplink}, std::pair{"downlink", &rule.downlink}}) {
      if (!*link) continue;
      text += fmt::format(", {}: {{compressor: {}, feedback: {}}}", name,
                          Quote(ToString((*link)->compressor)), FormatFeedback((*link)->feedback));
    }
    if (!rule.is_filtered) text += ", filter: none";
    text += "}";
  }
  return text + "]";
}

// ---- Method -------------------------------------------------------------------------------------

constexpr const char* kMethodExpected = "none or a method such as clan or lans(beta1=0.95)";

Status SetMethod(const YAML::Node& value, Config& config) {
  if (!value.IsScalar()) return Wrong(value, kMethodExpected);
  auto spec = ParseMethodSpec(value.Scalar());
  const Status status = spec.ok() ? CheckMethodSpec(*spec) : spec.status();
  if (!status.ok()) {
    return InvalidArgument(fmt::format("is {}: {}", Show(value), status.message()));
  }
  config.method = std::move(*spec);
  return Status::Ok();
}

// ---- Plug-ins ----------------------------------------------------------------------------------

constexpr std::size_t kMaxPlugins = 64;
constexpr const char* kPluginsExpected = "a list of shared libraries such as [./libmine.so]";

Status SetPlugins(const YAML::Node& value, Config& config) {
  Plugins plugins;
  if (!value.IsNull() && !value.IsSequence()) return Wrong(value, kPluginsExpected);
  if (value.size() > kMaxPlugins) {
    return InvalidArgument(
        fmt::format("has {} libraries, at most {} are possible", value.size(), kMaxPlugins));
  }
  for (const YAML::Node& item : value) {
    if (!item.IsScalar() || item.Scalar().empty() || !IsPath(item.Scalar())) {
      return InvalidArgument(
          fmt::format("has the item {}, expected the path of a shared library", Show(item)));
    }
    plugins.paths.push_back(item.Scalar());
  }
  if (!plugins.paths.empty()) {
    auto registry = LoadPlugins(plugins.paths);
    if (!registry.ok()) {
      return InvalidArgument(fmt::format("has a fault: {}", registry.status().message()));
    }
    plugins.registry = std::move(registry).value();
  }
  config.plugins = std::move(plugins);
  return Status::Ok();
}

std::string FormatPlugins(const Config& config) {
  std::vector<std::string> quoted;
  for (const std::string& path : config.plugins.paths) quoted.push_back(Quote(path));
  return fmt::format("[{}]", fmt::join(quoted, ", "));
}

// ---- The table ----------------------------------------------------------------------------------

// The member of a Config, const or not, as the kinds above want it.
#define GRADWIRE_FIELD(member) \
  [](auto& config) -> auto& { return config.member; }

std::vector<Key> MakeKeys() {
  constexpr std::uint64_t kKiB = 1024;
  constexpr std::uint64_t kGiB = kKiB * kKiB * kKiB;
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  std::vector<Key> keys;
  const auto add = [&](Key key) { keys.push_back(std::move(key)); };

  add(TextKey("job.id", true, "1 to 64 letters, digits, '.', '_' or '-'", IsJobId,
              GRADWIRE_FIELD(job.id)));
  add(IntegerKey("job.workers", true, 1, 4096, GRADWIRE_FIELD(job.workers)));
  add(IntegerKey("job.servers", true, 1, 4096, GRADWIRE_FIELD(job.servers)));
  add(IntegerKey("job.seed", true, 0, kMax, GRADWIRE_FIELD(job.seed)));

  add(TextKey("endpoint", false, "tcp://HOST:PORT with a port from 0 to 65535", IsEndpoint,
              GRADWIRE_FIELD(endpoint)));

  add(TextKey("server.bind", false, "an address to listen on", IsHost,
              GRADWIRE_FIELD(server.bind)));
  add(TextKey("server.advertise", false, "auto or a host name or address", IsHost,
              GRADWIRE_FIELD(server.advertise)));
  add(TextKey("server.interface", false, "the name of a network interface, or ''", IsInterface,
              GRADWIRE_FIELD(server.interface)));
  add(ScalarKey("server.port_range", false, "FIRST-LAST such as 20000-20100, or ''",
                GRADWIRE_FIELD(server.port_range), ParsePortRange, FormatPortRange));
  add(IntegerKey("server.lanes", true, 1, 64, GRADWIRE_FIELD(server.lanes)));
  add(ThreadsKey("server.threads", GRADWIRE_FIELD(server.threads)));
  add(FutureKey("server.colocated", "true", "placing servers apart from workers by this key is"));

  add(ThreadsKey("worker.threads", GRADWIRE_FIELD(worker.threads)));

  add(SizeKey("partition.bytes", true, 16 * kKiB, kGiB, true, GRADWIRE_FIELD(partition.bytes)));
  add(SizeKey("partition.fuse_below", true, 0, kGiB, false, GRADWIRE_FIELD(partition.fuse_below)));
  add(SizeKey("partition.credit", false, 64 * kKiB, 16 * kGiB, false,
              GRADWIRE_FIELD(partition.credit)));

  add(CompressorKey("compression.uplink.compressor", GRADWIRE_FIELD(compression.uplink)));
  add(FeedbackKey("compression.uplink.feedback", GRADWIRE_FIELD(compression.uplink.feedback)));
  add(CompressorKey("compression.downlink.compressor", GRADWIRE_FIELD(compression.downlink)));
  add(FeedbackKey("compression.downlink.feedback", GRADWIRE_FIELD(compression.downlink.feedback)));
  add(SizeKey("compression.min_bytes", true, 0, kGiB, false,
              GRADWIRE_FIELD(compression.min_bytes)));
  add(IntegerKey("compression.warmup_steps", true, 0, std::uint64_t{1} << 40,
                 GRADWIRE_FIELD(compression.warmup_steps)));
  AddFilterKeys(keys);
  Key rules;
  rules.path = "compression.rules";
  rules.expected = kRulesExpected;
  rules.is_shared = true;
  rules.is_collection = true;
  rules.set = SetRules;
  rules.print = FormatRules;
  add(rules);

  Key method;
  method.path = "method";
  method.expected = kMethodExpected;
  method.is_shared = true;
  method.set = SetMethod;
  method.print = [](const Config& config) { return ToString(config.method); };
  add(method);
  Key plugins;
  plugins.path = kPluginsKey;
  plugins.expected = kPluginsExpected;
  plugins.is_collection = true;
  plugins.set = SetPlugins;
  plugins.print = FormatPlugins;
  add(plugins);

  add(DurationKey("timeouts.start", GRADWIRE_FIELD(timeouts.start_ms)));
  add(DurationKey("timeouts.stall_warn", GRADWIRE_FIELD(timeouts.stall_warn_ms)));
  add(DurationKey("timeouts.stall_stop", GRADWIRE_FIELD(timeouts.stall_stop_ms)));
  add(ScalarKey(
      "timeouts.heartbeat", false, "auto or a time from 1ms to 1h (with ms, s, m or h)",
      GRADWIRE_FIELD(timeouts.heartbeat_ms),
      [](const std::string& text, int& member) {
        const auto time = text == "auto" ? Result<int>(0) : ParseDuration(text);
        if (!time.ok() || (*time < 1 && text != "auto") || *time > 3600 * 1000) return false;
        member = *time;
        return true;
      },
      [](int member) { return member == 0 ? "auto" : FormatDuration(member); }));
  add(DurationKey("timeouts.dead_after", GRADWIRE_FIELD(timeouts.dead_after_ms)));

  add(ScalarKey(
      "log.level", false, fmt::format("one of {}", fmt::join(kLogLevels, ", ")),
      GRADWIRE_FIELD(log.level),
      [](const std::string& text, LogLevel& level) {
        const auto parsed = ParseLogLevel(text);
        if (parsed.ok()) level = *parsed;
        return parsed.ok();
      },
      FormatLogLevel));
  add(ScalarKey(
      "log.format", false, "text or json", GRADWIRE_FIELD(log.format),
      [](const std::string& text, LogFormat& format) {
        format = text == "json" ? LogFormat::kJson : LogFormat::kText;
        return text == "json" || text == "text";
      },
      [](LogFormat format) { return format == LogFormat::kJson ? "json" : "text"; }));

  add(FutureKey("metrics.listen", "", "metrics are"));
  add(FutureKey("trace.dir", "", "traces are"));
  add(FutureKey("trace.start_step", "10", "traces are"));
  add(FutureKey("trace.end_step", "20", "traces are"));

  add(BoolKey("security.insecure", GRADWIRE_FIELD(security.insecure)));
  add(FutureKey("security.curve", "{}", "encryption is"));

  add(TextKey("plan", false, "the path of a saved plan, or ''", IsPath, GRADWIRE_FIELD(plan)));
  return keys;
}

#undef GRADWIRE_FIELD

}  // namespace

const std::vector<Key>& Keys() {
  static const std::vector<Key> keys = MakeKeys();
  return keys;
}

LinkCompression& LinkOf(Config& config, std::string_view section) {
  return section == kLinkSections[0] ? config.compression.uplink : config.compression.downlink;
}

std::string Suggestion(const std::string& word, const std::vector<std::string>& candidates) {
  const std::string nearest = NearestName(word, candidates);
  return nearest.empty() ? "" : fmt::format(", did you mean '{}'?", nearest);
}

Status SetParameter(const CompressorRegistry& registry, const std::string& name,
                    const YAML::Node& value, LinkCompression& link) {
  CompressorSpec& spec = link.compressor;
  const CompressorInfo* info = registry.Find(spec.name);
  if (info == nullptr) return CheckCompressor(registry, link);
  std::vector<std::string> names = {"compressor", "feedback"};
  bool is_known = false;
  for (const ParameterInfo& parameter : info->parameters) {
    names.push_back(parameter.name);
    is_known = is_known || parameter.name == name;
  }
  if (!is_known) {
    return InvalidArgument(
        fmt::format("is no parameter of {}{}", spec.name, Suggestion(name, names)));
  }
  if (!value.IsScalar()) {
    return Wrong(value, fmt::format("one value for the {} of {}", name, spec.name));
  }
  spec.parameters[name] = value.Scalar();
  return Status::Ok();
}

Status CheckCompressor(const CompressorRegistry& registry, const LinkCompression& link) {
  const auto made = registry.Create(link.compressor);
  if (made.ok()) return Status::Ok();
  return InvalidArgument(
      fmt::format("is '{}': {}", ToString(link.compressor), made.status().message()));
}

}  // namespace gradwire
