#include "common/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace gradwire {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

// A library must stay quiet until its host asks: the default logger takes warnings and errors only.
std::shared_ptr<spdlog::logger>& Logger() {
  static std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("gradwire",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::warn);
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ gradwire %v");
    return made;
  }();
  return logger;
}

}  // namespace

Result<LogLevel> ParseLogLevel(std::string_view text) {
  if (text == "trace") return LogLevel::kTrace;
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warn") return LogLevel::kWarn;
  if (text == "error") return LogLevel::kError;
  if (text == "off") return LogLevel::kOff;
  return InvalidArgument("log level '" + std::string(text) +
                         "' is unknown, expected trace, debug, info, warn, error or off");
}

void InitLog(LogLevel level, std::string identity) {
  Logger()->set_level(ToSpdlog(level));
  Logger()->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l " + identity + " %v");
  Logger()->flush_on(spdlog::level::info);
}

bool LogEnabled(LogLevel level) { return Logger()->should_log(ToSpdlog(level)); }

void LogLine(LogLevel level, std::string_view text) {
  Logger()->log(ToSpdlog(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace gradwire
