#include "common/wire/header.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "common/wire/limits.h"
#include "gradwire/v1/wire.pb.h"

namespace gradwire {
namespace {

constexpr std::uint32_t kLastKind = static_cast<std::uint32_t>(MessageKind::kStep);
constexpr std::uint32_t kLastReply = static_cast<std::uint32_t>(ReplyKind::kNonfinite);
constexpr std::uint32_t kLastError = static_cast<std::uint32_t>(StatusCode::kInternal);

// Messages are reused, one a thread: a flat message without texts allocates nothing once it exists.
// Writing has one of its own, since a parsed message keeps fields it doesn't know and would write
// them out again, beyond the bound on what we send.
v1::Header& MessageToWrite() {
  thread_local v1::Header message;
  return message;
}

v1::Header& MessageToParse() {
  thread_local v1::Header message;
  return message;
}

}  // namespace

std::string_view MessageKindName(MessageKind kind) {
  switch (kind) {
    case MessageKind::kHello:
      return "Hello";
    case MessageKind::kWelcome:
      return "Welcome";
    case MessageKind::kDeclare:
      return "Declare";
    case MessageKind::kPlan:
      return "Plan";
    case MessageKind::kPlanAck:
      return "PlanAck";
    case MessageKind::kPush:
      return "Push";
    case MessageKind::kReceipt:
      return "Receipt";
    case MessageKind::kReply:
      return "Reply";
    case MessageKind::kRepull:
      return "Repull";
    case MessageKind::kPushAgain:
      return "PushAgain";
    case MessageKind::kBarrier:
      return "Barrier";
    case MessageKind::kBarrierDone:
      return "BarrierDone";
    case MessageKind::kGoodbye:
      return "Goodbye";
    case MessageKind::kGoodbyeAck:
      return "GoodbyeAck";
    case MessageKind::kError:
      return "Error";
    case MessageKind::kHeartbeat:
      return "Heartbeat";
    case MessageKind::kShutdown:
      return "Shutdown";
    case MessageKind::kReadState:
      return "ReadState";
    case MessageKind::kState:
      return "State";
    case MessageKind::kWriteState:
      return "WriteState";
    case MessageKind::kStateWritten:
      return "StateWritten";
    case MessageKind::kAskInterval:
      return "AskInterval";
    case MessageKind::kAskStep:
      return "AskStep";
    case MessageKind::kStep:
      return "Step";
  }
  return "invalid";
}

HeaderBytes SerializeHeader(const Header& header) {
  v1::Header& message = MessageToWrite();
  message.set_protocol_version(kProtocolVersion);
  message.set_kind(static_cast<std::uint32_t>(header.kind));
  message.set_rank(header.rank);
  message.set_incarnation(header.incarnation);
  message.set_plan_version(header.plan_version);
  message.set_phase(header.phase);
  message.set_step(header.step);
  message.set_round(header.round);
  message.set_key(header.key);
  message.set_sequence(header.sequence);
  message.set_reply(static_cast<std::uint32_t>(header.reply));
  message.set_nonfinite(header.nonfinite);
  message.set_error(static_cast<std::uint32_t>(header.error));
  message.set_learning_rate(header.learning_rate);
  message.set_loss_scale(header.loss_scale);

  HeaderBytes bytes;
  // At most 120 bytes even with every field at its type's limit: five numbers of 64 bits (11 with
  // their tags), six of 32 bits (6), one fixed and two doubles (9) and a bool (2).
  bytes.size_ = message.ByteSizeLong();
  message.SerializeWithCachedSizesToArray(
      reinterpret_cast<std::uint8_t*>(bytes.bytes_.data()));  // NOLINT: protobuf's byte type
  return bytes;
}

Result<Header> ParseHeader(ByteView bytes) {
  if (bytes.size() > kMaxHeaderBytes) {
    return CorruptData(
        fmt::format("header is {} bytes, expected at most {}", bytes.size(), kMaxHeaderBytes));
  }
  v1::Header& message = MessageToParse();
  const bool parsed = message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  // The version comes first: a later protocol may give every other field another meaning.
  if (parsed && message.protocol_version() != kProtocolVersion) {
    return CorruptData(fmt::format("header.protocol_version is {}, expected {}",
                                   message.protocol_version(), kProtocolVersion));
  }
  if (!parsed) return CorruptData(fmt::format("{} bytes are not a header", bytes.size()));
  if (message.kind() == 0 || message.kind() > kLastKind) {
    return CorruptData(
        fmt::format("header.kind is {}, expected 1 to {}", message.kind(), kLastKind));
  }
  if (message.rank() >= kMaxRanks) {
    return CorruptData(
        fmt::format("header.rank is {}, expected less than {}", message.rank(), kMaxRanks));
  }
  if (message.phase() >= kMaxPhases) {
    return CorruptData(
        fmt::format("header.phase is {}, expected less than {}", message.phase(), kMaxPhases));
  }
  if (message.reply() > kLastReply) {
    return CorruptData(
        fmt::format("header.reply is {}, expected 0 to {}", message.reply(), kLastReply));
  }
  if (message.error() > kLastError) {
    return CorruptData(
        fmt::format("header.error is {}, expected 0 to {}", message.error(), kLastError));
  }
  Header header;
  header.kind = static_cast<MessageKind>(message.kind());
  header.rank = message.rank();
  header.incarnation = message.incarnation();
  header.plan_version = message.plan_version();
  header.phase = message.phase();
  header.step = message.step();
  header.round = message.round();
  header.key = message.key();
  header.sequence = message.sequence();
  header.reply = static_cast<ReplyKind>(message.reply());
  header.nonfinite = message.nonfinite();
  header.error = static_cast<StatusCode>(message.error());
  header.learning_rate = message.learning_rate();
  header.loss_scale = message.loss_scale();

  // A field that contradicts its kind would be read by nobody, or by the wrong code.
  if ((header.kind == MessageKind::kReply) != (header.reply != ReplyKind::kNone)) {
    return CorruptData(fmt::format("header.reply is {} in a {}, expected {}", message.reply(),
                                   MessageKindName(header.kind),
                                   header.kind == MessageKind::kReply ? "1 or 2" : "0"));
  }
  if ((header.kind == MessageKind::kError) != (header.error != StatusCode::kOk)) {
    return CorruptData(fmt::format("header.error is {} in a {}, expected {}", message.error(),
                                   MessageKindName(header.kind),
                                   header.kind == MessageKind::kError ? "not 0" : "0"));
  }
  if (header.nonfinite && header.kind != MessageKind::kPush) {
    return CorruptData(fmt::format("header.nonfinite is true in a {}, expected only in a Push",
                                   MessageKindName(header.kind)));
  }
  for (const auto& [name, value] : {std::pair{"learning_rate", header.learning_rate},
                                    std::pair{"loss_scale", header.loss_scale}}) {
    if (!std::isfinite(value) || value < 0) {
      return CorruptData(
          fmt::format("header.{} is {}, expected a finite number from 0", name, value));
    }
    if (value != 0 && header.kind != MessageKind::kPush) {
      return CorruptData(fmt::format("header.{} is {} in a {}, expected only in a Push", name,
                                     value, MessageKindName(header.kind)));
    }
  }
  return header;
}

}  // namespace gradwire
