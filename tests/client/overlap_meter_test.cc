#include "worker/client/overlap_meter.h"

#include "tests/catch.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// All times are made up.
OverlapMeter::Clock::time_point At(int ms) {
  return OverlapMeter::Clock::time_point() + milliseconds(ms);
}

// What pushes have come to after so many steps of 4000 bytes at 200 bytes/ms.
OverlapMeter::Transferred After(int steps) {
  return {static_cast<std::uint64_t>(4000 * steps), milliseconds(20 * steps)};
}

// A step of 100 ms that begins at `begin`: 40 ms of backward pass, 30 ms blocked, 10 ms of what
// comes after the last Wait, and 20 ms in which the next backward pass has no gradient yet.
void Step(OverlapMeter& meter, int number, int begin) {
  meter.HandedOver(static_cast<std::uint64_t>(number), After(number), At(begin));
  meter.Pushed(3000);
  meter.HandedOver(static_cast<std::uint64_t>(number), After(number), At(begin + 20));
  meter.Pushed(1000);
  meter.WaitBegins(At(begin + 40));
  meter.Pulled(3000);
  meter.WaitEnds(At(begin + 60));
  meter.WaitBegins(At(begin + 60));
  meter.Pulled(1000);
  meter.WaitEnds(At(begin + 70));
}

TEST_CASE("the overlap meter knows nothing before a step is complete", "[client][unit]") {
  OverlapMeter meter;
  CHECK(meter.figures().steps == 0);
  Step(meter, 0, 0);
  CHECK(meter.figures().steps == 0);
  CHECK(meter.figures().ccr() == 0.0);
  meter.HandedOver(1, After(1), At(100));
  CHECK(meter.figures().steps == 1);
}

TEST_CASE(
    "T_comm is bytes over goodput, T_comp the time until the last Wait without what it "
    "blocked",
    "[client][unit]") {
  OverlapMeter meter;
  for (int step = 0; step < 4; ++step) Step(meter, step, 100 * step);
  const OverlapFigures figures = meter.figures();
  CHECK(figures.steps == 3);
  CHECK(figures.step_ms == Approx(100));
  CHECK(figures.exposed_ms == Approx(30));
  CHECK(figures.compute_ms == Approx(40));
  CHECK(figures.up_bytes == Approx(4000));
  CHECK(figures.down_bytes == Approx(4000));
  CHECK(figures.goodput == Approx(200e3));
  CHECK(figures.comm_ms == Approx(20));
  CHECK(figures.ccr() == Approx(0.5));
}

TEST_CASE("a forward pass that waits for each layer hides transfers too", "[client][unit]") {
  OverlapMeter meter;
  meter.HandedOver(0, After(0), At(0));
  meter.Pushed(4000);
  meter.WaitBegins(At(40));  // first layer
  meter.WaitEnds(At(50));
  meter.WaitBegins(At(70));  // second layer, whose result is there
  meter.WaitEnds(At(70));
  meter.HandedOver(1, After(1), At(100));
  CHECK(meter.figures().compute_ms == Approx(60));
  CHECK(meter.figures().exposed_ms == Approx(10));
}

TEST_CASE("T_comm is that of the way with more bytes", "[client][unit]") {
  OverlapMeter meter;
  meter.HandedOver(0, After(0), At(0));
  meter.Pushed(4000);
  meter.Pulled(12000);
  meter.WaitBegins(At(10));
  meter.WaitEnds(At(90));
  meter.HandedOver(1, After(1), At(100));
  CHECK(meter.figures().comm_ms == Approx(60));
}

TEST_CASE("time is blocked once while two threads wait", "[client][unit]") {
  OverlapMeter meter;
  meter.HandedOver(0, After(0), At(0));
  meter.Pushed(4000);
  meter.WaitBegins(At(40));
  meter.WaitBegins(At(45));
  meter.WaitEnds(At(55));
  meter.WaitEnds(At(60));
  meter.HandedOver(1, After(1), At(100));
  CHECK(meter.figures().exposed_ms == Approx(20));
  CHECK(meter.figures().compute_ms == Approx(40));
}

