#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "common/base/blob.h"
#include "common/base/status.h"
#include "common/wire/header.h"

namespace gradwire {

/// One connection's other end, as one Loop numbers it. 0 is nobody. A peer that comes back after a
/// cut is a new peer on the listening side and the same peer on the connecting side.
using PeerId = std::uint64_t;

/// Receives what happens on a Loop. Every method runs on the loop's thread.
class LoopHandler {
 public:
  virtual ~LoopHandler() = default;

  /// A message that passed ParseHeader. The payload may be kept; its address may be odd.
  virtual void OnMessage(PeerId from, const Header& header, Payload payload) = 0;
  /// A connection made by Connect is up (again). Nothing sent before it is still under way.
  virtual void OnUp(PeerId peer) { (void)peer; }
  /// The connection is down and is being made anew; whatever was sent and not yet received is lost.
  virtual void OnDown(PeerId peer) { (void)peer; }
  /// No message is waiting: time to flush what was batched.
  virtual void OnIdle() {}
};

/// What came from those who are not part of the job, or who broke the transport's rules.
struct StrangerCounters {
  std::uint64_t not_zmtp = 0;      // connections that broke ZeroMQ's handshake
  std::uint64_t closed_early = 0;  // connections that ended, or were ended, in the middle of it
  std::uint64_t never_spoke = 0;   // connections that ended without one message
  std::uint64_t chosen_routing_id = 0;  // messages whose sender chose its own name
  std::uint64_t bad_frames = 0;         // messages of the wrong number of frames
  std::uint64_t bad_headers = 0;        // messages whose header did not parse
  std::uint64_t accept_failures = 0;    // connections that could not be taken: no descriptors

  StrangerCounters& operator+=(const StrangerCounters& other);
  /// Those that are not 0: "not_zmtp=2 bad_headers=1"; empty if none is.
  std::string Describe() const;
};

/// What went over a loop's connections: frames and the transport's own framing, without TCP/IP.
struct TrafficCounters {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t sent_messages = 0;
  std::uint64_t received_messages = 0;
  /// Messages that were no message of ours, and connections that did not speak ZeroMQ.
  std::uint64_t refused_messages = 0;
  StrangerCounters strangers;
};

/// A thread with its sockets: everything that happens on it happens in sequence, so the state of a
/// protocol that lives there needs no lock.
///
/// Contract of every implementation (one conformance suite):
/// - Between one OnUp and the next OnDown messages to and from a peer arrive whole, once, in order.
/// - A cut loses a suffix of what was sent; nothing arrives late from before it. The connecting
///   side is told (OnDown, later OnUp) and makes the connection anew by itself; the listening side
///   sees a new PeerId and learns of the cut only by silence or by a failed Send. What the old
///   connection had already brought may be read after the new one's first message, but under the
///   old PeerId: the peer of a rank is the one that said Hello last.
/// - A payload's owner is released once, on any thread, when no byte of it will be read again.
/// - Sending does not block and does not copy payloads of at least kZeroCopyBytes.
class Loop {
 public:
  using Task = std::function<void()>;

  virtual ~Loop() = default;

  /// Listens, before Start. Port 0 takes a free one. Returns the address with its real port.
  /// Errors: Unavailable naming address, port and reason.
  virtual Result<std::string> Listen(const std::string& address) = 0;

  /// Starts the thread. The handler outlives Stop.
  virtual Status Start(LoopHandler* handler, const std::string& thread_name) = 0;

  /// Begins to connect; OnUp tells when it stands, tried again for ever until Disconnect or Stop.
  /// The side that connects speaks first, soon after OnUp: a listener may end connections that
  /// never do. A name with several addresses is tried at each in turn, and afterwards first where
  /// it answered before. Looking a name up blocks the loop's thread, so it is done at the start
  /// only: here, and again when all its addresses have failed, until it has been up once.
  /// Threads: the loop's.  Errors: InvalidArgument for an address that can't be one.
  virtual Result<PeerId> Connect(const std::string& address) = 0;
  /// Ends a connection for good; what is queued is dropped. No callback for it follows.
  /// Threads: the loop's.
  virtual void Disconnect(PeerId peer) = 0;

  /// Hands a message over. Threads: the loop's.
  /// Errors: Unavailable if the peer is not there (the message is dropped and its owner released).
  virtual Status Send(PeerId to, const Header& header, Payload payload) = 0;

  /// Where the message comes from that OnMessage is handling: the other end's address without its
  /// port ("10.0.0.3"), empty where the transport has none (ipc, in process).
  /// Threads: the loop's, inside of OnMessage only.
  virtual std::string SenderAddress() = 0;

  /// Runs the task on the loop's thread, in order of posting. Threads: any. Tasks posted after Stop
  /// are dropped.
  virtual void Post(Task task) = 0;
  /// Runs the task on the loop's thread after a delay. Threads: the loop's.
  virtual void PostAfter(int delay_ms, Task task) = 0;

  /// Runs what was posted before, ends the thread and releases all payloads: when it returns no
  /// owner is held any more (in process, receivers may still hold what was delivered to them). What
  /// is queued for sending is given up to `linger_ms` to leave. Threads: any but the loop's.
  virtual void Stop(int linger_ms = 0) = 0;

  /// Threads: any.
  virtual TrafficCounters traffic() const = 0;
};

/// Payloads from this size on are sent without a copy; below it a copy is cheaper than sharing.
inline constexpr std::size_t kZeroCopyBytes = 64 * 1024;

}  // namespace gradwire
