// Connections, who is there and who is lost, messages, and what becomes of a failure.

#include <unistd.h>

#include <cstring>
#include <system_error>

#include "common/base/log.h"
#include "common/base/version.h"
#include "common/plan/plan.h"
#include "common/transport/address.h"
#include "worker/client/client_impl.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How often a loss is looked at while a probe is out or the root may still speak.
constexpr int kLossCheckMs = 50;
// What an attempt to connect may take. With the wait for it, the word on a lost server comes well
// within two seconds after dead_after.
constexpr int kProbeMs = 400;
constexpr milliseconds kProbeTimeout(600);
// A root that is there knows more of a lost server (its process), and tells everyone the same.
constexpr milliseconds kRootSpeaks(500);

constexpr milliseconds kReportStartEvery(3000);

// What a log line bears of somebody else's words.
constexpr std::size_t kMostErrorText = 4096;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

bool IsTcp(const std::string& address) { return address.starts_with("tcp://"); }

}  // namespace

// --- start --------------------------------------------------------------------------------------

Status ClientImpl::Init() {
  GRADWIRE_RETURN_IF_ERROR(loop_->Start(this, fmt::format("gw-worker-{}", rank_)));
  loop_started_ = true;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = begin + milliseconds(config_.timeouts.start_ms);
  loop_->Post([this] {
    AddConnection(config_.endpoint, 0, 0);
    Tick();
  });
  // First the root, then every lane it names.
  std::unique_lock lock(mu_);
  const auto done = [this] { return !error_.ok() || (have_addresses_ && AllWelcomed()); };
  bool in_time = false;
  while (!in_time && Clock::now() < deadline) {
    in_time = changed_.wait_until(lock, std::min(deadline, Clock::now() + kReportStartEvery), done);
    if (in_time || Clock::now() >= deadline) break;
    lock.unlock();
    LogInfo("client", "waiting",
            {Field("rank", rank_), Field("because", DescribeStart()),
             Field("seconds", fmt::format("{:.0f}", Seconds(Clock::now() - begin))),
             Field("deadline_seconds", config_.timeouts.start_ms / 1000.0)});
    lock.lock();
  }
  if (!in_time && !connections_.empty() && connections_[0]->was_up) {
    // The root knows who is missing and says so when its own deadline has passed.
    in_time = changed_.wait_for(lock, kServerSpeaks, done);
  }
  if (!error_.ok()) return error_;
  if (!in_time) {
    lock.unlock();
    const Status status =
        Timeout(fmt::format("worker {} could not start within {:.1f} s: {}", rank_,
                            config_.timeouts.start_ms / 1000.0, DescribeStart()));
    PostFail(status);
    lock.lock();
    changed_.wait_for(lock, kReleaseTimeout, [this] { return !error_.ok(); });
    return status;
  }
  lock.unlock();
  if (LogEnabled(LogLevel::kInfo)) {
    const auto own = IsTcp(config_.endpoint) ? LocalAddressTowards(config_.endpoint)
                                             : Result<std::string>("this process");
    LogInfo(
        "client", "connected",
        {Field("version", Version()), Field("rank", rank_), Field("workers", config_.job.workers),
         Field("servers", config_.job.servers), Field("job", config_.job.id),
         Field("root", config_.endpoint), Field("own_address", own.ok() ? *own : "unknown"),
         Field("default", ReduceOpName(TensorDeclaration{}.op))});
  }
  return Status::Ok();
}

std::string ClientImpl::DescribeStart() {
  std::vector<std::pair<std::string, std::string>> unreached;  // who, address
  std::string ungreeted;
  bool root_was_up = false;
  {
    const std::lock_guard lock(mu_);
    root_was_up = !connections_.empty() && connections_[0]->was_up;
    for (const auto& connection : connections_) {
      if (connection->up || connection->welcomed) continue;
      unreached.emplace_back(DescribeConnection(*connection), connection->address);
    }
    ungreeted = DescribeUngreeted();
  }
  if (unreached.empty()) return ungreeted;
  std::string text = "no connection to ";
  // The first one is tried: the others' reasons are mostly the same, and each attempt takes time.
  text += unreached[0].first;
  if (IsTcp(unreached[0].second)) {
    text += fmt::format(" ({})", DescribeReachability(unreached[0].second, kProbeMs));
  }
  for (std::size_t i = 1; i < unreached.size(); ++i) text += ", " + unreached[i].first;
  text += root_was_up
              ? "; is what its `server.bind`, `server.interface` or `server.advertise` says "
                "right for this host?"
              : "; is server 0 running, and is `endpoint` the same everywhere?";
  return text;
}

