#include "server/lane.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/random.h"
#include "common/transport/address.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// Receipts are batched until the queue runs empty, but a worker with a small credit must not wait
// for that behind a long queue.
constexpr std::size_t kReceiptEveryBytes = 256 * 1024;

// How often a server says that it has no connection to the root yet.
constexpr std::chrono::seconds kReportEvery(3);

// What one look at an address may take, for an error's text.
constexpr int kProbeMs = 500;

// Peers whose hello was refused that are remembered as answered. Then all are forgotten: whoever
// flooded may get one more answer, and those who come later are told as well.
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
  started_at_ = last_tick_ = last_report_ = root_last_heard_ = Clock::now();
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
  if (connecting_back_.contains(from)) {
    OnConnectedBack(from, header, payload);
    return;
  }
  if (const auto worker = ranks_.find(from); worker != ranks_.end()) {
    OnWorkerMessage(worker->second, header, std::move(payload));
    return;
  }
  if (const auto server = servers_.find(from); server != servers_.end()) {
    Life& life = server->second;
    life.last_heard = Clock::now();
    if (header.kind == MessageKind::kPlanAck) {
      root_->OnPlanAck(life.name.rank, header.plan_version);
    } else if (header.kind == MessageKind::kError) {
      Fail({header.error, fmt::format("{}: {}", Describe(life.name), ErrorText(payload))});
    }
    return;
  }
  // Nobody we know: what a connection sends before its hello, or a stranger. Many of them come at
  // once, so the text is made for those alone that are written.
  ++refused_.unknown_peer;
  if (const auto suppressed = unknown_log_.Admit()) {
    LogWarn("lane", "refused a message of somebody who has not said hello",
            {Field("kind", MessageKindName(header.kind)), Field("from", loop_->SenderAddress()),
             Field("suppressed", *suppressed)});
  }
}

void Lane::OnHello(PeerId from, const Header& header, const Payload& payload) {
  const auto parsed = ParseHello(payload.bytes);
  if (!parsed.ok()) {
    Refuse(&RefusalCounters::bad_hello, from, parsed.status());
    return;
  }
  const Hello& hello = *parsed;
  const std::string address = loop_->SenderAddress();
  const std::string who = Describe(NameOf(hello, address));
  if (hello.protocol_version != kProtocolVersion) {
    Refuse(&RefusalCounters::other_version, from,
           InvalidArgument(fmt::format("{} speaks protocol version {}, this server {}", who,
                                       hello.protocol_version, kProtocolVersion)));
    return;
  }
  if (hello.job_id != config_.job.id) {
    Refuse(&RefusalCounters::foreign_job, from,
           InvalidArgument(fmt::format("{} belongs to job '{}', this server to job '{}'", who,
                                       hello.job_id, config_.job.id)));
    return;
  }
  if (hello.role == Role::kWorker) {
    if (hello.rank >= workers_.size()) {
      Refuse(&RefusalCounters::out_of_range, from,
             InvalidArgument(
                 fmt::format("{} is out of range: the job has {} workers", who, workers_.size())));
      return;
    }
    const Worker& known = workers_[hello.rank];
    if (known.incarnation != 0 && known.incarnation != hello.incarnation) {
      // After a failure the newcomer hears of that: it is what has ended its first life.
      Refuse(&RefusalCounters::not_accepted, from,
             failure_.ok() ? RefuseTakenRank(NameOf(hello, address), known.life.name,
                                             !IsRoot() || root_->everyone_is_here())
                           : failure_);
      return;
    }
    // Connections are read in any order: a hello of one that has been cut meanwhile may come late.
    if (known.incarnation != 0 && header.sequence <= known.hello) return;
    workers_[hello.rank].hello = header.sequence;
    // Attached first: the root answers through the new connection.
    Attach(from, hello, address);
    if (!failure_.ok()) {
      Tell(workers_[hello.rank]);
      return;
    }
    if (!IsRoot()) {
      Header welcome;
      welcome.kind = MessageKind::kWelcome;
      Send(from, welcome, Serialize(Welcome{config_.job.workers, config_.job.servers, {}, false}));
      return;
    }
  } else if (!IsRoot() && hello.rank == 0) {
    // The root sees whether this lane's address leads here.
    Header welcome;
    welcome.kind = MessageKind::kWelcome;
    welcome.rank = server_;
    Send(from, welcome, Serialize(Welcome{config_.job.workers, config_.job.servers, {}, false}));
    return;
  } else if (!IsRoot()) {
    Refuse(&RefusalCounters::not_accepted, from,
           InvalidArgument(fmt::format(
               "{} says hello to server {} lane {}, which is not the root: `endpoint` must be "
               "where server 0 listens",
               who, server_, lane_)));
    return;
  } else if (!failure_.ok()) {
    Refuse(&RefusalCounters::not_accepted, from, failure_);
    return;
  }
  if (Status status = root_->OnHello(from, hello, address); !status.ok()) {
    Refuse(&RefusalCounters::not_accepted, from, status);
    return;
  }
  if (hello.role == Role::kServer) {
    std::erase_if(servers_,
                  [&](const auto& entry) { return entry.second.name.rank == hello.rank; });
    servers_[from] = {NameOf(hello, address), true, Clock::now()};
  }
}

