#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace CLI {
class App;
}

namespace gradwire {

/// Texts of the command line and the system come to terminals: without control characters.
std::string Escape(std::string_view text);

/// Of `--plugin`.
inline constexpr char kPluginOptionHelp[] =
    "a shared library with more compressors, as `plugins:` names it; may be given again";

/// What the command on the command line does; returns the exit code.
using CommandAction = std::function<int()>;

// One function a command: adds it to the tool, and when it was given, sets `action`.

void AddBenchCommand(CLI::App& tool, CommandAction& action);
void AddCompressorsCommand(CLI::App& tool, CommandAction& action);
void AddConfigCommand(CLI::App& tool, CommandAction& action);
void AddPluginCommand(CLI::App& tool, CommandAction& action);

/// To `bench`.
void AddNetBenchCommands(CLI::App& bench, CommandAction& action);

}  // namespace gradwire
