#include "worker/client/overlap_meter.h"

#include <algorithm>
#include <cmath>

namespace gradwire {
namespace {

double Milliseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

void OverlapMeter::HandedOver(std::uint64_t step, Transferred pushes, Clock::time_point now) {
  if (is_open_ && step == number_) return;
  if (waiting_ > 0) {  // another thread, on into this step
    NoteBlocked(now);
    blocked_since_ = now;
  }
  if (is_open_ && has_waited_ && open_.up_bytes + open_.down_bytes > 0) {
    open_.length = now - begin_;
    open_.pushes = {pushes.bytes - at_begin_.bytes, pushes.busy - at_begin_.busy};
    steps_[num_steps_++ % kSteps] = open_;
  }
  is_open_ = true;
  has_waited_ = false;
  number_ = step;
  begin_ = now;
  at_begin_ = pushes;
  open_ = {};
}

void OverlapMeter::WaitBegins(Clock::time_point now) {
  if (waiting_++ == 0) blocked_since_ = now;
}

void OverlapMeter::WaitEnds(Clock::time_point now) {
  if (--waiting_ == 0) NoteBlocked(now);
}

void OverlapMeter::NoteBlocked(Clock::time_point until) {
  open_.blocked += until - blocked_since_;
  open_.window = until - begin_;
  has_waited_ = true;
}

OverlapFigures OverlapMeter::figures() const {
  return MeansOf(0, std::min<std::uint64_t>(num_steps_, kSteps));
}

bool OverlapMeter::is_steady() const {
  if (num_steps_ < kSteps) return false;
  const double newer = MeansOf(0, kSteps / 2).full_ccr();
  const double older = MeansOf(kSteps / 2, kSteps / 2).full_ccr();
  return std::abs(newer - older) <= kSteadyWithin * std::min(newer, older);
}

OverlapFigures OverlapMeter::MeansOf(std::size_t skipped, std::size_t num_steps) const {
  OverlapFigures figures;
  figures.steps = num_steps;
  if (figures.steps == 0) return figures;
  Transferred pushes;
  double full_up_bytes = 0;
  double full_down_bytes = 0;
  for (std::size_t i = 0; i < figures.steps; ++i) {
    const Step& step = steps_[(num_steps_ - 1 - skipped - i) % kSteps];
    figures.step_ms += Milliseconds(step.length);
    figures.compute_ms += Milliseconds(step.window - step.blocked);
    figures.exposed_ms += Milliseconds(step.blocked);
    figures.up_bytes += static_cast<double>(step.up_bytes);
    figures.down_bytes += static_cast<double>(step.down_bytes);
    full_up_bytes += static_cast<double>(step.full_up_bytes);
    full_down_bytes += static_cast<double>(step.full_down_bytes);
    pushes.bytes += step.pushes.bytes;
    pushes.busy += step.pushes.busy;
  }
  const auto count = static_cast<double>(figures.steps);
  for (double* sum : {&figures.step_ms, &figures.compute_ms, &figures.exposed_ms, &figures.up_bytes,
                      &figures.down_bytes, &full_up_bytes, &full_down_bytes}) {
    *sum /= count;
  }
  if (pushes.busy > Clock::duration::zero()) {
    figures.goodput = static_cast<double>(pushes.bytes) / Milliseconds(pushes.busy) * 1e3;
  }
  if (figures.goodput > 0) {
    figures.comm_ms = std::max(figures.up_bytes, figures.down_bytes) / figures.goodput * 1e3;
    figures.full_comm_ms = std::max(full_up_bytes, full_down_bytes) / figures.goodput * 1e3;
  }
  return figures;
}

}  // namespace gradwire
