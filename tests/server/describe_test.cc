// How members and ranks are named in messages to people.

#include "server/describe.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

TEST_CASE("a member is named with what is known of it", "[server][unit]") {
  Hello hello;
  hello.rank = 1;
  REQUIRE(Describe(NameOf(hello, "")) == "worker 1");
  REQUIRE(Describe(NameOf(hello, "10.0.0.3")) == "worker 1 at 10.0.0.3");
  hello.pid = 42;
  REQUIRE(Describe(NameOf(hello, "10.0.0.3")) == "worker 1 at 10.0.0.3 (pid 42)");
  hello.host = "n3";
  REQUIRE(Describe(NameOf(hello, "10.0.0.3")) == "worker 1 at 10.0.0.3 (host n3, pid 42)");
  hello.pid = 0;
  hello.role = Role::kServer;
  REQUIRE(Describe(NameOf(hello, "fd00::3")) == "server 1 at fd00::3 (host n3)");
  // An IPv6 socket's view of an IPv4 peer.
  REQUIRE(Describe(NameOf(hello, "::ffff:10.0.0.3")) == "server 1 at 10.0.0.3 (host n3)");
}

TEST_CASE("ranks in a row are written as a range", "[server][unit]") {
  REQUIRE(FormatRanks({}) == "none");
  REQUIRE(FormatRanks({3}) == "3");
  REQUIRE(FormatRanks({0, 1}) == "0,1");
  REQUIRE(FormatRanks({0, 1, 2, 3, 7, 9, 10, 12, 13, 14}) == "0-3,7,9,10,12-14");
}

}  // namespace
}  // namespace gradwire