TEST_CASE("a wait that lasts into the next step is divided between both", "[client][unit]") {
  OverlapMeter meter;
  meter.HandedOver(0, After(0), At(0));
  meter.Pushed(4000);
  meter.WaitBegins(At(10));
  meter.WaitEnds(At(20));
  meter.WaitBegins(At(70));  // a thread of its own
  meter.HandedOver(1, After(1), At(100));
  meter.Pushed(4000);
  meter.WaitEnds(At(110));
  CHECK(meter.figures().exposed_ms == Approx(40));
  CHECK(meter.figures().compute_ms == Approx(60));
  meter.HandedOver(2, After(2), At(200));
  CHECK(meter.figures().exposed_ms == Approx((40 + 10) / 2.0));
}

TEST_CASE("a step that nobody waited for, or that moved nothing, is left out", "[client][unit]") {
  OverlapMeter meter;
  meter.WaitBegins(At(0));  // before any step
  meter.WaitEnds(At(5));
  meter.HandedOver(0, After(0), At(10));
  meter.Pushed(4000);
  meter.HandedOver(1, After(1), At(100));
  CHECK(meter.figures().steps == 0);
  meter.WaitBegins(At(110));
  meter.WaitEnds(At(120));
  meter.HandedOver(2, After(1), At(200));
  CHECK(meter.figures().steps == 0);
}

TEST_CASE("of what is sent once in some steps a full step has as many times the bytes",
          "[client][unit]") {
  OverlapMeter meter;
  for (int step = 0; step < 3; ++step) {
    meter.HandedOver(static_cast<std::uint64_t>(step), After(step), At(100 * step));
    meter.Pushed(1000);
    meter.Pushed(750, 4);
    meter.WaitBegins(At(100 * step + 40));
    meter.Pulled(1000);
    meter.Pulled(1500, 4);
    meter.WaitEnds(At(100 * step + 70));
  }
  const OverlapFigures figures = meter.figures();
  CHECK(figures.up_bytes == Approx(1750));
  CHECK(figures.comm_ms == Approx(12.5));
  CHECK(figures.ccr() == Approx(12.5 / 40));
  // 1000 + 4 * 1500 bytes at 200 a ms.
  CHECK(figures.full_comm_ms == Approx(35));
  CHECK(figures.full_ccr() == Approx(35.0 / 40));
}

TEST_CASE("the figures follow a link that changes within 16 steps", "[client][unit]") {
  OverlapMeter meter;
  for (int step = 0; step < 50; ++step) Step(meter, step, 100 * step);
  OverlapMeter::Transferred pushes = After(50);
  for (int step = 50; step < 67; ++step) {  // ten times slower
    const int begin = 1000 * step;
    meter.HandedOver(static_cast<std::uint64_t>(step), pushes, At(begin));
    meter.Pushed(4000);
    meter.WaitBegins(At(begin + 40));
    meter.WaitEnds(At(begin + 240));
    pushes.bytes += 4000;
    pushes.busy += milliseconds(200);
  }
  CHECK(meter.figures().steps == 16);
  CHECK(meter.figures().comm_ms == Approx(200));
  CHECK(meter.figures().ccr() == Approx(5));
}

TEST_CASE("it is not steady while one half of its steps has another CCR", "[client][unit]") {
  OverlapMeter meter;
  // bytes: of each step, which is all else alike.
  int step = 0;
  const auto steps = [&](int count, std::size_t bytes) {
    for (int i = 0; i < count; ++i, ++step) {
      meter.HandedOver(static_cast<std::uint64_t>(step), After(step), At(100 * step));
      meter.Pushed(bytes);
      meter.WaitBegins(At(100 * step + 40));
      meter.WaitEnds(At(100 * step + 70));
    }
  };
  steps(16, 4000);  // the last one is open
  CHECK_FALSE(meter.is_steady());
  steps(1, 4000);
  CHECK(meter.is_steady());
  steps(8, 4700);
  CHECK(meter.is_steady());
  steps(16, 4700);
  CHECK(meter.is_steady());
  steps(5, 6100);  // four of them complete
  CHECK(meter.is_steady());
  steps(4, 6100);
  CHECK_FALSE(meter.is_steady());
  steps(8, 6100);
  CHECK(meter.is_steady());
}

}  // namespace
}  // namespace gradwire
