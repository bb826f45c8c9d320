#pragma once

#include <cstddef>
#include <memory>

#include "common/transport/loop.h"

namespace gradwire {

struct ZmqLoopOptions {
  /// Frames larger than this end the connection that sends them.
  std::size_t max_message_bytes = std::size_t{1} << 31;
  /// A silent peer is taken for lost after this long; 0: never.
  int dead_after_ms = 10000;
};

/// A Loop over ZeroMQ (TCP or ipc): a ROUTER for Listen, a DEALER for each Connect.
/// Addresses: tcp://host:port, ipc:///path.
std::unique_ptr<Loop> MakeZmqLoop(const ZmqLoopOptions& options);

}  // namespace gradwire
