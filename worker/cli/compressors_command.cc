#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/escape.h"
#include "common/base/random.h"
#include "common/config/process.h"
#include "compressors/plugin/plugins.h"
#include "compressors/registry.h"
#include "worker/cli/commands.h"
#include "worker/cli/text_table.h"

namespace gradwire {
namespace {

struct Arguments {
  std::string spec;
  std::vector<std::string> plugins;
  bool is_json = false;
};

/// What is shown of one compressor, with its parameters bound.
struct Entry {
  CompressorSpec spec;
  const CompressorInfo* info = nullptr;
  CompressorTraits traits;
  double bytes_per_element = 0;  // of 1 Mi elements; of N(0, 1) where the size is not fixed
};

Result<Entry> Describe(const CompressorRegistry& registry, const CompressorSpec& spec) {
  constexpr std::size_t kElements = std::size_t{1} << 20;
  const auto codec = registry.Create(spec);
  if (!codec.ok()) return codec.status();
  Entry entry{spec, registry.Find(spec.name), (*codec)->traits(), 0};
  std::size_t bytes = (*codec)->MaxEncodedSize(kElements);
  if (!entry.traits.fixed_size) {
    CounterRng rng(1);
    std::vector<float> values(kElements);
    for (float& value : values) value = static_cast<float>(rng.NextGaussian());
    std::vector<std::byte> payload(bytes);
    const auto encoded = EncodeSpan(**codec, values, {}, payload);
    if (!encoded.ok()) return encoded.status();
    bytes = encoded->payload_bytes;
  }
  entry.bytes_per_element = static_cast<double>(bytes) / static_cast<double>(kElements);
  return entry;
}

std::string ClassText(const CompressorTraits& traits) {
  std::string text(traits.compressor_class == CompressorClass::kNoClaim
                       ? "no claim"
                       : CompressorClassName(traits.compressor_class));
  if (traits.summable) text += ", summable";
  return text;
}

/// "scaling l1|l2 (l1)", "block 0..4096 (0)"; without a default the parameter may be left out.
std::string ParameterText(const ParameterInfo& info) {
  std::string range;
  switch (info.kind) {
    case ParameterInfo::Kind::kNumber:
      range = fmt::format("{}..{}", info.min, info.max);
      break;
    case ParameterInfo::Kind::kInteger:
      range = fmt::format("{:.0f}..{:.0f}", info.min, info.max);
      break;
    case ParameterInfo::Kind::kBool:
      range = "true|false";
      break;
    case ParameterInfo::Kind::kChoice:
      range = fmt::format("{}", fmt::join(info.choices, "|"));
      break;
  }
  if (!info.default_value.empty()) range += " (" + info.default_value + ")";
  return info.name + ' ' + range;
}

void PrintTable(const std::vector<Entry>& entries) {
  using enum TextTable::Align;
  TextTable table({kLeft, kRight, kLeft, kLeft, kLeft, kLeft});
  table.Add({"name", "bytes", "class", "state", "parameters (default)", "source"});
  for (const Entry& entry : entries) {
    const auto& parameters = entry.info->parameters;
    table.Add({entry.info->name, fmt::format("{:.4f}", entry.bytes_per_element),
               ClassText(entry.traits), entry.traits.feedback_by_default ? "residual" : "none",
               parameters.empty() ? "" : ParameterText(parameters.front()), entry.info->source});
    for (std::size_t i = 1; i < parameters.size(); ++i) {
      table.Add({"", "", "", "", ParameterText(parameters[i])});
    }
  }
  fmt::print(
      "{}\nbytes: an element of 1 Mi, with default parameters; where it depends on the values, of "
      "N(0, 1).\n",
      table.ToString());
}

void PrintDetails(const Entry& entry) {
  using enum TextTable::Align;
  TextTable table({kLeft, kLeft});
  table.Add({"compressor", ToString(entry.spec)});
  table.Add({"description", entry.info->description});
  table.Add({"source", entry.info->source.empty() ? "-" : entry.info->source});
  table.Add({"bytes", fmt::format("{:.4f} an element of 1 Mi{}", entry.bytes_per_element,
                                  entry.traits.fixed_size ? "" : ", measured on N(0, 1)")});
  table.Add({"class", ClassText(entry.traits)});
  table.Add({"state", entry.traits.feedback_by_default ? "residual (feedback: auto is ef)"
                                                       : "none (feedback: auto is off)"});
  fmt::print("{}", table.ToString());
  for (const ParameterInfo& parameter : entry.info->parameters) {
    fmt::print(
        "\n{}: {}\n  {}, {}\n", parameter.name, parameter.description, Accepts(parameter),
        parameter.default_value.empty() ? "no default" : "default " + parameter.default_value);
  }
}

std::string_view KindName(ParameterInfo::Kind kind) {
  switch (kind) {
    case ParameterInfo::Kind::kNumber:
      return "number";
    case ParameterInfo::Kind::kInteger:
      return "integer";
    case ParameterInfo::Kind::kBool:
      return "bool";
    case ParameterInfo::Kind::kChoice:
      break;
  }
  return "choice";
}

std::string ToJson(const ParameterInfo& info) {
  std::string text = fmt::format(
      R"({{"name": {}, "kind": "{}", "default": {}, "description": {})", QuoteJson(info.name),
      KindName(info.kind), info.default_value.empty() ? "null" : QuoteJson(info.default_value),
      QuoteJson(info.description));
  if (info.kind == ParameterInfo::Kind::kNumber || info.kind == ParameterInfo::Kind::kInteger) {
    text += fmt::format(R"(, "min": {}, "max": {})", info.min, info.max);
  }
  if (info.kind == ParameterInfo::Kind::kChoice) {
    std::vector<std::string> choices;
    for (const std::string& choice : info.choices) choices.push_back(QuoteJson(choice));
    text += fmt::format(R"(, "choices": [{}])", fmt::join(choices, ", "));
  }
  return text + '}';
}

std::string ToJson(const Entry& entry) {
  std::vector<std::string> parameters;
  for (const ParameterInfo& parameter : entry.info->parameters) {
    parameters.push_back("\n     " + ToJson(parameter));
  }
  return fmt::format(
      R"(  {{"name": {}, "spec": {}, "wire_id": {}, "description": {}, "source": {},
   "bytes_per_element": {:.6g}, "fixed_size": {}, "class": "{}", "summable": {}, "block_access": {},
   "feedback_by_default": {},
   "parameters": [{}]}})",
      QuoteJson(entry.info->name), QuoteJson(ToString(entry.spec)), entry.info->wire_id,
      QuoteJson(entry.info->description), QuoteJson(entry.info->source), entry.bytes_per_element,
      entry.traits.fixed_size, CompressorClassName(entry.traits.compressor_class),
      entry.traits.summable, entry.traits.block_access, entry.traits.feedback_by_default,
      fmt::join(parameters, ","));
}