std::string ClientImpl::DescribeUngreeted() const {
  std::string text;
  for (const auto& connection : connections_) {
    if (connection->welcomed) continue;
    text += (text.empty() ? "" : ", ") + DescribeConnection(*connection);
  }
  if (text.empty()) return "it is connected and waits for the root's word";
  return "it is connected and waits for other processes (not yet welcomed by " + text + ")";
}

std::string ClientImpl::DescribeConnection(const Connection& connection) const {
  std::string text = fmt::format("server {} lane {} at {}", connection.server, connection.lane,
                                 connection.address);
  if (!connection.host.empty() && connection.address.find(connection.host) == std::string::npos) {
    text += fmt::format(" ({})", connection.host);
  }
  return text;
}

void ClientImpl::AddConnection(const std::string& address, std::uint32_t server,
                               std::uint32_t lane) {
  const auto peer = loop_->Connect(address);
  if (!peer.ok()) {
    Fail(peer.status());
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->address = address;
  connection->server = server;
  connection->lane = lane;
  connection->peer = *peer;
  connection->down_since = connection->last_heard = Clock::now();
  const std::lock_guard lock(mu_);
  connections_.push_back(std::move(connection));
}

bool ClientImpl::AllWelcomed() const {
  return std::all_of(connections_.begin(), connections_.end(),
                     [](const auto& connection) { return connection->welcomed; });
}

void ClientImpl::OnUp(PeerId peer) {
  std::size_t index = 0;
  std::vector<Header> repulls;
  std::optional<std::vector<std::byte>> declare;
  bool barrier = false;
  std::uint64_t barrier_number = 0;
  std::uint64_t barrier_step = 0;
  std::uint32_t interval = 0;
  bool goodbye = false;
  std::uint64_t hello_number = 0;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    while (index < connections_.size() && connections_[index]->peer != peer) ++index;
    if (index == connections_.size()) return;
    Connection& connection = *connections_[index];
    if (connection.was_up) ++stats_.reconnects;
    connection.up = connection.was_up = true;
    connection.last_heard = Clock::now();
    connection.next_sequence = 1;
    hello_number = ++connection.hellos;
    for (const auto& work : units_) {
      if (work->connection != index || work->state != UnitState::kSent || !work->receipted) {
        continue;
      }
      Header header;
      header.kind = MessageKind::kRepull;
      header.key = work->unit->key;
      header.round = work->round;
      header.step = work->step;
      header.phase = work->phase;
      header.plan_version = plan_->version;
      repulls.push_back(header);
    }
    if (index == 0) {
      declare = open_declare_;
      barrier = barriers_entered_ > barriers_done_;
      barrier_number = barriers_entered_ - 1;
      barrier_step = barrier_step_;
      interval = asked_interval_;
    }
    goodbye = leaving_ && !connection.goodbye_done;
  }
  Header header;
  header.kind = MessageKind::kHello;
  header.sequence = hello_number;
  Hello hello;
  hello.job_id = config_.job.id;
  hello.protocol_version = kProtocolVersion;
  hello.role = Role::kWorker;
  hello.rank = rank_;
  hello.incarnation = incarnation_;
  hello.shared_config = SharedConfig(config_);
  hello.host = OwnHostName();
  hello.pid = static_cast<std::uint64_t>(getpid());
  SendControl(index, header, Serialize(hello));
  header.sequence = 0;
  if (declare) {
    header.kind = MessageKind::kDeclare;
    SendControl(index, header, *declare);
  }
  if (barrier) {
    Header at_barrier;
    at_barrier.kind = MessageKind::kBarrier;
    at_barrier.round = barrier_number;
    at_barrier.step = barrier_step;
    SendControl(index, at_barrier, {});
  }
  if (interval > 0) {
    Header ask;
    ask.kind = MessageKind::kAskInterval;
    ask.step = interval;
    SendControl(index, ask, {});
  }
  // What has no receipt is in the queue again (OnDown) and goes first, then the questions.
  SendPump();
  for (const Header& repull : repulls) SendControl(index, repull, {});
  SendStateCall();
  if (goodbye) {
    header.kind = MessageKind::kGoodbye;
    SendControl(index, header, {});
  }
}

void ClientImpl::OnIdle() {
  if (!std::exchange(computed_, false)) return;
  const std::lock_guard lock(mu_);
  goodput_.CaughtUp(Clock::now());
}

