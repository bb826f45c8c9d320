#pragma once

#include <cstddef>
#include <memory>

#include "common/transport/loop.h"

namespace gradwire {

struct ZmqLoopOptions {
  /// Frames larger than this end the connection that sends them.
  std::size_t max_message_bytes = std::size_t{1} << 31;
  /// The protocol above gives a silent peer up after this long; its connection is closed on both
  /// sides within 3/4 of it, so that there is time to make a new one. 0: never.
  int dead_after_ms = 10000;
  /// A TCP connection to a listener that has not brought one valid message by then is closed, as is
  /// the oldest such connection when there are more than `max_silent`. 0: never.
  int first_message_ms = 30000;
  std::size_t max_silent = 1024;
};

/// A Loop over ZeroMQ (TCP or ipc): a ROUTER for Listen, a DEALER for each Connect.
/// Addresses: tcp://host:port, ipc:///path.
std::unique_ptr<Loop> MakeZmqLoop(const ZmqLoopOptions& options);

}  // namespace gradwire
