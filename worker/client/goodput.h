#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace gradwire {

/// Measures how fast pushes get through: their payload bytes over the time during which one had no
/// receipt. A receipt waits for nobody, so neither do these times for other workers.
///
/// Where the thread that reads receipts also encodes and decodes, a receipt may have waited for it.
/// Nobody knows when such a one came, so it does not count, and neither does the push after it,
/// whose time would begin there.
///
/// Threads: one at a time.
class GoodputMeter {
 public:
  using Clock = std::chrono::steady_clock;

  /// A push goes out.
  void Sent(Clock::time_point now) {
    if (outstanding_++ == 0) mark_ = now;
    ++sent_since_computed_;
  }
  /// The oldest of those without a receipt has one. Units: bytes of payload.
  void Receipted(std::size_t bytes, Clock::time_point now) {
    if (outstanding_ == 0) return;
    --outstanding_;
    if (behind_) {
      found_late_ = true;
    } else if (!std::exchange(skips_next_, false)) {
      bytes_ += bytes;
      busy_ += now - mark_;
    }
    mark_ = now;
  }
  /// A connection was cut: this one will have no receipt.
  void Lost() {
    if (outstanding_ > 0) --outstanding_;
    skips_next_ = outstanding_ > 0;
  }
  /// The reading thread has done something else until now.
  void Computed() {
    behind_ = true;
    sent_since_computed_ = 0;
  }
  /// All that has been received is read.
  void CaughtUp(Clock::time_point now) {
    behind_ = false;
    if (!std::exchange(found_late_, false)) return;
    mark_ = now;
    skips_next_ = outstanding_ > sent_since_computed_;
  }

  /// What counts so far.
  std::uint64_t bytes() const { return bytes_; }
  Clock::duration busy() const { return busy_; }
  /// Units: bytes a second; 0 before the first receipt that counts.
  double bytes_per_second() const {
    const double seconds = std::chrono::duration<double>(busy_).count();
    return seconds > 0.0 ? static_cast<double>(bytes_) / seconds : 0.0;
  }

 private:
  std::size_t outstanding_ = 0;
  std::size_t sent_since_computed_ = 0;
  bool behind_ = false;      // what is read now may have come earlier
  bool found_late_ = false;  // and a receipt was among it
  bool skips_next_ = false;  // nobody knows when the time of the next one began
  Clock::time_point mark_;   // where the time of the next one begins
  std::uint64_t bytes_ = 0;
  Clock::duration busy_{};
};

}  // namespace gradwire