void ClientImpl::OnDown(PeerId peer) {
  const std::lock_guard lock(mu_);
  for (const auto& connection : connections_) {
    if (connection->peer != peer) continue;
    connection->up = false;
    connection->down_since = Clock::now();
    ServerLink* const link =
        connection->server < servers_.size() ? &servers_[connection->server] : nullptr;
    while (!connection->unreceipted.empty()) {
      const Unreceipted sent = connection->unreceipted.Pop();
      link->window.Give(sent.bytes);
      goodput_.Lost();
      UnitWork& work = *units_[sent.key];
      if (work.state != UnitState::kSent || work.round != sent.round || work.receipted) continue;
      work.state = UnitState::kSendable;
      link->sendable.Push({work.unit->priority, work.unit->key});
      ++stats_.resent_pushes;
    }
    return;
  }
}

void ClientImpl::SendControl(std::size_t connection, Header header,
                             const std::vector<std::byte>& body) {
  header.rank = rank_;
  header.incarnation = incarnation_;
  Payload payload;
  if (!body.empty()) {
    const PooledBuffer buffer = pool_.Acquire(body.size());
    std::memcpy(buffer.bytes().data(), body.data(), body.size());
    payload = buffer.Share(body.size());
  }
  PeerId peer = 0;
  {
    const std::lock_guard lock(mu_);
    if (!connections_[connection]->up) return;  // said when it is up again
    peer = connections_[connection]->peer;
  }
  (void)loop_->Send(peer, header, std::move(payload));  // lost ones are said again after OnUp
}

void ClientImpl::OnWelcome(std::size_t index, const Payload& payload) {
  auto welcome = ParseWelcome(payload.bytes);
  if (!welcome.ok()) {
    Fail(welcome.status());
    return;
  }
  bool add_lanes = false;
  {
    const std::lock_guard lock(mu_);
    connections_[index]->welcomed = true;
    connections_[index]->host = loop_->SenderAddress();
    add_lanes = index == 0 && !have_addresses_;
  }
  if (add_lanes) {
    const bool complete =
        welcome->addresses.size() == config_.job.servers &&
        std::all_of(welcome->addresses.begin(), welcome->addresses.end(),
                    [&](const auto& lanes) { return lanes.size() == config_.server.lanes; });
    if (!complete) {
      Fail(CorruptData(
          fmt::format("the root names the lanes of {} servers, expected {} with {} each",
                      welcome->addresses.size(), config_.job.servers, config_.server.lanes)));
      return;
    }
    for (std::uint32_t s = 0; s < config_.job.servers; ++s) {
      for (std::uint32_t l = 0; l < config_.server.lanes; ++l) {
        if (s == 0 && l == 0) continue;  // the root's own lane: the connection there is
        AddConnection(welcome->addresses[s][l], s, l);
      }
    }
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    for (std::uint32_t s = 0; s < config_.job.servers; ++s) {
      servers_.emplace_back(config_.partition.credit);
    }
    have_addresses_ = true;
    replays_plan_ = welcome->replays_plan;
  }
  changed_.notify_all();
}

void ClientImpl::OnPlan(const Header& header, const Payload& payload) {
  auto parsed = ParsePlan(payload.bytes);
  if (!parsed.ok()) {
    Fail(parsed.status());
    return;
  }
  auto plan = std::make_shared<const Plan>(std::move(parsed).value());
  const std::shared_ptr<const Plan> told = plan;
  std::unique_lock lock(mu_);
  if (plan->version <= plan_->version) return;
  if (plan->num_servers != config_.job.servers || plan->lanes_per_server != config_.server.lanes ||
      plan->tensors.size() < plan_->tensors.size() || plan->units.size() < plan_->units.size() ||
      (plan_->version > 0 && plan->filter.stages.size() < plan_->filter.stages.size())) {
    // Comes from the root alone; a root that says this is not ours.
    loop_->Post([this] { Fail(CorruptData("the root's plan does not fit the configuration")); });
    return;
  }
  const std::size_t num_stages = plan_->filter.stages.size();
  if (plan_->version > 0 && plan->filter.stages.size() > num_stages) {
    // The root has waited for everybody's word, so this is a fault of one of the two.
    const FilterStage& stage = plan->filter.stages[num_stages];
    if (stage.first_step <= step_) {
      const Status late = Internal(fmt::format(
          "worker {} is late: it is at step {}, and hears now that the interval is {} from step {} "
          "on (plan version {})",
          rank_, step_, stage.interval, stage.first_step, plan->version));
      loop_->Post([this, late] { Fail(late); });
      return;
    }
    promise_.reset();
  }
  for (std::uint32_t t = static_cast<std::uint32_t>(tensors_.size()); t < plan->tensors.size();
       ++t) {
    auto tensor = std::make_unique<Tensor>();
    tensor->memory = std::make_unique<CallerMemory>(gate_, t);
    tensors_.push_back(std::move(tensor));
  }
  for (std::size_t key = units_.size(); key < plan->units.size(); ++key) {
    const Unit& unit = plan->units[key];
    auto work = std::make_unique<UnitWork>();
    work->unit = &unit;
    work->plan = plan;
    work->memory.resize(unit.members.size());
    work->next_memory.resize(unit.members.size());
    for (std::size_t c = 0; c < connections_.size(); ++c) {
      if (connections_[c]->server == unit.server && connections_[c]->lane == unit.lane) {
        work->connection = c;
      }
    }
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      tensors_[unit.members[m].tensor]->parts.emplace_back(key, m);
    }
    units_.push_back(std::move(work));
  }
  ready_.Reserve(units_.size());
  held_back_.Reserve(units_.size());
  for (ServerLink& link : servers_) link.sendable.Reserve(2 * units_.size());
  plan_ = std::move(plan);
  batches_planned_ = header.round;
  lock.unlock();
  // Once: what is declared later is mostly a broadcast or two.
  const bool reduces = std::any_of(told->units.begin(), told->units.end(), [](const Unit& unit) {
    return unit.op != ReduceOp::kBroadcast;
  });
  if (reduces && !std::exchange(plan_was_told_, true)) {
    LogLines(LogLevel::kInfo, "client", SummarizePlan(*told, config_.compressors()));
  }
  changed_.notify_all();
}

