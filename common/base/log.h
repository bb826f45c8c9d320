#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "common/base/status.h"

namespace gradwire {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };

/// Errors: InvalidArgument naming the text and the levels there are.
Result<LogLevel> ParseLogLevel(std::string_view text);

/// Sets up this process's log: lines go to stderr as time, level, identity ("server/0"), text.
/// Threads: call before other threads log.
void InitLog(LogLevel level, std::string identity);

bool LogEnabled(LogLevel level);
/// Writes one line. Threads: safe.
void LogLine(LogLevel level, std::string_view text);

template <typename... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (LogEnabled(level)) LogLine(level, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogDebug(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kDebug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarn(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kWarn, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kError, format, std::forward<Args>(args)...);
}

}  // namespace gradwire
