#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "common/base/status.h"

namespace gradwire {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };
enum class LogFormat { kText, kJson };

/// Errors: InvalidArgument naming the text and the levels there are.
Result<LogLevel> ParseLogLevel(std::string_view text);

/// Sets up this process's log: every line goes to stderr as time, level, process ("server/0"),
/// component, message and fields; in JSON an object a line. Until then only warnings and errors are
/// written: a library stays quiet until its host asks.
/// Threads: call before other threads log.
void InitLog(LogLevel level, LogFormat format, std::string_view process);

bool LogEnabled(LogLevel level);

/// One key=value of a line.
struct LogField {
  std::string_view key;
  std::string value;
  bool is_number = false;
};

template <typename Value>
LogField Field(std::string_view key, const Value& value) {
  return {key, fmt::format("{}", value),
          std::is_arithmetic_v<Value> && !std::is_same_v<Value, char>};
}

/// Writes one line, whatever the texts hold: what would break the line is escaped. `component` is
/// the part of the program that speaks ("root", "lane", "transport").  Threads: safe.
void Log(LogLevel level, std::string_view component, std::string_view message,
         std::initializer_list<LogField> fields = {});

/// Writes each line of a text as a line.
void LogLines(LogLevel level, std::string_view component, std::string_view text);

inline void LogDebug(std::string_view component, std::string_view message,
                     std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kDebug, component, message, fields);
}
inline void LogInfo(std::string_view component, std::string_view message,
                    std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, component, message, fields);
}
inline void LogWarn(std::string_view component, std::string_view message,
                    std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarn, component, message, fields);
}
inline void LogError(std::string_view component, std::string_view message,
                     std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, component, message, fields);
}

/// What a line looks like without its time and level, for tests and for whoever writes it.
std::string FormatLogLine(LogFormat format, std::string_view component, std::string_view message,
                          std::initializer_list<LogField> fields);

/// Keeps what somebody else can cause from filling the log: one line in an interval.
/// Threads: one.
class LogLimiter {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LogLimiter(std::chrono::milliseconds interval = std::chrono::seconds(1))
      : interval_(interval) {}

  /// How many lines were suppressed since the last one, if a line may be written now.
  std::optional<std::uint64_t> Admit(Clock::time_point now = Clock::now()) {
    if (last_ && now - *last_ < interval_) {
      ++suppressed_;
      return std::nullopt;
    }
    last_ = now;
    const std::uint64_t suppressed = suppressed_;
    suppressed_ = 0;
    return suppressed;
  }

 private:
  const std::chrono::milliseconds interval_;
  std::optional<Clock::time_point> last_;
  std::uint64_t suppressed_ = 0;
};

}  // namespace gradwire
