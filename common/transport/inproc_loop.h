#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/transport/loop.h"

namespace gradwire {

/// The network that a set of in-process loops shares; outlives them.
class InprocNetwork {
 public:
  virtual ~InprocNetwork() = default;
  /// A loop on this network. Addresses: inproc://anything.
  virtual std::unique_ptr<Loop> MakeLoop() = 0;
  /// Cuts every connection to the address, losing what is under way, and refuses new ones until
  /// Restore. Threads: any.
  virtual void Cut(const std::string& address) = 0;
  virtual void Restore(const std::string& address) = 0;
  /// Drops the next message on a connection to the address that `filter` accepts, in either
  /// direction, as a cut would, then cuts that connection, which comes up again at once. Calls add
  /// up: each loses one message. For tests that lose one chosen message.
  /// Threads: any. `filter` runs on the thread that sends and must not use the network.
  virtual void CutAt(const std::string& address, std::function<bool(const Header&)> filter) = 0;
};

std::unique_ptr<InprocNetwork> MakeInprocNetwork();

}  // namespace gradwire