// --- messages and time --------------------------------------------------------------------------

void ClientImpl::OnMessage(PeerId from, const Header& header, Payload payload) {
  std::size_t index = 0;
  Connection* connection = nullptr;
  {
    const std::lock_guard lock(mu_);
    while (index < connections_.size() && connections_[index]->peer != from) ++index;
    if (index == connections_.size()) return;
    connection = connections_[index].get();
    connection->last_heard = Clock::now();
  }
  switch (header.kind) {
    case MessageKind::kReply:
      OnReceipt(*connection, header.sequence);
      OnReply(header, std::move(payload));
      return;
    case MessageKind::kReceipt:
      OnReceipt(*connection, header.sequence);
      return;
    case MessageKind::kPushAgain:
      OnPushAgain(header);
      return;
    case MessageKind::kState:
    case MessageKind::kStateWritten:
      OnState(index, header, std::move(payload));
      return;
    case MessageKind::kWelcome:
      OnWelcome(index, payload);
      return;
    case MessageKind::kPlan:
      if (index == 0) OnPlan(header, payload);
      return;
    case MessageKind::kAskStep:
      if (index == 0) OnAskStep(header);
      return;
    case MessageKind::kBarrierDone: {
      const std::lock_guard lock(mu_);
      if (index == 0) barriers_done_ = std::max(barriers_done_, header.round + 1);
      changed_.notify_all();
      return;
    }
    case MessageKind::kGoodbyeAck: {
      const std::lock_guard lock(mu_);
      connection->goodbye_done = true;
      changed_.notify_all();
      return;
    }
    case MessageKind::kError:
      FailWith({header.error == StatusCode::kOk ? StatusCode::kInternal : header.error,
                fmt::format("server {} at {}: {}", connection->server, connection->address,
                            AsText(payload.bytes.first(std::min(payload.size(), kMostErrorText))))},
               /*tell=*/false);
      return;
    default:
      return;
  }
}

void ClientImpl::Tick() {
  std::vector<PeerId> up;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    for (const auto& connection : connections_) {
      if (connection->up) up.push_back(connection->peer);
    }
  }
  Header header;
  header.kind = MessageKind::kHeartbeat;
  header.rank = rank_;
  header.incarnation = incarnation_;
  for (const PeerId peer : up) (void)loop_->Send(peer, header, {});
  if (!loss_) WatchServers();
  loop_->PostAfter(config_.timeouts.heartbeat(), [this] { Tick(); });
}

// --- lost servers -------------------------------------------------------------------------------

bool ClientImpl::IsLost(const Connection& connection, Clock::time_point now) const {
  // Not silence alone: a server whose thread computes for long says nothing, and its connection
  // stands, since ZeroMQ's own thread answers for it. And not a cut alone: that is mended. A silent
  // peer's connection is closed within three quarters of dead_after, so the last quarter is there
  // for the attempts to make it anew.
  const milliseconds dead_after(config_.timeouts.dead_after_ms);
  return !connection.up && connection.was_up && !connection.goodbye_done &&
         now - connection.last_heard > dead_after && now - connection.down_since > dead_after / 4;
}

