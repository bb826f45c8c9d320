#include "server/lane.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/random.h"

namespace gradwire {
namespace {

// Receipts are batched until the queue runs empty, but a worker with a small credit must not wait
// for that behind a long queue.
constexpr std::size_t kReceiptEveryBytes = 256 * 1024;

// Peers that get an answer to a hello that is refused; further ones are only counted.
constexpr std::size_t kMaxRefusedPeers = 1024;

// The text of an Error message, cut to what a log line bears.
std::string ErrorText(const Payload& payload) {
  constexpr std::size_t kMost = 4096;
  return std::string(AsText(payload.bytes.first(std::min(payload.size(), kMost))));
}

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

Lane::Lane(const Config& config, std::uint32_t server, std::uint32_t lane,
           std::unique_ptr<Loop> loop, CodecCache& codecs, ResidualStore& residuals,
           Executor& executor, BufferPool& pool, LaneOwner& owner)
    : config_(config),
      server_(server),
      lane_(lane),
      owner_(owner),
      pool_(pool),
      loop_(std::move(loop)),
      shard_(
          {server, lane, config.job.workers, config.job.seed}, codecs, residuals, executor, pool,
          [this](std::function<void()> task) { loop_->Post(std::move(task)); }, *this),
      incarnation_(RandomId()),
      workers_(config.job.workers),
      receipt_every_bytes_(std::min<std::size_t>(kReceiptEveryBytes, config.partition.credit / 2)) {
  receipts_due_.reserve(config.job.workers);
}

Lane::~Lane() = default;

Result<std::string> Lane::Listen(const std::string& address) { return loop_->Listen(address); }

Status Lane::Start(std::vector<std::string> lane_addresses, const CompressorRegistry& registry) {
  lane_addresses_ = std::move(lane_addresses);
  if (server_ == 0 && lane_ == 0) {
    root_ = std::make_unique<Root>(config_, registry, lane_addresses_, *this);
  }
  started_at_ = last_progress_ = last_report_ = root_lost_at_ = Clock::now();
  GRADWIRE_RETURN_IF_ERROR(loop_->Start(this, fmt::format("gw-lane-{}", lane_)));
  loop_->Post([this] {
    if (server_ > 0 && lane_ == 0) {
      const auto peer = loop_->Connect(config_.endpoint);
      if (peer.ok()) {
        root_peer_ = *peer;
      } else {
        Fail(peer.status());
      }
    }
    Tick();
  });
  return Status::Ok();
}

void Lane::Stop(int linger_ms) { loop_->Stop(linger_ms); }

void Lane::OnMessage(PeerId from, const Header& header, Payload payload) {
  if (header.kind == MessageKind::kHello) {
    OnHello(from, header, payload);
    return;
  }
  if (from == root_peer_ && root_peer_ != 0) {
    OnRootMessage(header, payload);
    return;
  }
  if (const auto worker = ranks_.find(from); worker != ranks_.end()) {
    OnWorkerMessage(worker->second, header, std::move(payload));
    return;
  }
  if (const auto server = servers_.find(from); server != servers_.end()) {
    server->second.second = Clock::now();
    if (header.kind == MessageKind::kPlanAck) {
      root_->OnPlanAck(server->second.first, header.plan_version);
    } else if (header.kind == MessageKind::kError) {
      Fail({header.error, fmt::format("server {}: {}", server->second.first, ErrorText(payload))});
    }
    return;
  }
  // Nobody we know: what a connection sends before its hello, or a stranger.
  ++refused_;
}

void Lane::OnHello(PeerId from, const Header& header, const Payload& payload) {
  const auto parsed = ParseHello(payload.bytes);
  if (!parsed.ok()) {
    Refuse(from, parsed.status());
    return;
  }
  const Hello& hello = *parsed;
  if (hello.protocol_version != kProtocolVersion) {
    Refuse(from, InvalidArgument(fmt::format("{} {} speaks protocol version {}, this server {}",
                                             RoleName(hello.role), hello.rank,
                                             hello.protocol_version, kProtocolVersion)));
    return;
  }
  if (hello.job_id != config_.job.id) {
    Refuse(from, InvalidArgument(fmt::format("{} {} belongs to job '{}', this server to job '{}'",
                                             RoleName(hello.role), hello.rank, hello.job_id,
                                             config_.job.id)));
    return;
  }
  if (hello.role == Role::kWorker) {
    if (hello.rank >= workers_.size()) {
      Refuse(from, InvalidArgument(fmt::format("worker {} is out of range: the job has {} workers",
                                               hello.rank, workers_.size())));
      return;
    }
    const Worker& known = workers_[hello.rank];
    if (known.incarnation != 0 && known.incarnation != hello.incarnation) {
      Refuse(from, InvalidArgument(fmt::format("worker {} is already in the job in another "
                                               "incarnation; a restart inside a running job is "
                                               "not possible",
                                               hello.rank)));
      return;
    }
    // Connections are read in any order: a hello of one that has been cut meanwhile may come late.
    if (known.incarnation != 0 && header.sequence <= known.hello) return;
    workers_[hello.rank].hello = header.sequence;
    // Attached first: the root answers through the new connection.
    Attach(from, hello);
    if (!failure_.ok()) {
      Tell(workers_[hello.rank]);
      return;
    }
    if (!IsRoot()) {
      Header welcome;
      welcome.kind = MessageKind::kWelcome;
      Send(from, welcome, Serialize(Welcome{config_.job.workers, config_.job.servers, {}}));
      return;
    }
  } else if (!IsRoot()) {
    Refuse(from, InvalidArgument("this is not the root: servers say hello to the root"));
    return;
  }
  last_progress_ = Clock::now();
  if (Status status = root_->OnHello(from, hello); !status.ok()) {
    Refuse(from, status);
    return;
  }
  if (hello.role == Role::kServer) {
    std::erase_if(servers_, [&](const auto& entry) { return entry.second.first == hello.rank; });
    servers_[from] = {hello.rank, Clock::now()};
  }
}

void Lane::Attach(PeerId peer, const Hello& hello) {
  Worker& worker = workers_[hello.rank];
  if (worker.peer != 0) ranks_.erase(worker.peer);
  worker.peer = peer;
  worker.incarnation = hello.incarnation;
  worker.held = 0;
  worker.unreceipted_bytes = 0;
  worker.last_heard = Clock::now();
  ranks_[peer] = hello.rank;
}

void Lane::Refuse(PeerId peer, const Status& status) {
  LogRefusal(status.message());
  // One answer a peer, so that a flood of hellos does not fill the queue to a peer that never
  // reads.
  if (refused_peers_.size() >= kMaxRefusedPeers || !refused_peers_.insert(peer).second) return;
  Header header;
  header.kind = MessageKind::kError;
  header.error = status.code();
  const ByteView text = AsBytes(status.message());
  Send(peer, header, {text.begin(), text.end()});
}

void Lane::LogRefusal(const std::string& text) {
  ++refused_;
  if (const auto suppressed = refusal_log_.Admit()) {
    LogWarn("lane", "refused", {Field("reason", text), Field("suppressed", *suppressed)});
  }
}

void Lane::OnWorkerMessage(std::uint32_t rank, const Header& header, Payload payload) {
  Worker& worker = workers_[rank];
  worker.last_heard = Clock::now();
  if (failed_) return;
  if (header.incarnation != worker.incarnation || header.rank != rank) {
    LogRefusal(fmt::format("{} from worker {}'s connection names worker {} in incarnation {:x}",
                           MessageKindName(header.kind), rank, header.rank, header.incarnation));
    return;
  }
  switch (header.kind) {
    case MessageKind::kPush:
      worker.held = header.sequence;
      worker.unreceipted_bytes += payload.size();
      if (!worker.receipt_due) {
        worker.receipt_due = true;
        receipts_due_.push_back(rank);
      }
      last_progress_ = worker.last_heard;
      shard_.OnPush(rank, header, std::move(payload));
      if (worker.unreceipted_bytes >= receipt_every_bytes_) SendReceipt(worker);
      return;
    case MessageKind::kRepull:
      shard_.OnRepull(rank, header);
      return;
    case MessageKind::kGoodbye: {
      Header ack;
      ack.kind = MessageKind::kGoodbyeAck;
      Send(worker.peer, ack, {});
      if (!worker.said_goodbye) {
        worker.said_goodbye = true;
        if (++goodbyes_ == workers_.size()) owner_.OnLaneFinished(lane_);
      }
      return;
    }
    case MessageKind::kDeclare: {
      if (!IsRoot()) break;
      auto declare = ParseDeclare(payload.bytes);
      if (!declare.ok()) {
        Fail({declare.status().code(),
              fmt::format("worker {}: {}", rank, declare.status().message())});
        return;
      }
      last_progress_ = worker.last_heard;
      root_->OnDeclare(rank, std::move(declare).value());
      return;
    }
    case MessageKind::kBarrier:
      if (!IsRoot()) break;
      last_progress_ = worker.last_heard;
      root_->OnBarrier(rank, header.round);
      return;
    case MessageKind::kError:
      Fail({header.error, fmt::format("worker {}: {}", rank, ErrorText(payload))});
      return;
    case MessageKind::kHeartbeat:
      return;
    default:
      break;
  }
  LogRefusal(fmt::format("worker {} sent a {}, which a {} does not take", rank,
                         MessageKindName(header.kind), IsRoot() ? "root" : "server"));
}

void Lane::OnRootMessage(const Header& header, const Payload& payload) {
  switch (header.kind) {
    case MessageKind::kPlan: {
      auto plan = ParsePlan(payload.bytes);
      if (!plan.ok()) {
        Fail(plan.status());
        return;
      }
      owner_.InstallOnAllLanes(std::make_shared<const Plan>(std::move(plan).value()));
      return;
    }
    case MessageKind::kError:
      Fail({header.error, ErrorText(payload)});
      return;
    default:
      return;  // Welcome and whatever a newer root may say
  }
}

void Lane::OnPlanInstalled(std::uint64_t version) {
  if (IsRoot()) {
    root_->OnPlanAck(0, version);
    return;
  }
  Header ack;
  ack.kind = MessageKind::kPlanAck;
  ack.rank = server_;
  ack.incarnation = incarnation_;
  ack.plan_version = version;
  Send(root_peer_, ack, {});
}

void Lane::OnUp(PeerId peer) {
  if (peer != root_peer_) return;
  root_is_up_ = root_was_up_ = true;
  Header header;
  header.kind = MessageKind::kHello;
  header.rank = server_;
  header.incarnation = incarnation_;
  Hello hello;
  hello.job_id = config_.job.id;
  hello.protocol_version = kProtocolVersion;
  hello.role = Role::kServer;
  hello.rank = server_;
  hello.incarnation = incarnation_;
  hello.shared_config = SharedConfig(config_);
  hello.lane_addresses = lane_addresses_;
  Send(peer, header, Serialize(hello));
}

void Lane::OnDown(PeerId peer) {
  if (peer != root_peer_) return;
  root_is_up_ = false;
  root_lost_at_ = Clock::now();
}

void Lane::OnIdle() {
  for (const std::uint32_t rank : receipts_due_) {
    Worker& worker = workers_[rank];
    if (worker.unreceipted_bytes > 0 || worker.receipt_due) SendReceipt(worker);
    worker.receipt_due = false;
  }
  receipts_due_.clear();
}

void Lane::SendReceipt(Worker& worker) {
  Header header;
  header.kind = MessageKind::kReceipt;
  header.sequence = worker.held;
  worker.unreceipted_bytes = 0;
  // A peer that is gone comes back with a hello and sends again what has no receipt.
  (void)loop_->Send(worker.peer, header, {});
}

void Lane::Reply(std::uint32_t rank, const Header& header, const Payload& payload) {
  Worker& worker = workers_[rank];
  // The reply implies the receipt of what this worker has sent so far.
  Header with_receipt = header;
  with_receipt.sequence = worker.held;
  worker.unreceipted_bytes = 0;
  (void)loop_->Send(worker.peer, with_receipt, payload);  // lost ones are pulled again
}

void Lane::Send(PeerId to, const Header& header, std::vector<std::byte> body) {
  Payload payload;
  if (!body.empty()) {
    const PooledBuffer buffer = pool_.Acquire(body.size());
    std::memcpy(buffer.bytes().data(), body.data(), body.size());
    payload = buffer.Share(body.size());
  }
  if (const Status status = loop_->Send(to, header, std::move(payload)); !status.ok()) {
    LogDebug("lane", "not sent",
             {Field("kind", MessageKindName(header.kind)), Field("reason", status.message())});
  }
}

void Lane::InstallLocally(std::shared_ptr<const Plan> plan) {
  owner_.InstallOnAllLanes(std::move(plan));
}

void Lane::Fail(Status status) {
  if (failed_) return;
  failed_ = true;
  owner_.OnLaneFailed(std::move(status));
}

void Lane::Announce(const Status& status) {
  failed_ = true;
  if (!failure_.ok()) return;
  failure_ = status;
  shard_.Abandon();
  for (Worker& worker : workers_) {
    if (worker.peer != 0) Tell(worker);
  }
  Header header;
  header.kind = MessageKind::kError;
  header.error = status.code();
  const ByteView view = AsBytes(status.message());
  const std::vector<std::byte> text(view.begin(), view.end());
  for (const auto& [peer, server] : servers_) Send(peer, header, text);
  if (root_peer_ != 0 && root_is_up_) Send(root_peer_, header, text);
}

void Lane::Tell(Worker& worker) {
  Header header;
  header.kind = MessageKind::kError;
  header.error = failure_.code();
  const ByteView text = AsBytes(failure_.message());
  Send(worker.peer, header, {text.begin(), text.end()});
  worker.told_failure = true;
  if (std::all_of(workers_.begin(), workers_.end(),
                  [](const Worker& each) { return each.told_failure || each.said_goodbye; }) &&
      !std::exchange(everyone_told_, true)) {
    owner_.OnEveryoneTold(lane_);
  }
}

void Lane::CheckThatNobodyWaitsForTheGone() {
  if (goodbyes_ == 0 || goodbyes_ == workers_.size()) return;
  for (std::uint32_t rank = 0; rank < workers_.size(); ++rank) {
    if (!workers_[rank].said_goodbye) continue;
    std::string waits = shard_.DescribeRoundThatWaitsFor(rank);
    if (waits.empty() && IsRoot()) waits = root_->DescribeCallThatWaitsFor(rank);
    if (waits.empty()) continue;
    Fail(InvalidArgument(
        fmt::format("worker {} has left, and others wait for it: {}", rank, waits)));
    return;
  }
}

void Lane::Tick() {
  const Clock::time_point now = Clock::now();
  const Config::Timeouts& timeouts = config_.timeouts;
  const auto ms = [](int count) { return std::chrono::milliseconds(count); };
  if (!failed_ && IsRoot() && !root_->everyone_is_here()) {
    if (now - started_at_ > ms(timeouts.start_ms)) {
      Fail(Timeout(fmt::format("not started within {:.1f} s: missing {}",
                               timeouts.start_ms / 1000.0, root_->DescribeMissing())));
    } else if (now - last_report_ > ms(3000)) {
      last_report_ = now;
      LogInfo("root", "waiting",
              {Field("missing", root_->DescribeMissing()),
               Field("seconds", fmt::format("{:.0f}", Seconds(now - started_at_)))});
    }
  }
  if (!failed_) CheckThatNobodyWaitsForTheGone();
  if (!failed_) {
    for (std::uint32_t rank = 0; rank < workers_.size(); ++rank) {
      const Worker& worker = workers_[rank];
      if (worker.peer == 0 || worker.said_goodbye) continue;
      if (now - worker.last_heard > ms(timeouts.dead_after_ms)) {
        Fail(Unavailable(fmt::format("worker {} is lost: nothing heard for {:.1f} s", rank,
                                     Seconds(now - worker.last_heard))));
        break;
      }
    }
    for (const auto& [peer, server] : servers_) {
      if (now - server.second > ms(timeouts.dead_after_ms)) {
        Fail(Unavailable(fmt::format("server {} is lost: nothing heard for {:.1f} s", server.first,
                                     Seconds(now - server.second))));
        break;
      }
    }
    if (root_peer_ != 0 && !root_is_up_) {
      const int limit = root_was_up_ ? timeouts.dead_after_ms : timeouts.start_ms;
      if (now - root_lost_at_ > ms(limit)) {
        Fail(Unavailable(fmt::format("the root at {} is lost: no connection for {:.1f} s",
                                     config_.endpoint, Seconds(now - root_lost_at_))));
      }
    }
  }
  if (!failed_ && root_peer_ != 0 && root_is_up_) {
    Header heartbeat;
    heartbeat.kind = MessageKind::kHeartbeat;
    heartbeat.rank = server_;
    heartbeat.incarnation = incarnation_;
    (void)loop_->Send(root_peer_, heartbeat, {});
  }
  if (!failed_ && now - last_progress_ > ms(timeouts.stall_warn_ms) &&
      now - last_report_ > ms(timeouts.stall_warn_ms)) {
    std::string open = shard_.DescribeOpenRounds();
    if (IsRoot()) {
      const std::string calls = root_->DescribeOpenCalls();
      if (!calls.empty()) open += (open.empty() ? "" : "; ") + calls;
    }
    if (!open.empty()) {
      last_report_ = now;
      LogWarn("lane", "stalled",
              {Field("seconds", fmt::format("{:.0f}", Seconds(now - last_progress_))),
               Field("open", open)});
      if (now - last_progress_ > ms(timeouts.stall_stop_ms)) {
        Fail(Timeout(fmt::format("stalled for {:.0f} s: {}", Seconds(now - last_progress_), open)));
      }
    }
  }
  if (!failed_)
    loop_->PostAfter(std::clamp(timeouts.dead_after_ms / 8, 20, 1000), [this] { Tick(); });
}

}  // namespace gradwire
