#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace gradwire {

/// What the command on the command line does; returns the exit code.
using CommandAction = std::function<int()>;

// One function a command: adds it to the tool, and when it was given, sets `action`.

void AddConfigCommand(CLI::App& tool, CommandAction& action);

}  // namespace gradwire