void Lane::Attach(PeerId peer, const Hello& hello, const std::string& address) {
  Worker& worker = workers_[hello.rank];
  if (worker.peer != 0) ranks_.erase(worker.peer);
  worker.peer = peer;
  worker.incarnation = hello.incarnation;
  worker.held = 0;
  worker.unreceipted_bytes = 0;
  worker.life = {NameOf(hello, address), true, Clock::now()};
  ranks_[peer] = hello.rank;
}

void Lane::Refuse(std::uint64_t RefusalCounters::*kind, PeerId peer, const Status& status) {
  LogRefusal(kind, status.message());
  // One answer a peer, so that a flood of hellos does not fill the queue to a peer that never
  // reads.
  if (refused_peers_.size() >= kMaxRefusedPeers) refused_peers_.clear();
  if (refused_peers_.insert(peer).second) SendError(peer, status);
}

void Lane::SendError(PeerId peer, const Status& status) {
  Header header;
  header.kind = MessageKind::kError;
  header.error = status.code();
  const ByteView text = AsBytes(status.message());
  Send(peer, header, {text.begin(), text.end()});
}

void Lane::LogRefusal(std::uint64_t RefusalCounters::*kind, const std::string& text) {
  ++(refused_.*kind);
  if (const auto suppressed = refusal_log_.Admit()) {
    LogWarn("lane", "refused", {Field("reason", text), Field("suppressed", *suppressed)});
  }
}

void Lane::OnWorkerMessage(std::uint32_t rank, const Header& header, Payload payload) {
  Worker& worker = workers_[rank];
  const Clock::time_point now = Clock::now();
  worker.life.last_heard = now;
  if (failed_) return;
  if (header.incarnation != worker.incarnation || header.rank != rank) {
    LogRefusal(&RefusalCounters::out_of_place,
               fmt::format("{} from the connection of {} names worker {} in incarnation {:x}",
                           MessageKindName(header.kind), Describe(worker.life.name), header.rank,
                           header.incarnation));
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
      shard_.OnPush(rank, header, std::move(payload), now);
      if (worker.unreceipted_bytes >= receipt_every_bytes_) SendReceipt(worker);
      return;
    case MessageKind::kRepull:
      shard_.OnRepull(rank, header);
      return;
    case MessageKind::kReadState:
      shard_.OnReadState(rank, header);
      return;
    case MessageKind::kWriteState:
      shard_.OnWriteState(rank, header, payload);
      return;
    case MessageKind::kGoodbye: {
      Header ack;
      ack.kind = MessageKind::kGoodbyeAck;
      Send(worker.peer, ack, {});
      if (!worker.said_goodbye) {
        worker.said_goodbye = true;
        if (IsRoot()) root_->OnLeft(rank);
        if (++goodbyes_ == workers_.size()) owner_.OnLaneFinished(lane_);
      }
      return;
    }
    case MessageKind::kDeclare: {
      if (!IsRoot()) break;
      auto declare = ParseDeclare(payload.bytes);
      if (!declare.ok()) {
        Fail({declare.status().code(),
              fmt::format("{}: {}", Describe(worker.life.name), declare.status().message())});
        return;
      }
      root_->OnDeclare(rank, std::move(declare).value(), now);
      return;
    }
    case MessageKind::kBarrier:
      if (!IsRoot()) break;
      root_->OnBarrier(rank, header.round, header.step, now);
      return;
    case MessageKind::kAskInterval:
      if (!IsRoot()) break;
      root_->OnAskInterval(rank, header.step);
      return;
    case MessageKind::kStep:
      if (!IsRoot()) break;
      root_->OnStep(rank, header.round, header.step);
      return;
    case MessageKind::kError:
      Fail({header.error, fmt::format("{}: {}", Describe(worker.life.name), ErrorText(payload))});
      return;
    case MessageKind::kHeartbeat:
      return;
    default:
      break;
  }
  LogRefusal(&RefusalCounters::out_of_place,
             fmt::format("{} sent a {}, which a {} does not take", Describe(worker.life.name),
                         MessageKindName(header.kind), IsRoot() ? "root" : "server"));
}

