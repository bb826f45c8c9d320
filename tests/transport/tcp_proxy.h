#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace gradwire {

/// Stands between a connecting and a listening side, on 127.0.0.1, and breaks what goes through it
/// on demand: what a cable, a switch or a firewall does. Plain sockets and one thread.
/// Threads: every method is safe from any thread and has taken effect when it returns.
class TcpProxy {
 public:
  /// Forwards connections to 127.0.0.1:target_port. Throws std::system_error if it can't listen.
  explicit TcpProxy(std::uint16_t target_port);
  ~TcpProxy();
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  /// Where it listens.
  std::uint16_t port() const;
  /// "tcp://127.0.0.1:<port>"
  std::string address() const;

  /// Resets every connection, losing what is under way, and every new one until Restore.
  void CutNow();
  void Restore();

  /// Forwards nothing for so long, without closing anything. 0 ends a stall.
  void StallFor(int ms);

  /// Cuts once `bytes` more have been forwarded to the target, over all connections, in the middle
  /// of a message if it comes to that; stays cut until Restore, or not if `restore`.
  void CutAfterBytes(std::uint64_t bytes, bool restore = false);
  /// The same by the bytes that are forwarded back from the target.
  void CutBackAfterBytes(std::uint64_t bytes, bool restore = false);

  /// Bytes forwarded to the target and back, over all connections.
  std::uint64_t forwarded_to_target() const;
  std::uint64_t forwarded_back() const;
  /// Connections accepted and forwarded.
  std::uint64_t accepted() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

/// The port at the end of "tcp://host:port".
std::uint16_t PortOf(const std::string& address);

}  // namespace gradwire
