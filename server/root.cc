#include "server/root.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "common/base/log.h"
#include "common/base/random.h"
#include "common/transport/address.h"
#include "common/wire/limits.h"

namespace gradwire {
namespace {

// Two lists of the same tensors in another order look like any other difference at the first
// position; people look for it longest.
std::string DescribeOrder(const Declare& a, const Declare& b, std::size_t position) {
  const auto has = [position](const Declare& declare, const std::string& name) {
    return std::any_of(declare.tensors.begin() + static_cast<std::ptrdiff_t>(position),
                       declare.tensors.end(),
                       [&](const TensorDeclaration& tensor) { return tensor.name == name; });
  };
  const std::string& name_a = a.tensors[position].name;
  const std::string& name_b = b.tensors[position].name;
  if (name_a == name_b || !has(a, name_b) || !has(b, name_a)) return {};
  return "; both declare both, in another order: every worker must use the same order";
}

// How often the root says whom it waits for.
constexpr std::chrono::seconds kReportEvery(3);

// What reaching a server's lanes may take, and the attempt that says why it has not come to be.
constexpr std::chrono::seconds kReachWithin(5);
constexpr int kProbeMs = 500;

// A new interval begins at least that many steps ahead of every worker: making the plan takes a few
// round trips and a file, during which nobody should have to wait.
constexpr std::uint64_t kFewestStepsAhead = 8;

}  // namespace

Status RefuseTakenRank(const MemberName& refused, const MemberName& holder, bool is_running) {
  return InvalidArgument(fmt::format(
      "{} is refused: {} is already in the job in another incarnation; {}", Describe(refused),
      Describe(holder),
      is_running ? "a restart inside a running job is not possible, end the job and start it again"
                 : "two processes were started with the same rank, give each one of its own"));
}

PlanOptions MakePlanOptions(const Config& config) {
  PlanOptions options;
  options.num_workers = config.job.workers;
  options.num_servers = config.job.servers;
  options.lanes_per_server = config.server.lanes;
  options.partition_bytes = config.partition.bytes;
  options.fuse_below = config.partition.fuse_below;
  options.compression = config.compression;
  return options;
}

Root::Root(const Config& config, const CompressorRegistry& registry,
           std::vector<std::string> lane_addresses, RootOutput& output)
    : config_(config),
      shared_config_(SharedConfig(config)),
      registry_(registry),
      output_(output),
      plan_options_(MakePlanOptions(config)),
      workers_(config.job.workers),
      servers_(config.job.servers),
      plan_(std::make_shared<Plan>(EmptyPlan(plan_options_))),
      started_at_(Clock::now()),
      last_report_(started_at_) {
  for (std::uint32_t rank = 0; rank < workers_.size(); ++rank) workers_[rank].name.rank = rank;
  for (std::uint32_t rank = 0; rank < servers_.size(); ++rank) {
    servers_[rank].name.role = Role::kServer;
    servers_[rank].name.rank = rank;
  }
  servers_[0].incarnation = RandomId();
  servers_[0].name.host = OwnHostName();
  servers_[0].name.pid = static_cast<std::uint64_t>(getpid());
  servers_[0].lane_addresses = std::move(lane_addresses);
  servers_[0].lane_reached.assign(servers_[0].lane_addresses.size(), true);
}

Status Root::OnHello(PeerId peer, const Hello& hello, const std::string& address) {
  std::vector<Member>& members = hello.role == Role::kWorker ? workers_ : servers_;
  const MemberName name = NameOf(hello, address);
  const std::string who = Describe(name);
  if (hello.rank >= members.size()) {
    return InvalidArgument(fmt::format("{} is out of range: the job has {} {}s", who,
                                       members.size(), RoleName(hello.role)));
  }
  if (hello.role == Role::kServer && hello.rank == 0) {
    return InvalidArgument(
        fmt::format("{} is refused: server 0 is the root itself; give each server an index of its "
                    "own",
                    who));
  }
  if (hello.incarnation == 0) return CorruptData(fmt::format("{} has no incarnation", who));
  if (hello.role == Role::kServer && hello.lane_addresses.size() != config_.server.lanes) {
    return InvalidArgument(fmt::format("{} has {} lanes, expected {}", who,
                                       hello.lane_addresses.size(), config_.server.lanes));
  }
  Member& member = members[hello.rank];
  if (member.peer != 0 && member.incarnation != hello.incarnation) {
    return RefuseTakenRank(name, member.name, welcomed_);
  }
  for (const auto& [key, value] : shared_config_) {
    const auto theirs = hello.shared_config.find(key);
    const std::string text = theirs == hello.shared_config.end() ? "nothing" : theirs->second;
    if (text == value) continue;
    const Status status = InvalidArgument(fmt::format(
        "configurations differ: {} is {} on {}, {} on the root", key, text, who, value));
    output_.Fail(status);
    return status;
  }
  const bool is_first = member.incarnation == 0;
  member.peer = peer;
  member.incarnation = hello.incarnation;
  member.name = name;
  member.lane_addresses = hello.lane_addresses;
  if (const Status status = CheckLoopback(); !status.ok()) {
    output_.Fail(status);
    return status;
  }
  if (is_first && hello.role == Role::kServer) {
    member.hello_at = Clock::now();
    member.lane_reached.assign(hello.lane_addresses.size(), false);
    for (std::uint32_t lane = 0; lane < hello.lane_addresses.size(); ++lane) {
      output_.ConnectBack(hello.rank, lane, hello.lane_addresses[lane]);
    }
  }
  if (!welcomed_) {
    WelcomeIfComplete();
    return Status::Ok();
  }
  // Back after a cut: whatever it may have missed is said again.
  SendWelcome(member);
  if (plan_->version > 0 && (hello.role == Role::kServer || plan_is_out_)) SendPlan(peer);
  if (change_ && hello.role == Role::kWorker && !change_->reached[hello.rank]) SendAskStep(member);
  return Status::Ok();
}

Status Root::CheckLoopback() const {
  for (const Member& server : servers_) {
    for (const std::string& address : server.lane_addresses) {
      const auto parsed = ParseTcpAddress(address);
      if (!parsed.ok() || !IsLoopback(parsed.value().host)) continue;
      for (const std::vector<Member>* members : {&workers_, &servers_}) {
        for (const Member& member : *members) {
          const std::string& from = member.name.address;
          if (from.empty() || IsLoopback(from) || IsOwnAddress(from)) continue;
          return InvalidArgument(fmt::format(
              "{} advertises the loopback address {}, which leads other hosts to themselves, and "
              "{} is on another host than the root: set server.bind, server.interface or "
              "server.advertise of server {}",
              Describe(server.name), address, Describe(member.name), server.name.rank));
        }
      }
    }
  }
  return Status::Ok();
}

void Root::OnLaneReached(std::uint32_t server, std::uint32_t lane, std::uint32_t answering) {
  Member& member = servers_[server];
  if (answering != server) {
    output_.Fail(InvalidArgument(fmt::format(
        "{} advertises {} for its lane {}, but server {} answers there: set server.advertise or "
        "server.port_range of server {}",
        Describe(member.name), member.lane_addresses[lane], lane, answering, server)));
    return;
  }
  member.lane_reached[lane] = true;
  if (!welcomed_) WelcomeIfComplete();
}

std::string Root::DescribeUnreachedLane(Clock::time_point now) const {
  const Clock::duration within =
      std::min<Clock::duration>(kReachWithin, std::chrono::milliseconds(config_.timeouts.start_ms));
  for (const Member& server : servers_) {
    if (server.incarnation == 0) continue;
    for (std::size_t lane = 0; lane < server.lane_reached.size(); ++lane) {
      if (server.lane_reached[lane] || now - server.hello_at < within) continue;
      const std::string& address = server.lane_addresses[lane];
      return fmt::format(
          "{} advertises {}, where the root gets no answer: {}; is it the right network card? Set "
          "server.interface or server.advertise of server {}",
          Describe(server.name), address, DescribeReachability(address, kProbeMs),
          server.name.rank);
    }
  }
  return {};
}

void Root::WelcomeIfComplete() {
  for (const std::vector<Member>* members : {&workers_, &servers_}) {
    for (const Member& member : *members) {
      if (member.incarnation == 0) return;
      const auto& reached = member.lane_reached;
      if (std::find(reached.begin(), reached.end(), false) != reached.end()) return;
    }
  }
  welcomed_ = true;
  output_.OnWelcomed();
  LogInfo("root", "everyone is here",
          {Field("workers", workers_.size()), Field("servers", servers_.size())});
  for (const Member& worker : workers_) SendWelcome(worker);
  for (std::size_t s = 1; s < servers_.size(); ++s) SendWelcome(servers_[s]);
}

void Root::SendWelcome(const Member& member) {
  Welcome welcome;
  welcome.num_workers = config_.job.workers;
  welcome.num_servers = config_.job.servers;
  for (const Member& server : servers_) welcome.addresses.push_back(server.lane_addresses);
  welcome.replays_plan = !config_.plan.empty();
  Header header;
  header.kind = MessageKind::kWelcome;
  output_.Send(member.peer, header, Serialize(welcome));
}

void Root::SendPlan(PeerId peer) {
  Header header;
  header.kind = MessageKind::kPlan;
  header.plan_version = plan_->version;
  header.round = batches_;
  output_.Send(peer, header, Serialize(*plan_));
}

void Root::OnDeclare(std::uint32_t rank, Declare declare, Clock::time_point now) {
  Member& worker = workers_[rank];
  if (declare.batch < batches_) {
    // It came back after a cut and has the answer already, or gets it now.
    if (plan_is_out_) SendPlan(worker.peer);
    return;
  }
  if (declare.batch > batches_) {
    output_.Fail(CorruptData(fmt::format("{} declares batch {}, expected {}", Describe(worker.name),
                                         declare.batch, batches_)));
    return;
  }
  for (std::uint32_t other = 0; other < workers_.size(); ++other) {
    const auto& theirs = workers_[other].declared;
    if (other == rank || !theirs) continue;
    const std::size_t common = std::min(theirs->tensors.size(), declare.tensors.size());
    for (std::size_t i = 0; i < common; ++i) {
      const TensorDeclaration& a = theirs->tensors[i];
      const TensorDeclaration& b = declare.tensors[i];
      if (a == b) continue;
      output_.Fail(InvalidArgument(
          fmt::format("workers declare different tensors, batch {} position {}{}: {}{}",
                      declare.batch, i, a.name == b.name ? fmt::format(" ('{}')", a.name) : "",
                      DescribeDifference(a, other, b, rank), DescribeOrder(*theirs, declare, i))));
      return;
    }
    if (theirs->tensors.size() != declare.tensors.size()) {
      const bool rank_has_more = declare.tensors.size() > common;
      const TensorDeclaration& extra =
          rank_has_more ? declare.tensors[common] : theirs->tensors[common];
      output_.Fail(InvalidArgument(
          fmt::format("workers declare different tensors, batch {}: {} on rank {}, {} on rank {}; "
                      "only rank {} has '{}'",
                      declare.batch, theirs->tensors.size(), other, declare.tensors.size(), rank,
                      rank_has_more ? rank : other, extra.name)));
      return;
    }
    break;  // all earlier ones are equal to each other
  }
  if (std::none_of(workers_.begin(), workers_.end(),
                   [](const Member& each) { return each.declared.has_value(); })) {
    declare_opened_ = now;
  }
  worker.declared = std::move(declare);
  CloseBatchIfComplete();
}

void Root::CloseBatchIfComplete() {
  for (const Member& worker : workers_) {
    if (!worker.declared) return;
  }
  auto extended = [&]() -> Result<Plan> {
    if (!config_.plan.empty()) {
      if (!saved_plan_) {
        auto loaded = LoadPlan(config_.plan);
        if (!loaded.ok()) return loaded.status();
        saved_plan_ = std::move(loaded).value();
      }
      return ReplayPlan(*plan_, workers_[0].declared->tensors, *saved_plan_, plan_options_,
                        registry_);
    }
    return ExtendPlan(*plan_, workers_[0].declared->tensors, plan_options_, registry_);
  }();
  if (!extended.ok()) {
    output_.Fail(extended.status());
    return;
  }
  // A saved plan may have larger units than partition.bytes says.
  if (const Status status =
          CheckFrames(extended.value(), MaxFrameBytes(config_.partition.bytes), registry_);
      !status.ok()) {
    output_.Fail(status);
    return;
  }
  for (Member& worker : workers_) worker.declared.reset();
  ++batches_;
  Adopt(std::move(extended).value());
}

void Root::Adopt(Plan plan) {
  plan_ = std::make_shared<const Plan>(std::move(plan));
  plan_is_out_ = false;
  LogLines(LogLevel::kInfo, "plan", SummarizePlan(*plan_, registry_));
  LogLines(LogLevel::kDebug, "plan", DescribePlan(*plan_, registry_));
  // Servers first: a worker that has the plan pushes at once.
  for (std::size_t s = 1; s < servers_.size(); ++s) SendPlan(servers_[s].peer);
  output_.InstallLocally(plan_);
}

void Root::OnPlanAck(std::uint32_t server, std::uint64_t version) {
  if (server >= servers_.size() || version > plan_->version) return;
  servers_[server].acknowledged_plan = std::max(servers_[server].acknowledged_plan, version);
  HandOutIfAcknowledged();
}

void Root::HandOutIfAcknowledged() {
  if (plan_is_out_) return;
  for (const Member& server : servers_) {
    if (server.acknowledged_plan < plan_->version) return;
  }
  plan_is_out_ = true;
  for (const Member& worker : workers_) SendPlan(worker.peer);
  BeginIntervalChange();
}

void Root::OnAskInterval(std::uint32_t rank, std::uint64_t interval) {
  const FilterRules& rules = config_.compression.filter;
  const bool is_measured = rules.type == FilterType::kCovap && rules.interval == 0;
  if (rank != 0 || !is_measured || interval == 0 || interval > kMaxFilterInterval) {
    output_.Fail(InvalidArgument(fmt::format(
        "{} asks for the interval {}, expected worker 0 and 1 to {}, with a filter whose interval "
        "is auto",
        Describe(workers_[rank].name), interval, kMaxFilterInterval)));
    return;
  }
  wanted_interval_ = static_cast<std::uint32_t>(interval);
  BeginIntervalChange();
}

void Root::BeginIntervalChange() {
  if (wanted_interval_ == 0 || change_ || !plan_is_out_) return;
  const FilterStage& now = plan_->filter.stages.back();
  const std::uint32_t interval =
      std::min(wanted_interval_, std::max(NumFilteredUnits(*plan_), std::uint32_t{1}));
  // A saved plan has its changes in it.
  if (interval == now.interval || !config_.plan.empty()) return;
  if (plan_->filter.stages.size() >= kMaxFilterStages) {
    LogWarn("root", "the interval stays as it is: a plan holds no more changes",
            {Field("interval", now.interval), Field("wanted", interval),
             Field("changes", plan_->filter.stages.size() - 1)});
    return;
  }
  ++changes_;
  IntervalChange change;
  change.interval = interval;
  change.steps_ahead =
      std::max<std::uint64_t>(2 * std::max(now.interval, interval), kFewestStepsAhead);
  change.reached.resize(workers_.size());
  change.opened = Clock::now();
  change_ = std::move(change);
  for (const Member& worker : workers_) SendAskStep(worker);
  CompleteIntervalChange();
}

void Root::SendAskStep(const Member& worker) {
  if (worker.has_left) return;
  Header header;
  header.kind = MessageKind::kAskStep;
  header.round = changes_;
  header.step = change_->steps_ahead;
  output_.Send(worker.peer, header, {});
}

void Root::OnStep(std::uint32_t rank, std::uint64_t question, std::uint64_t step) {
  if (!change_ || question != changes_) return;  // said twice, around a cut
  change_->reached[rank] = step;
  CompleteIntervalChange();
}

void Root::OnLeft(std::uint32_t rank) {
  workers_[rank].has_left = true;
  CompleteIntervalChange();
}

void Root::CompleteIntervalChange() {
  if (!change_) return;
  std::uint64_t newest = 0;
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
    const auto& reached = change_->reached[rank];
    if (!reached && !workers_[rank].has_left) return;
    newest = std::max(newest, reached.value_or(0));
  }
  const IntervalChange change = *std::exchange(change_, std::nullopt);
  const FilterStage& now = plan_->filter.stages.back();
  const std::uint64_t first_step = std::max(newest + change.steps_ahead, now.first_step + 1);
  auto changed = ChangeInterval(*plan_, change.interval, first_step, plan_options_, registry_);
  if (!changed.ok()) {
    output_.Fail(changed.status());
    return;
  }
  LogInfo(
      "root", "the interval changes",
      {Field("from", now.interval), Field("to", change.interval), Field("first_step", first_step),
       Field("newest_step", newest), Field("plan_version", changed->version)});
  Adopt(std::move(changed).value());
}