int Fail(const Status& status, int code) {
  fmt::print(stderr, "gradwire compressors: {}\n", Escape(status.message()));
  return code;
}

int Run(const Arguments& arguments) {
  const auto registry = LoadPlugins(arguments.plugins);
  if (!registry.ok()) return Fail(registry.status(), kExitUsage);
  std::vector<Entry> entries;
  if (arguments.spec.empty()) {
    for (const CompressorInfo& info : (*registry)->entries()) {
      auto entry = Describe(**registry, {info.name, {}});
      if (!entry.ok()) return Fail(entry.status(), kExitFailed);
      entries.push_back(std::move(entry).value());
    }
  } else {
    const auto spec = ParseCompressorSpec(arguments.spec);
    if (!spec.ok()) return Fail(spec.status(), kExitUsage);
    auto entry = Describe(**registry, *spec);
    if (!entry.ok()) return Fail(entry.status(), kExitUsage);
    entries.push_back(std::move(entry).value());
  }
  if (arguments.is_json) {
    std::vector<std::string> items;
    for (const Entry& entry : entries) items.push_back(ToJson(entry));
    fmt::print("{{\"compressors\": [\n{}\n]}}\n", fmt::join(items, ",\n"));
  } else if (arguments.spec.empty()) {
    PrintTable(entries);
  } else {
    PrintDetails(entries.front());
  }
  return kExitOk;
}

}  // namespace

void AddCompressorsCommand(CLI::App& tool, CommandAction& action) {
  CLI::App* command = tool.add_subcommand("compressors", "list the compressors, or describe one");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("NAME", arguments->spec,
                      "one of them, in detail; with parameters too, such as 'topk(ratio=0.01)'");
  command->add_option("--plugin", arguments->plugins, kPluginOptionHelp)->allow_extra_args(false);
  command->add_flag("--json", arguments->is_json, "as JSON");
  command->callback([arguments, &action] { action = [arguments] { return Run(*arguments); }; });
}

}  // namespace gradwire
