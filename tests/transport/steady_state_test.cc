#include <cstdint>
#include <string>

#include "common/base/buffer_pool.h"
#include "tests/base/alloc_counter.h"
#include "tests/catch.h"
#include "tests/transport/loop_fixture.h"

namespace gradwire {
namespace {

/// A handler that remembers nothing, so that it allocates nothing.
class Echo final : public LoopHandler {
 public:
  void OnMessage(PeerId from, const Header& header, Payload payload) override {
    if (left > 0) {
      --left;
      (void)loop->Send(from, header, std::move(payload));
    } else {
      done.set_value();
    }
  }
  void OnUp(PeerId) override { up.set_value(); }

  Loop* loop = nullptr;
  std::uint64_t left = 0;  // the loop's thread
  std::promise<void> up;
  std::promise<void> done;
};

TEST_CASE("messages go back and forth without an allocation of ours", "[transport]") {
  const std::string name = GENERATE(as<std::string>{}, "zmq", "inproc");
  CAPTURE(name);
  const auto fabric = MakeFabric(name);
  Echo at_server;
  Echo at_client;
  BufferPool pool;
  const auto server = fabric->MakeLoop();
  const auto client = fabric->MakeLoop();
  at_server.loop = server.get();
  at_client.loop = client.get();
  const std::string address = server->Listen(fabric->FreshAddress()).value();
  REQUIRE(server->Start(&at_server, "server").ok());
  REQUIRE(client->Start(&at_client, "client").ok());
  RunOn(*server, [&] { at_server.left = ~std::uint64_t{0}; });
  const PeerId peer = RunOn(*client, [&] { return client->Connect(address); }).value();
  REQUIRE(at_client.up.get_future().wait_for(kPatience) == std::future_status::ready);
  // Small payloads are copied, large ones are not.
  for (const std::size_t size : {std::size_t{1000}, std::size_t{1} << 20}) {
    CAPTURE(size);
    std::uint64_t allocations = 0;
    // The first flight fills the pools.
    for (int flight = 0; flight < 2; ++flight) {
      at_client.done = std::promise<void>();
      RunOn(*client, [&] { at_client.left = 300; });
      const Status sent = RunOn(*client, [&] {
        const PooledBuffer buffer = pool.Acquire(size);
        return client->Send(peer, Link2::Numbered(1), buffer.Share(size));
      });
      REQUIRE(sent.ok());
      const std::uint64_t before = NumAllocations();
      REQUIRE(at_client.done.get_future().wait_for(kPatience) == std::future_status::ready);
      allocations = NumAllocations() - before;
    }
    // Waiting for the end takes a few; 300 round trips take none.
    REQUIRE(allocations < 20);
  }
  client->Stop();
  server->Stop();
}

}  // namespace
}  // namespace gradwire