void Root::OnBarrier(std::uint32_t rank, std::uint64_t number, std::uint64_t step,
                     Clock::time_point now) {
  Member& worker = workers_[rank];
  Header done;
  done.kind = MessageKind::kBarrierDone;
  done.round = number;
  if (number < barriers_) {
    output_.Send(worker.peer, done, {});
    return;
  }
  if (number > barriers_) {
    output_.Fail(CorruptData(
        fmt::format("{} is at barrier {}, expected {}", Describe(worker.name), number, barriers_)));
    return;
  }
  if (std::none_of(workers_.begin(), workers_.end(),
                   [&](const Member& each) { return each.barrier == barriers_; })) {
    barrier_opened_ = now;
  }
  worker.barrier = number;
  worker.barrier_step = step;
  for (const Member& other : workers_) {
    if (!other.barrier || *other.barrier != number || other.barrier_step == step) continue;
    output_.Fail(InvalidArgument(
        fmt::format("state of different steps: {} saves or restores step {}, {} step {}",
                    Describe(worker.name), step, Describe(other.name), other.barrier_step)));
    return;
  }
  for (const Member& other : workers_) {
    if (!other.barrier || *other.barrier != number) return;
  }
  ++barriers_;
  for (const Member& other : workers_) output_.Send(other.peer, done, {});
}

