// gradwire: the tool, one file a command.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "common/base/escape.h"
#include "common/base/version.h"
#include "common/config/process.h"
#include "worker/cli/commands.h"

std::string gradwire::Escape(std::string_view text) {
  std::string escaped;
  AppendEscaped(text, false, escaped);
  return escaped;
}

int main(int argc, char** argv) {
  using namespace gradwire;
  CLI::App tool("The tool of Gradwire, a parameter server that compresses gradients both ways.",
                "gradwire");
  tool.set_version_flag("--version", "gradwire " + std::string(Version()));
  tool.require_subcommand(1);
  CommandAction action;
  AddBenchCommand(tool, action);
  AddCompressorsCommand(tool, action);
  AddConfigCommand(tool, action);
  AddPluginCommand(tool, action);
  try {
    tool.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return tool.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  try {
    const int code = action();
    // A full disk must not look like success.
    if (std::fflush(stdout) != 0) {
      std::perror("gradwire: standard output");
      return code == kExitOk ? kExitFailed : code;
    }
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gradwire: %s\n", error.what());
    return kExitFailed;
  }
}