void ClientImpl::WatchServers() {
  const Clock::time_point now = Clock::now();
  std::string probe;
  Status lost;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    if (loss_ && !IsLost(*connections_[loss_->connection], now)) loss_.reset();
    for (std::size_t i = 0; i < connections_.size() && !loss_; ++i) {
      if (!IsLost(*connections_[i], now)) continue;
      Loss loss;
      loss.connection = i;
      loss.since = now;
      loss.probing = IsTcp(connections_[i]->address);
      if (loss.probing) probe = connections_[i]->address;
      loss_ = std::move(loss);
    }
    if (!loss_) return;
    const auto waited = now - loss_->since;
    const bool root_may_speak =
        loss_->connection != 0 && connections_[0]->up && waited < kRootSpeaks;
    if (!root_may_speak && (!loss_->probing || waited > kProbeTimeout)) {
      lost = Unavailable(DescribeLoss(*loss_));
    }
  }
  if (!lost.ok()) {
    Fail(std::move(lost));
    return;
  }
  if (!probe.empty()) Probe(probe);
  loop_->PostAfter(kLossCheckMs, [this] { WatchServers(); });
}

std::string ClientImpl::DescribeLoss(const Loss& loss) const {
  const Clock::time_point now = Clock::now();
  const Connection& connection = *connections_[loss.connection];
  std::string text =
      fmt::format("{} is lost: nothing heard for {:.1f} s and no connection",
                  DescribeConnection(connection), Seconds(now - connection.last_heard));
  if (!loss.reach.empty()) text += ": " + loss.reach;
  std::string others;
  std::size_t down = 0;
  for (const auto& other : connections_) {
    if (other->up || !other->was_up || other->goodbye_done) continue;
    ++down;
    if (other->server == connection.server) continue;
    others += (others.empty() ? "" : ", ") + DescribeConnection(*other);
  }
  if (!others.empty()) {
    text += fmt::format("; also down: {}{}", others,
                        down == connections_.size() ? " (is this host's own link down?)" : "");
  }
  return text;
}

void ClientImpl::Probe(const std::string& address) {
  if (!probe_done_) return;  // an older one that a name keeps waiting
  if (probe_.joinable()) probe_.join();
  probe_done_ = false;
  try {
    probe_ = std::thread([this, address] {
      std::string reach = DescribeReachability(address, kProbeMs);
      loop_->Post([this, reach = std::move(reach)] {
        if (!loss_) return;
        loss_->reach = reach;
        loss_->probing = false;
      });
      probe_done_ = true;
    });
  } catch (const std::system_error&) {
    probe_done_ = true;
    loss_->probing = false;  // then without it
  }
}

// --- failure ------------------------------------------------------------------------------------

void ClientImpl::FailWith(Status status, bool tell) {
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
  }
  LogError("client", status.message(), {Field("rank", rank_)});
  if (tell) {
    std::size_t count = 0;
    {
      const std::lock_guard lock(mu_);
      count = connections_.size();
    }
    Header header;
    header.kind = MessageKind::kError;
    header.error = status.code();
    const ByteView text = AsBytes(status.message());
    for (std::size_t i = 0; i < count; ++i) SendControl(i, header, {text.begin(), text.end()});
  }
  Abort(std::move(status));
}

void ClientImpl::Abort(Status status) {
  ReleaseList released;
  std::vector<PeerId> peers;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    error_ = std::move(status);
    for (const auto& connection : connections_) {
      peers.push_back(connection->peer);
      connection->up = false;
    }
    ready_.Clear();
    held_back_.Clear();
    for (ServerLink& link : servers_) link.sendable.Clear();
    for (const auto& work : units_) {
      const bool busy = work->state == UnitState::kEncoding || work->state == UnitState::kDecoding;
      // What a later step has handed over will not be sent.
      for (std::size_t m = 0; m < work->next_memory.size(); ++m) {
        if (work->next_memory[m].input == nullptr) continue;
        work->next_memory[m] = {};
        LeaveUnit(work->unit->members[m].tensor, error_, released);
      }
      work->next_members_here = 0;
      work->next_ended = false;
      if (!busy) RetireUnit(*work, error_, released);
    }
    changed_.notify_all();
  }
  // What is queued, and the word of the failure, get a moment to leave; then nothing of ours is
  // read.
  loop_->PostAfter(kFarewellMs, [this, peers] {
    for (const PeerId peer : peers) loop_->Disconnect(peer);
  });
}

}  // namespace gradwire