void Root::WatchStart(Clock::time_point now) {
  if (welcomed_) return;
  if (const std::string unreached = DescribeUnreachedLane(now); !unreached.empty()) {
    output_.Fail(Unavailable(unreached));
    return;
  }
  const double seconds = std::chrono::duration<double>(now - started_at_).count();
  const double deadline = config_.timeouts.start_ms / 1000.0;
  if (now - started_at_ > std::chrono::milliseconds(config_.timeouts.start_ms)) {
    output_.Fail(
        Timeout(fmt::format("not started within {:.1f} s (timeouts.start): {}: missing "
                            "{}; here: {}",
                            deadline, DescribeWait(), DescribeMissing(), DescribeHere())));
  } else if (now - last_report_ >= kReportEvery) {
    last_report_ = now;
    LogInfo("root", DescribeWait(),
            {Field("missing", DescribeMissing()), Field("here", DescribeHere()),
             Field("seconds", fmt::format("{:.0f}", seconds)),
             Field("deadline_seconds", fmt::format("{:.0f}", deadline))});
  }
}

std::string Root::DescribeWait() const {
  std::string text;
  for (const std::vector<Member>* members : {&workers_, &servers_}) {
    const auto missing = std::count_if(members->begin(), members->end(), [](const Member& member) {
      return member.incarnation == 0;
    });
    if (missing == 0) continue;
    text += fmt::format("{}{} of {} {}s", text.empty() ? "waiting for " : " and ", missing,
                        members->size(), RoleName(members->front().name.role));
  }
  return text;
}

