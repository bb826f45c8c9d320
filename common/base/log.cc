#include "common/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>

#include "common/base/escape.h"

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

std::atomic<LogFormat>& Format() {
  static std::atomic<LogFormat> format{LogFormat::kText};
  return format;
}

// What comes before FormatLogLine's part of a line. A process's name is ours and needs no escapes.
std::string PatternOf(LogFormat format, std::string_view process) {
  if (format == LogFormat::kJson) {
    return fmt::format(R"({{"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","process":"{}",%v}})",
                       process);
  }
  return fmt::format("%Y-%m-%dT%H:%M:%S.%e %l {} %v", process);
}

std::shared_ptr<spdlog::logger>& Logger() {
  static std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("gradwire",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::warn);
    made->set_pattern(PatternOf(LogFormat::kText, "gradwire"));
    return made;
  }();
  return logger;
}

bool IsBareWord(std::string_view text) {
  return !text.empty() && text.find_first_of(" \"=\\") == std::string_view::npos;
}

bool IsJsonNumber(const LogField& field) {
  return field.is_number && field.value.find_first_not_of("0123456789+-.eE") == std::string::npos;
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

void InitLog(LogLevel level, LogFormat format, std::string_view process) {
  Format() = format;
  Logger()->set_level(ToSpdlog(level));
  Logger()->set_pattern(PatternOf(format, process));
  Logger()->flush_on(spdlog::level::info);
}

bool LogEnabled(LogLevel level) { return Logger()->should_log(ToSpdlog(level)); }

std::string FormatLogLine(LogFormat format, std::string_view component, std::string_view message,
                          std::initializer_list<LogField> fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line = fmt::format("\"component\":{},\"message\":{}", QuoteJson(component), QuoteJson(message));
    for (const LogField& field : fields) {
      line += fmt::format(",{}:{}", QuoteJson(field.key),
                          IsJsonNumber(field) ? field.value : QuoteJson(field.value));
    }
    return line;
  }
  AppendEscaped(component, false, line);
  line += ": ";
  AppendEscaped(message, false, line);
  for (const LogField& field : fields) {
    line += fmt::format(" {}=", field.key);
    if (IsBareWord(field.value)) {
      AppendEscaped(field.value, false, line);
    } else {
      line += QuoteJson(field.value);
    }
  }
  return line;
}

void Log(LogLevel level, std::string_view component, std::string_view message,
         std::initializer_list<LogField> fields) {
  if (!LogEnabled(level)) return;
  Logger()->log(ToSpdlog(level),
                spdlog::string_view_t(FormatLogLine(Format(), component, message, fields)));
}

void LogLines(LogLevel level, std::string_view component, std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    Log(level, component, text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
}

}  // namespace gradwire