void Lane::OnRootMessage(const Header& header, const Payload& payload) {
  root_last_heard_ = Clock::now();
  switch (header.kind) {
    case MessageKind::kWelcome:
      owner_.OnJobStarted();
      return;
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
      return;  // heartbeats and whatever a newer root may say
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

void Lane::ConnectBack(std::uint32_t server, std::uint32_t lane, const std::string& address) {
  const auto peer = loop_->Connect(address);
  if (peer.ok()) {
    connecting_back_[*peer] = {server, lane};
  } else {
    Fail(peer.status());
  }
}

void Lane::OnConnectedBack(PeerId from, const Header& header, const Payload& payload) {
  if (header.kind == MessageKind::kHeartbeat) return;
  const auto [server, lane] = connecting_back_[from];
  connecting_back_.erase(from);
  loop_->Disconnect(from);
  if (header.kind == MessageKind::kWelcome) {
    root_->OnLaneReached(server, lane, header.rank);
    return;
  }
  Fail(InvalidArgument(fmt::format(
      "the address that server {} advertises for its lane {} leads to somebody else, who answers: "
      "{}",
      server, lane,
      header.kind == MessageKind::kError ? ErrorText(payload)
                                         : std::string(MessageKindName(header.kind)))));
}

void Lane::OnUp(PeerId peer) {
  if (connecting_back_.contains(peer)) SayHello(peer);
  if (peer != root_peer_) return;
  root_is_up_ = root_was_up_ = true;
  root_last_heard_ = Clock::now();
  SayHello(peer);
}

void Lane::SayHello(PeerId peer) {
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
  hello.host = OwnHostName();
  hello.pid = static_cast<std::uint64_t>(getpid());
  Send(peer, header, Serialize(hello));
}

void Lane::OnDown(PeerId peer) {
  if (peer == root_peer_) root_is_up_ = false;
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
  for (const auto& [peer, server] : servers_) SendError(peer, status);
  if (root_peer_ != 0 && root_is_up_) SendError(root_peer_, status);
}

void Lane::Tell(Worker& worker) {
  SendError(worker.peer, failure_);
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
    Fail(Unavailable(fmt::format("{} has left, and others wait for it: {}",
                                 Describe(workers_[rank].life.name), waits)));
    return;
  }
}

void Lane::Tick() {
  const Clock::time_point now = Clock::now();
  SendHeartbeats(now);
  if (!failed_ && IsRoot()) root_->WatchStart(now);
  if (!failed_) CheckThatNobodyWaitsForTheGone();
  // A process that was stopped, or a thread that has computed for long, finds everybody silent: it
  // reads first what they have said meanwhile.
  const bool is_late = now - last_tick_ > milliseconds(config_.timeouts.dead_after_ms / 2);
  last_tick_ = now;
  if (!failed_ && !is_late) CheckThatAllAreAlive(now);
  if (!failed_ && !is_late) CheckStalls(now);
  if (failed_) return;
  loop_->PostAfter(std::min(config_.timeouts.auto_heartbeat(), config_.timeouts.heartbeat()),
                   [this] { Tick(); });
}

void Lane::SendHeartbeats(Clock::time_point now) {
  // A timer is a little early or late.
  if (now - last_heartbeat_ < milliseconds(config_.timeouts.heartbeat() * 9 / 10)) return;
  last_heartbeat_ = now;
  Header heartbeat;
  heartbeat.kind = MessageKind::kHeartbeat;
  heartbeat.rank = server_;
  heartbeat.incarnation = incarnation_;
  // The listening side learns only by sending that a connection is gone.
  for (Worker& worker : workers_) {
    if (worker.peer == 0 || worker.said_goodbye) continue;
    worker.life.up = loop_->Send(worker.peer, heartbeat, {}).ok();
  }
  for (auto& [peer, life] : servers_) life.up = loop_->Send(peer, heartbeat, {}).ok();
  if (root_peer_ != 0 && root_is_up_) (void)loop_->Send(root_peer_, heartbeat, {});
}

void Lane::CheckThatAllAreAlive(Clock::time_point now) {
  for (const Worker& worker : workers_) {
    if (worker.peer != 0 && !worker.said_goodbye) CheckThatLifeIsThere(worker.life, now);
  }
  for (const auto& [peer, life] : servers_) CheckThatLifeIsThere(life, now);
  if (root_peer_ != 0) CheckTheRoot(now);
}

void Lane::CheckThatLifeIsThere(const Life& life, Clock::time_point now) {
  if (life.up || now - life.last_heard <= milliseconds(config_.timeouts.dead_after_ms)) return;
  Fail(Unavailable(fmt::format("{} is lost: nothing heard for {:.1f} s and its connection is down",
                               Describe(life.name), Seconds(now - life.last_heard))));
}

void Lane::CheckTheRoot(Clock::time_point now) {
  if (root_is_up_) return;
  const Config::Timeouts& timeouts = config_.timeouts;
  const Clock::duration silence = now - root_last_heard_;
  if (root_was_up_) {
    if (silence <= milliseconds(timeouts.dead_after_ms)) return;
    Fail(Unavailable(
        fmt::format("server 0 (the root) at {} is lost: nothing heard for {:.1f} s and its "
                    "connection is down",
                    config_.endpoint, Seconds(silence))));
    return;
  }
  if (silence > milliseconds(timeouts.start_ms)) {
    Fail(
        Timeout(fmt::format("not started within {:.1f} s (timeouts.start): server {} has no "
                            "connection to the root at {}: {}",
                            timeouts.start_ms / 1000.0, server_, config_.endpoint,
                            DescribeReachability(config_.endpoint, kProbeMs))));
  } else if (now - last_report_ >= kReportEvery) {
    last_report_ = now;
    LogInfo("lane", "waiting for the root",
            {Field("endpoint", config_.endpoint),
             Field("seconds", fmt::format("{:.0f}", Seconds(silence))),
             Field("deadline_seconds", fmt::format("{:.0f}", timeouts.start_ms / 1000.0))});
  }
}

void Lane::CheckStalls(Clock::time_point now) {
  const milliseconds stop(config_.timeouts.stall_stop_ms);
  const milliseconds warn = std::min(milliseconds(config_.timeouts.stall_warn_ms), stop);
  Shard::OldRounds rounds = shard_.FindOldRounds(now - warn);
  std::vector<OpenCall> calls = std::move(rounds.oldest);
  std::size_t count = rounds.count;
  if (IsRoot()) {
    for (OpenCall& call : root_->OpenCalls()) {
      if (call.since >= now - warn) continue;
      ++count;
      calls.push_back(std::move(call));
    }
  }
  if (count == 0) return;
  std::sort(calls.begin(), calls.end(),
            [](const OpenCall& a, const OpenCall& b) { return a.since < b.since; });
  const Clock::duration age = now - calls.front().since;
  if (age >= stop) {
    Fail(Timeout(fmt::format("stalled for {:.1f} s (timeouts.stall_stop): {}", Seconds(age),
                             DescribeStall(std::move(calls), count, now))));
  } else if (now - last_report_ >= warn) {
    last_report_ = now;
    LogWarn("lane", "stalled",
            {Field("seconds", fmt::format("{:.1f}", Seconds(age))), Field("open", count),
             Field("oldest", DescribeStall(std::move(calls), count, now))});
  }
}

std::string Lane::DescribeStall(std::vector<OpenCall> calls, std::size_t count,
                                Clock::time_point now) const {
  constexpr std::size_t kMostCalls = 5;
  constexpr std::size_t kMostWorkers = 4;
  if (calls.size() > kMostCalls) calls.resize(kMostCalls);
  std::string text;
  std::vector<bool> missing(workers_.size(), false);
  for (const OpenCall& call : calls) {
    text += (text.empty() ? "" : "; ") + Describe(call, now);
    for (const std::uint32_t rank : call.missing) missing[rank] = true;
  }
  if (count > calls.size()) text += fmt::format("; and {} more", count - calls.size());
  std::size_t named = 0;
  for (const Worker& worker : workers_) {
    const auto rank = static_cast<std::size_t>(&worker - workers_.data());
    if (!missing[rank] || worker.peer == 0 || ++named > kMostWorkers) continue;
    text += fmt::format("{}{}{}", named == 1 ? "; missing: " : ", ", Describe(worker.life.name),
                        worker.life.up ? "" : ", whose connection is down");
  }
  if (named > kMostWorkers) text += fmt::format(" and {} more", named - kMostWorkers);
  return text;
}

}  // namespace gradwire
