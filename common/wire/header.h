#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/base/bytes.h"
#include "common/base/status.h"

namespace gradwire {

/// Version of the protocol; both ends of a connection must speak the same.
inline constexpr std::uint32_t kProtocolVersion = 1;

/// What a message is. The numbers are on the wire: never reuse one.
enum class MessageKind : std::uint8_t {
  kHello = 1,         // payload: Hello. First message of a connection, from the side that connects.
  kWelcome = 2,       // payload: Welcome. The answer.
  kDeclare = 3,       // payload: Declare. Worker to root.
  kPlan = 4,          // payload: Plan. Root to servers and workers.
  kPlanAck = 5,       // server to root: plan_version is installed.
  kPush = 6,          // payload: codec bytes. Worker to server.
  kReceipt = 7,       // server to worker: holds every push of this connection up to `sequence`.
  kReply = 8,         // payload: codec bytes. Server to worker.
  kRepull = 9,        // worker to server after a reconnect: I still wait for (key, round).
  kPushAgain = 10,    // server to worker: answer to a Repull whose push I do not hold.
  kBarrier = 11,      // worker to root: I have reached barrier number `round`.
  kBarrierDone = 12,  // root to worker
  kGoodbye = 13,      // worker to server: I shall push no more.
  kGoodbyeAck = 14,
  kError = 15,  // payload: text. `error` says its code; the job (or the connection) is over.
  kHeartbeat = 16,
  kShutdown = 17,  // root to servers: every worker has said goodbye.
  // A key's state, for checkpoints: its residual and the round that comes next (`round`).
  kReadState = 18,     // worker 0 to server
  kState = 19,         // payload: saved residual, or none. Server to worker.
  kWriteState = 20,    // payload: saved residual, or none. Worker 0 to server.
  kStateWritten = 21,  // server to worker
  // Another interval of the filter (docs/covap.md).
  kAskInterval = 22,  // worker 0 to root: I want the interval `step`.
  kAskStep = 23,      // root to workers, question `round`: how far are you? Go at most that many
                      // steps further than this, `step`, until the plan has a new stage.
  kStep = 24,         // worker to root: at question `round` I was at step `step`.
};

std::string_view MessageKindName(MessageKind kind);

/// What a reply brings. The numbers are on the wire.
enum class ReplyKind : std::uint8_t {
  kNone = 0,       // not a reply
  kResult = 1,     // the average or sum, compressed as the plan says
  kNonfinite = 2,  // void: some rank's contribution, or the sum, was not finite
};

/// The header of every message, in plain form. Fields that a kind does not use are 0.
struct Header {
  MessageKind kind = MessageKind::kHeartbeat;
  std::uint32_t rank = 0;         // sender's rank in its role
  std::uint64_t incarnation = 0;  // sender's life
  std::uint64_t plan_version = 0;
  std::uint32_t phase = 0;
  std::uint64_t step = 0;
  std::uint64_t round = 0;
  std::uint64_t key = 0;
  /// Push: its number on this connection, from 1. Receipt: the last number that is held.
  std::uint64_t sequence = 0;
  ReplyKind reply = ReplyKind::kNone;
  /// Push: the contribution is not finite and there is no payload.
  bool nonfinite = false;
  /// Push: what the contribution's scale depends on, the same on every rank; 0: not given. The rate
  /// is there if a residual of the unit follows it, the loss scale if the unit has a residual.
  double learning_rate = 0;
  double loss_scale = 0;
  StatusCode error = StatusCode::kOk;

  friend bool operator==(const Header&, const Header&) = default;
};

/// Bytes: no header is larger.
inline constexpr std::size_t kMaxHeaderBytes = 128;

/// A serialized header; lives on the stack.
class HeaderBytes {
 public:
  ByteView view() const { return ByteView(bytes_).first(size_); }

 private:
  friend HeaderBytes SerializeHeader(const Header& header);
  std::array<std::byte, kMaxHeaderBytes> bytes_{};
  std::size_t size_ = 0;
};

/// Threads: safe. Allocates nothing in steady state.
HeaderBytes SerializeHeader(const Header& header);

/// Parses and validates one header.
/// Errors: CorruptData for what is not a header, an unknown kind, another protocol version (both
/// named), or a field out of range.
/// Threads: safe. Allocates nothing in steady state.
Result<Header> ParseHeader(ByteView bytes);

}  // namespace gradwire