std::string Root::DescribeHere() const {
  std::string text;
  for (const std::vector<Member>* members : {&workers_, &servers_}) {
    for (const Member& member : *members) {
      if (member.incarnation == 0) continue;
      text += (text.empty() ? "" : ", ") + Describe(member.name);
    }
  }
  return text;
}

std::string Root::DescribeMissing() const {
  std::string text;
  for (const std::vector<Member>* members : {&workers_, &servers_}) {
    for (const Member& member : *members) {
      if (member.incarnation != 0) continue;
      text += (text.empty() ? "" : ", ") + Describe(member.name);
    }
  }
  return text;
}

std::string Root::DescribeCallThatWaitsFor(std::uint32_t rank) const {
  const auto is_at_barrier = [&](const Member& worker) {
    return worker.barrier && *worker.barrier == barriers_;
  };
  const Member& left = workers_[rank];
  if (!left.declared && std::any_of(workers_.begin(), workers_.end(), [](const Member& worker) {
        return worker.declared.has_value();
      })) {
    return "a declaration of tensors";
  }
  if (!is_at_barrier(left) && std::any_of(workers_.begin(), workers_.end(), is_at_barrier)) {
    return "a barrier";
  }
  return {};
}

std::vector<OpenCall> Root::OpenCalls() const {
  OpenCall declaration{
      declare_opened_, fmt::format("declaration of tensors, batch {}", batches_), {}, {}};
  OpenCall barrier{barrier_opened_, fmt::format("barrier {}", barriers_), {}, {}};
  OpenCall change;
  if (change_) {
    change.since = change_->opened;
    change.what = fmt::format("change of the interval to {}", change_->interval);
  }
  for (std::uint32_t rank = 0; rank < workers_.size(); ++rank) {
    const Member& worker = workers_[rank];
    (worker.declared ? declaration.here : declaration.missing).push_back(rank);
    (worker.barrier == barriers_ ? barrier.here : barrier.missing).push_back(rank);
    if (!change_) continue;
    const bool has_answered = change_->reached[rank] || worker.has_left;
    (has_answered ? change.here : change.missing).push_back(rank);
  }
  std::vector<OpenCall> open;
  if (change_) open.push_back(std::move(change));
  for (OpenCall* call : {&declaration, &barrier}) {
    if (!call->here.empty()) open.push_back(std::move(*call));
  }
  return open;
}

}  // namespace gradwire
