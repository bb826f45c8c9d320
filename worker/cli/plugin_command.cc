#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "common/base/escape.h"
#include "common/config/process.h"
#include "compressors/plugin/check.h"
#include "compressors/plugin/plugins.h"
#include "worker/cli/commands.h"

namespace gradwire {
namespace {

struct Arguments {
  std::string path;
  std::string golden;
  std::vector<std::string> specs;
};

std::string Escape(const std::string& text) {
  std::string escaped;
  AppendEscaped(text, false, escaped);
  return escaped;
}

void PrintCompressor(const CompressorInfo& info) {
  fmt::print("{} {}: {} ({})\n", info.name, info.version, Escape(info.description),
             Escape(info.source));
  for (const ParameterInfo& parameter : info.parameters) {
    fmt::print("  {}{}: {}\n", parameter.name,
               parameter.default_value.empty() ? "" : " = " + Escape(parameter.default_value),
               Escape(parameter.description));
  }
}

int Run(const Arguments& arguments) {
  const auto registry = LoadPlugins({arguments.path});
  if (!registry.ok()) {
    fmt::print(stderr, "gradwire plugin: {}\n", Escape(registry.status().message()));
    return kExitFailed;
  }
  std::vector<std::string> specs;
  for (const CompressorInfo& info : (*registry)->entries()) {
    if (info.plugin_path.empty()) continue;
    PrintCompressor(info);
    specs.push_back(info.name);
  }
  specs.insert(specs.end(), arguments.specs.begin(), arguments.specs.end());
  bool is_faulty = false;
  const auto report = [&](const std::string& what, const std::vector<std::string>& faults) {
    is_faulty = is_faulty || !faults.empty();
    fmt::print("checked {}: {}\n", what, faults.empty() ? "no fault found" : "FAULTY");
    for (const std::string& fault : faults) fmt::print("  {}\n", Escape(fault));
  };
  for (const std::string& spec : specs) {
    const auto codec = (*registry)->Create(spec);
    if (codec.ok()) {
      report(spec, CheckCodec(**codec));
    } else {
      report(spec, {codec.status().message()});
    }
  }
  if (!arguments.golden.empty()) {
    report("the golden files", CheckGoldenFiles(**registry, arguments.golden));
  }
  return is_faulty ? kExitFailed : kExitOk;
}

}  // namespace

void AddPluginCommand(CLI::App& tool, CommandAction& action) {
  CLI::App* command = tool.add_subcommand(
      "plugin", "load a plug-in, print its compressors and check that they keep the rules");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("library", arguments->path, "the shared library, as `plugins:` names it")
      ->required();
  command->add_option("--golden", arguments->golden, "folder of golden files to compare with");
  command
      ->add_option("--check", arguments->specs,
                   "also check a compressor with parameters such as 'mine(bits=4)'; repeatable")
      ->allow_extra_args(false);
  command->callback([arguments, &action] { action = [arguments] { return Run(*arguments); }; });
}

}  // namespace gradwire
