#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/escape.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "worker/cli/commands.h"

namespace gradwire {
namespace {

struct Arguments {
  ProcessOptions process;
  bool is_server = false;
  bool is_json = false;
};

/// The process's own values, after the keys.
std::vector<DescribedValue> DescribeProcess(const ProcessConfig& process) {
  const auto source_of = [&](const std::string& name) {
    const auto found = process.sources.find(name);
    return found == process.sources.end() ? std::string("default") : found->second;
  };
  const auto number = [](const std::optional<std::uint32_t>& value) {
    return value ? std::to_string(*value) : std::string("unknown");
  };
  return {{"config", process.config_path, source_of("config")},
          {"role", std::string(ProcessRoleName(process.role)), source_of("role")},
          {"rank", number(process.rank), source_of("rank")},
          {"local_rank", std::to_string(process.local_rank), source_of("local_rank")},
          {"local_size", number(process.local_size), source_of("local_size")}};
}

void PrintTable(const std::vector<DescribedValue>& rows) {
  std::size_t path_width = 0;
  std::size_t value_width = 0;
  // One long list must not push all sources out of sight.
  constexpr std::size_t kMaxValueWidth = 40;
  std::vector<DescribedValue> shown;
  for (const DescribedValue& row : rows) {
    shown.push_back({row.path, row.value.empty() ? "''" : Escape(row.value), Escape(row.source)});
    path_width = std::max(path_width, shown.back().path.size());
    if (shown.back().value.size() <= kMaxValueWidth) {
      value_width = std::max(value_width, shown.back().value.size());
    }
  }
  for (const DescribedValue& row : shown) {
    fmt::print("{:<{}}  {:<{}}  {}\n", row.path, path_width, row.value, value_width, row.source);
  }
}

void PrintText(const ProcessConfig& process) {
  PrintTable(DescribeSources(process.config, process.sources));
  fmt::print("\n");
  PrintTable(DescribeProcess(process));
  if (!process.ignored.empty()) fmt::print("\n");
  for (const IgnoredVariable& variable : process.ignored) {
    fmt::print("{} has no meaning here{}{}\n", Escape(variable.name),
               variable.note.empty() ? "" : ": ", variable.note);
  }
  if (!process.warnings.empty()) fmt::print("\n");
  for (const std::string& warning : process.warnings) {
    fmt::print("warning: {}\n", Escape(warning));
  }
}

void PrintJsonList(const char* name, const std::vector<std::string>& items, bool is_last) {
  fmt::print("  \"{}\": [{}{}{}]{}\n", name, items.empty() ? "" : "\n    ",
             fmt::join(items, ",\n    "), items.empty() ? "" : "\n  ", is_last ? "" : ",");
}

void PrintJson(const ProcessConfig& process) {
  const auto describe = [](const std::vector<DescribedValue>& rows) {
    std::vector<std::string> items;
    for (const DescribedValue& row : rows) {
      items.push_back(fmt::format(R"({{"name": "{}", "value": {}, "source": {}}})", row.path,
                                  QuoteJson(row.value), QuoteJson(row.source)));
    }
    return items;
  };
  std::vector<std::string> ignored;
  for (const IgnoredVariable& variable : process.ignored) {
    ignored.push_back(fmt::format(R"({{"name": {}, "note": {}}})", QuoteJson(variable.name),
                                  QuoteJson(variable.note)));
  }
  std::vector<std::string> warnings;
  for (const std::string& warning : process.warnings) {
    warnings.push_back(QuoteJson(warning));
  }
  fmt::print("{{\n");
  PrintJsonList("keys", describe(DescribeSources(process.config, process.sources)), false);
  PrintJsonList("process", describe(DescribeProcess(process)), false);
  PrintJsonList("ignored", ignored, false);
  PrintJsonList("warnings", warnings, true);
  fmt::print("}}\n");
}

int Run(const Arguments& arguments) {
  ProcessOptions options = arguments.process;
  if (arguments.is_server) options.role = ProcessRole::kServer;
  const auto process = LoadProcessConfig(options);
  if (!process.ok()) {
    fmt::print(stderr, "gradwire config: {}\n", Escape(process.status().message()));
    return kExitUsage;
  }
  if (process.value().is_scheduler) {
    fmt::print("{}\n", kNoScheduler);
  } else if (arguments.is_json) {
    PrintJson(*process);
  } else {
    PrintText(*process);
  }
  return kExitOk;
}

}  // namespace

void AddConfigCommand(CLI::App& tool, CommandAction& action) {
  CLI::App* command =
      tool.add_subcommand("config", "print each value of the configuration and where it came from");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--config", arguments->process.config_path,
                      "YAML file (else GRADWIRE_CONFIG)");
  command->add_option("--set", arguments->process.assignments, "key=value over all; repeatable")
      ->allow_extra_args(false);
  command->add_flag("--server", arguments->is_server,
                    "as a server sees it; else as the environment's role says, or a worker");
  command->add_flag("--json", arguments->is_json, "as JSON");
  command->callback([arguments, &action] { action = [arguments] { return Run(*arguments); }; });
}

}  // namespace gradwire
