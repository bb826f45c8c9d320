#include "common/config/text.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "common/config/config.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

TEST_CASE("sizes are whole numbers with a unit of bytes", "[config][unit]") {
  const std::pair<const char*, std::uint64_t> good[] = {
      {"0", 0},
      {"123", 123},
      {"7B", 7},
      {"64KiB", 65536},
      {"4MB", 4000000},
      {"2MiB", 2097152},
      {"3GB", 3000000000},
      {"1GiB", 1073741824},
      {"1TB", 1000000000000},
      {"1TiB", 1099511627776},
      {"18446744073709551615", std::numeric_limits<std::uint64_t>::max()},
      {"16777215TiB", 16777215ULL << 40},
  };
  for (const auto& [text, bytes] : good) {
    CAPTURE(text);
    const auto parsed = ParseSize(text);
    REQUIRE(parsed.ok());
    CHECK(*parsed == bytes);
  }
  const char* const bad[] = {"4 bananas", "-1",    "",     "1e3x",   "1e3", "0x10",
                             "KiB",       "4 MiB", "4mib", "1.5MiB", " 1",  "1 ",
                             "+1",        "4MiBs", "４",   "1K",     "4Mb", "1ms"};
  for (const char* text : bad) {
    CAPTURE(text);
    const auto parsed = ParseSize(text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().code() == StatusCode::kInvalidArgument);
    CHECK(parsed.status().message() ==
          std::string("'") + text +
              "' is not a size, expected a whole number of bytes or one with KB, MB, GB, TB, KiB, "
              "MiB, GiB or TiB, such as 64KiB");
  }
  for (const char* text : {"18446744073709551616", "16777216TiB", "99999999999999999999999KiB"}) {
    CAPTURE(text);
    const auto parsed = ParseSize(text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().message() == std::string("'") + text + "' is more than 64 bits of bytes");
  }
  // Too large and not a size either: the unit is what is wrong.
  CHECK(ParseSize("99999999999999999999999bananas").status().message().find("not a size") !=
        std::string::npos);
}

TEST_CASE("durations are whole numbers with a unit of time", "[config][unit]") {
  const std::pair<const char*, int> good[] = {{"5s", 5000},
                                              {"200ms", 200},
                                              {"2m", 120000},
                                              {"1h", 3600000},
                                              {"0ms", 0},
                                              {"0s", 0},
                                              {"2147483647ms", 2147483647},
                                              {"596h", 2145600000}};
  for (const auto& [text, milliseconds] : good) {
    CAPTURE(text);
    const auto parsed = ParseDuration(text);
    REQUIRE(parsed.ok());
    CHECK(*parsed == milliseconds);
  }
  for (const char* text :
       {"4 bananas", "-1s", "", "5", "1e3s", "s", "5 s", "5S", "5sec", "1.5s", "5us"}) {
    CAPTURE(text);
    const auto parsed = ParseDuration(text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().message() ==
          std::string("'") + text +
              "' is not a time, expected a whole number with ms, s, m or h, such as 200ms");
  }
  for (const char* text : {"2147483648ms", "597h", "99999999999999999999s"}) {
    CAPTURE(text);
    const auto parsed = ParseDuration(text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().message() ==
          std::string("'") + text + "' is more than 2147483647 milliseconds");
  }
}

TEST_CASE("written sizes and durations are short and parse back", "[config][unit]") {
  CHECK(FormatSize(0) == "0");
  CHECK(FormatSize(65536) == "64KiB");
  CHECK(FormatSize(65537) == "65537");
  CHECK(FormatSize(4000000) == "4MB");
  CHECK(FormatSize(1ULL << 40) == "1TiB");
  for (const std::uint64_t bytes :
       {1ULL, 999ULL, 1000ULL, 1024ULL, 1536ULL, 2097152ULL, 1024000ULL, 123456789ULL, ~0ULL}) {
    CAPTURE(bytes);
    const auto parsed = ParseSize(FormatSize(bytes));
    REQUIRE(parsed.ok());
    CHECK(*parsed == bytes);
  }
  CHECK(FormatDuration(60000) == "60s");
  CHECK(FormatDuration(1500) == "1500ms");
  for (const int milliseconds : {1, 200, 999, 1000, 1001, 60000, 2147483647}) {
    CAPTURE(milliseconds);
    const auto parsed = ParseDuration(FormatDuration(milliseconds));
    REQUIRE(parsed.ok());
    CHECK(*parsed == milliseconds);
  }
}

TEST_CASE("the nearest name is found by slips of the finger and no further", "[config][unit]") {
  const std::vector<std::string> names = {"credit", "bytes", "fuse_below", "lanes"};
  CHECK(NearestName("credits", names) == "credit");
  CHECK(NearestName("cerdit", names) == "credit");
  CHECK(NearestName("byte", names) == "bytes");
  CHECK(NearestName("fusebelow", names) == "fuse_below");
  CHECK(NearestName("bananas", names).empty());
  CHECK(NearestName("", names).empty());
  CHECK(NearestName("x", names).empty());
  CHECK(NearestName("lanes", names) == "lanes");
  CHECK(NearestName("anything", {}).empty());
  CHECK(NearestName(std::string(100000, 'x'), names).empty());
  // The closer one wins, whatever the order.
  CHECK(NearestName("bites", {"sites", "bytes", "bite"}) == "sites");
  CHECK(NearestName("lane", {"line", "lanes", "lane"}) == "lane");
}

}  // namespace
}  // namespace gradwire
