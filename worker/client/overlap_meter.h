#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace gradwire {

/// How much of a step's communication its computing can hide: means over the last steps that are
/// complete. All 0 before the first.
struct OverlapFigures {
  std::uint64_t steps = 0;  // that the means are over
  double step_ms = 0;
  double comm_ms = 0;     // T_comm: the bytes of a step at the goodput measured in these steps
  double compute_ms = 0;  // T_comp: the caller's own time in which they can be on their way
  double exposed_ms = 0;  // during which the caller was blocked in Wait
  double up_bytes = 0;    // payload, a step
  double down_bytes = 0;
  double goodput = 0;  // bytes a second, each way
  /// comm_ms, if every unit that the filter holds back at times were sent in every step.
  double full_comm_ms = 0;

  /// CCR = T_comm / T_comp; 0 while either is not known.
  double ccr() const { return compute_ms > 0 ? comm_ms / compute_ms : 0.0; }
  /// The same of steps in which every unit is sent: what the filter's interval follows from.
  double full_ccr() const { return compute_ms > 0 ? full_comm_ms / compute_ms : 0.0; }
};

/// Measures T_comm and T_comp of the caller's steps from what it calls and what is transferred.
///
/// A step lasts from its first gradient handed over to the next step's. Its *window* lasts from
/// there to the end of the last Wait in it: as long can its transfers be on their way. T_comp is
/// the window without the time blocked in Wait; a backward pass hides transfers, and a forward pass
/// that waits for each layer by itself does too, but what the caller computes after its last Wait
/// does not. T_comm is the larger of the bytes each way (the ways do not disturb each other) over
/// the goodput, which is that of pushes: no time in it is spent on waiting for other workers.
///
/// A step without a Wait is left out, and so is one without bytes.
///
/// Threads: one at a time. Where several threads wait, time is blocked while one is.
class OverlapMeter {
 public:
  using Clock = std::chrono::steady_clock;
  /// Means are over so many steps: they follow a link that changes; a step's time alone varies too
  /// much.
  static constexpr std::size_t kSteps = 16;
  /// What a transfer has come to since the connection was made.
  struct Transferred {
    std::uint64_t bytes = 0;
    Clock::duration busy{};
  };

  /// A gradient of the step is handed over; `pushes` is as now.
  void HandedOver(std::uint64_t step, Transferred pushes, Clock::time_point now);
  void WaitBegins(Clock::time_point now);
  void WaitEnds(Clock::time_point now);
  /// Units: bytes of payload. Of what is sent once in `interval` steps a full step has about so
  /// many times the bytes, since classes are alike in size.
  void Pushed(std::size_t bytes, std::uint32_t interval = 1) {
    open_.up_bytes += bytes;
    open_.full_up_bytes += std::uint64_t{bytes} * interval;
  }
  void Pulled(std::size_t bytes, std::uint32_t interval = 1) {
    open_.down_bytes += bytes;
    open_.full_down_bytes += std::uint64_t{bytes} * interval;
  }

  OverlapFigures figures() const;
  /// False while the link or the computing changes: before kSteps steps, or if full_ccr() of the
  /// newer half of them is more than a fifth away from that of the older half.
  bool is_steady() const;

 private:
  struct Step {
    Clock::duration length{};
    Clock::duration window{};
    Clock::duration blocked{};
    std::uint64_t up_bytes = 0;
    std::uint64_t down_bytes = 0;
    std::uint64_t full_up_bytes = 0;
    std::uint64_t full_down_bytes = 0;
    Transferred pushes;  // in this step
  };

  static constexpr double kSteadyWithin = 0.2;

  void NoteBlocked(Clock::time_point until);
  /// Over `num_steps` steps before the last `skipped`; there are so many.
  OverlapFigures MeansOf(std::size_t skipped, std::size_t num_steps) const;

  std::array<Step, kSteps> steps_;
  std::uint64_t num_steps_ = 0;  // ever
  bool is_open_ = false;
  bool has_waited_ = false;  // in the open step
  std::uint64_t number_ = 0;
  Clock::time_point begin_;
  Transferred at_begin_;
  Step open_;
  std::size_t waiting_ = 0;  // threads
  Clock::time_point blocked_since_;
};

}  // namespace gradwire
