#include "worker/client/goodput.h"

#include "tests/catch.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// All times are made up.
GoodputMeter::Clock::time_point At(int ms) {
  return GoodputMeter::Clock::time_point() + milliseconds(ms);
}

TEST_CASE("goodput is nothing before the first receipt", "[client][unit]") {
  GoodputMeter meter;
  REQUIRE(meter.bytes_per_second() == 0.0);
  meter.Sent(At(5));
  REQUIRE(meter.bytes_per_second() == 0.0);
}

TEST_CASE("goodput counts the time during which a push has no receipt, and no other",
          "[client][unit]") {
  GoodputMeter meter;
  meter.Sent(At(0));
  meter.Sent(At(2));
  meter.Receipted(1000, At(10));
  meter.Receipted(1000, At(20));
  REQUIRE(meter.bytes_per_second() == Approx(2000 / 0.020));
  // A second in which others compute is none of it.
  meter.Sent(At(1020));
  meter.Receipted(4000, At(1060));
  REQUIRE(meter.bytes_per_second() == Approx(6000 / 0.060));
  // Two at once.
  meter.Sent(At(2000));
  meter.Sent(At(2001));
  meter.Receipted(3000, At(2030));
  meter.Receipted(3000, At(2030));
  REQUIRE(meter.bytes_per_second() == Approx(12000 / 0.090));
}

TEST_CASE("a receipt that waited for the reading thread does not count, nor the push after it",
          "[client][unit]") {
  GoodputMeter meter;
  for (int i = 0; i < 4; ++i) meter.Sent(At(0));
  meter.Computed();               // until 50
  meter.Receipted(7000, At(50));  // came at 10, perhaps
  meter.CaughtUp(At(51));
  REQUIRE(meter.bytes_per_second() == 0.0);
  meter.Receipted(7000, At(55));  // was on its way since 10, perhaps
  REQUIRE(meter.bytes_per_second() == 0.0);
  meter.Receipted(1000, At(65));
  meter.Receipted(1000, At(75));
  REQUIRE(meter.bytes_per_second() == Approx(2000 / 0.020));
}

TEST_CASE("a push that goes out after the computing counts from when all before it is read",
          "[client][unit]") {
  GoodputMeter meter;
  meter.Sent(At(0));
  meter.Computed();
  meter.Sent(At(50));
  meter.Receipted(7000, At(51));
  meter.CaughtUp(At(52));
  meter.Receipted(1000, At(62));
  REQUIRE(meter.bytes_per_second() == Approx(1000 / 0.010));
}

TEST_CASE("computing that no receipt has waited for changes nothing", "[client][unit]") {
  GoodputMeter meter;
  meter.Sent(At(0));
  meter.Computed();
  meter.CaughtUp(At(5));
  meter.Receipted(1000, At(20));
  REQUIRE(meter.bytes_per_second() == Approx(1000 / 0.020));
}

TEST_CASE("a push that a cut has lost counts neither bytes nor time", "[client][unit]") {
  GoodputMeter meter;
  meter.Sent(At(0));
  meter.Sent(At(0));
  meter.Lost();
  meter.Receipted(7000, At(100));  // on another connection, for part of the time
  meter.Receipted(7000, At(400));  // of nothing
  REQUIRE(meter.bytes_per_second() == 0.0);
  meter.Sent(At(500));
  meter.Receipted(1000, At(510));
  REQUIRE(meter.bytes_per_second() == Approx(1000 / 0.010));
}

}  // namespace
}  // namespace gradwire
