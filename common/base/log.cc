#include "common/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
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

/// Bytes of the UTF-8 character that begins at `text`, 0 if there is none.
std::size_t Utf8Length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t length = first < 0x80                     ? 1
                             : first >= 0xc2 && first <= 0xdf ? 2
                             : first >= 0xe0 && first <= 0xef ? 3
                             : first >= 0xf0 && first <= 0xf4 ? 4
                                                              : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and what lies beyond Unicode.
  if (first == 0xe0 && byte(1) < 0xa0) return 0;
  if (first == 0xed && byte(1) > 0x9f) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

/// As inside of JSON's quotes; without `quotes` those stay as they are.
void AppendEscaped(std::string_view text, bool quotes, std::string& out) {
  while (!text.empty()) {
    const std::size_t length = Utf8Length(text);
    const char c = text[0];
    if (length == 0) {
      out += quotes ? "\\ufffd" : "\xef\xbf\xbd";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else if (quotes && (c == '"' || c == '\\')) {
      out += '\\';
      out += c;
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
}

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  AppendEscaped(text, true, out);
  return out + '"';
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
    line = fmt::format("\"component\":{},\"message\":{}", Quoted(component), Quoted(message));
    for (const LogField& field : fields) {
      line += fmt::format(",{}:{}", Quoted(field.key),
                          IsJsonNumber(field) ? field.value : Quoted(field.value));
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
      line += Quoted(field.value);
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

}  // namespace gradwire
