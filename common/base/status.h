#pragma once

#include <cassert>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace gradwire {

/// What kind of failure a Status reports; callers branch on this, people read the message.
enum class StatusCode {
  kOk = 0,
  kInvalidArgument,  // the caller or the configuration is wrong
  kCorruptData,      // bytes from the network or a file do not mean what they should
  kBufferTooSmall,
  kNotFound,
  kUnavailable,  // a peer is gone or refuses
  kTimeout,
  kInternal,
};

/// The code's name as it is printed, e.g. "CorruptData".
std::string_view StatusCodeName(StatusCode code);

/// Outcome of an operation. The message says what, got, expected and which tensor or rank.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  /// "CorruptData: onebit payload is 7 bytes, expected 129"
  std::string ToString() const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status CorruptData(std::string message) {
  return {StatusCode::kCorruptData, std::move(message)};
}
inline Status BufferTooSmall(std::string message) {
  return {StatusCode::kBufferTooSmall, std::move(message)};
}
inline Status NotFound(std::string message) { return {StatusCode::kNotFound, std::move(message)}; }
inline Status Unavailable(std::string message) {
  return {StatusCode::kUnavailable, std::move(message)};
}
inline Status Timeout(std::string message) { return {StatusCode::kTimeout, std::move(message)}; }
inline Status Internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

/// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  // Implicit on purpose: `return value;` and `return CorruptData(...);` both read well.
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {
    assert(!std::get<1>(state_).ok());
  }

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status::Ok() : std::get<1>(state_); }

  T& value() & {
    assert(ok());
    return std::get<0>(state_);
  }
  const T& value() const& {
    assert(ok());
    return std::get<0>(state_);
  }
  T&& value() && {
    assert(ok());
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace gradwire

/// Returns from the current function if the Status expression is not ok.
#define GRADWIRE_RETURN_IF_ERROR(expr)                                      \
  do {                                                                      \
    if (::gradwire::Status gradwire_status = (expr); !gradwire_status.ok()) \
      return gradwire_status;                                               \
  } while (false)
