#include "server/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "common/base/log.h"
#include "common/base/version.h"
#include "common/pipeline/executor.h"
#include "common/transport/address.h"
#include "common/transport/zmq_loop.h"
#include "server/lane.h"
#include "server/listening.h"

namespace gradwire {
namespace {

// After a failure a worker that has not come yet gets this long to come and be told why.
constexpr int kTellMs = 3000;

// After the end, replies and goodbyes that are queued get this long to leave.
constexpr int kLingerMs = 2000;
// After a failure somebody is likely not to read any more.
constexpr int kFailedLingerMs = 500;

Status CheckIndex(const Config& config, std::uint32_t index) {
  if (index < config.job.servers) return Status::Ok();
  return InvalidArgument(fmt::format("server index {} is out of range: the job has {} server(s)",
                                     index, config.job.servers));
}

class ServerImpl final : public Server, public LaneOwner {
 public:
  ServerImpl(const Config& config, std::uint32_t index, std::string save_plan_path)
      : config_(config),
        index_(index),
        save_plan_path_(std::move(save_plan_path)),
        codecs_(config_.compressors()),
        executor_(MakeExecutor(Threads(config))) {}

  ~ServerImpl() override { Shutdown(0); }

  /// How a lane listens (its number and its loop's way to listen), and what is told of the address
  /// that came of it.
  using ListenOnLane =
      std::function<Result<std::string>(std::uint32_t lane, const PortChooser::Listen& listen)>;
  using Advertise = std::function<Result<std::string>(const std::string& listening)>;

  Status Init(std::vector<std::unique_ptr<Loop>> loops, const ListenOnLane& listen_on_lane,
              const Advertise& advertise) {
    std::vector<std::string> listening;
    std::vector<std::string> advertised;
    for (std::uint32_t l = 0; l < loops.size(); ++l) {
      lanes_.push_back(std::make_unique<Lane>(config_, index_, l, std::move(loops[l]), codecs_,
                                              residuals_, *executor_, pool_, *this));
      auto address = listen_on_lane(
          l, [&lane = *lanes_.back()](const std::string& at) { return lane.Listen(at); });
      if (!address.ok()) return address.status();
      auto told = advertise(address.value());
      if (!told.ok()) return told.status();
      listening.push_back(std::move(address).value());
      advertised.push_back(std::move(told).value());
    }
    address_ = listening[0];
    for (auto& lane : lanes_) {
      GRADWIRE_RETURN_IF_ERROR(lane->Start(advertised, config_.compressors()));
    }
    LogInfo("server", "listening",
            {Field("version", Version()), Field("job", config_.job.id),
             Field("role", index_ == 0 ? "root" : "server"), Field("index", index_),
             Field("address", DescribeLanes(listening)),
             Field("advertised", DescribeLanes(advertised)), Field("endpoint", config_.endpoint)});
    LogInfo("server", "settings",
            {Field("workers", config_.job.workers), Field("servers", config_.job.servers),
             Field("lanes", lanes_.size()), Field("threads", executor_->concurrency()),
             Field("result", "average unless a tensor asks for its sum"),
             Field("who_may_talk", WhoMayTalk(listening[0]))});
    return Status::Ok();
  }

  std::string address() const override { return address_; }

  Status Run() override {
    std::unique_lock lock(mu_);
    changed_.wait(lock,
                  [this] { return stopped_ || !error_.ok() || finished_lanes_ == lanes_.size(); });
    if (!error_.ok()) {
      changed_.wait_for(lock, std::chrono::milliseconds(kTellMs),
                        [this] { return stopped_ || told_lanes_ == lanes_.size(); });
    }
    const Status status = error_;
    lock.unlock();
    Shutdown(status.ok() ? kLingerMs : kFailedLingerMs);
    return status;
  }

  void Stop() override {
    const std::lock_guard lock(mu_);
    stopped_ = true;
    changed_.notify_all();
  }

  ServerStats stats() const override {
    ServerStats stats;
    stats.started = started_;
    for (const auto& lane : lanes_) {
      const TrafficCounters traffic = lane->loop().traffic();
      stats.traffic.sent_bytes += traffic.sent_bytes;
      stats.traffic.received_bytes += traffic.received_bytes;
      stats.traffic.sent_messages += traffic.sent_messages;
      stats.traffic.received_messages += traffic.received_messages;
      stats.traffic.refused_messages += traffic.refused_messages;
      stats.traffic.strangers += traffic.strangers;
      OnLane(*lane, [&] {
        stats.rounds += lane->shard().counters().rounds;
        stats.nonfinite_rounds += lane->shard().counters().nonfinite_rounds;
        stats.duplicate_pushes += lane->shard().counters().duplicate_pushes;
        stats.refused += lane->refused();
      });
    }
    return stats;
  }

  std::vector<float> ReadResidual(const std::string& tensor, std::uint64_t count) override {
    WaitForLanes();
    return residuals_.Read(tensor, count);
  }

 private:
  static int Threads(const Config& config) {
    if (config.server.threads) return static_cast<int>(*config.server.threads);
    // With few cores the lane's own thread sums faster than one that has to be woken for it
    // (docs/results); with many, sums of different keys run side by side.
    const unsigned cores = std::thread::hardware_concurrency();
    return cores <= 4 ? 0 : static_cast<int>(cores / 2);
  }

  static std::string WhoMayTalk(const std::string& listening) {
    const auto parsed = ParseTcpAddress(listening);
    if (!parsed.ok()) return "this process";
    if (IsLoopback(parsed.value().host)) return "this machine";
    return "anybody who reaches the address (security.insecure)";
  }

  // Runs the task on the lane's thread and waits, or here if the thread has ended.
  template <typename Task>
  void OnLane(Lane& lane, Task&& task) const {
    std::unique_lock lock(mu_);
    if (shutting_down_) {
      changed_.wait(lock, [this] { return shut_down_; });
      lock.unlock();
      task();
      return;
    }
    bool ran = false;
    // Under the lock: a loop runs what was posted before its Stop, and Stop comes after the flag.
    lane.loop().Post([&] {
      task();
      const std::lock_guard inner(mu_);
      ran = true;
      changed_.notify_all();
    });
    changed_.wait(lock, [&] { return ran; });
  }

  // What the lanes have done before is done and seen.
  void WaitForLanes() const {
    for (const auto& lane : lanes_) {
      OnLane(*lane, [] {});
    }
  }

  void Shutdown(int linger_ms) {
    {
      std::unique_lock lock(mu_);
      if (shutting_down_) {
        changed_.wait(lock, [this] { return shut_down_; });
        return;
      }
      shutting_down_ = true;
    }
    // Loops first: they post to the executor. What it still finishes is dropped with the loops.
    for (auto& lane : lanes_) lane->Stop(linger_ms);
    executor_ = nullptr;
    const std::lock_guard lock(mu_);
    shut_down_ = true;
    changed_.notify_all();
  }

  void OnJobStarted() override { started_ = true; }

  void OnLaneFailed(Status status) override {
    {
      const std::lock_guard lock(mu_);
      if (error_.ok()) {
        // At once: telling everybody may take a moment, and whoever looks here wants the reason
        // first. Later ones are what became of it.
        LogError("server", "the job has failed", {Field("reason", status.message())});
        error_ = status;
      }
    }
    for (auto& lane : lanes_) {
      Lane* const each = lane.get();
      each->loop().Post([each, status] { each->Announce(status); });
    }
    const std::lock_guard lock(mu_);
    changed_.notify_all();
  }

  // What this server will hold at most for the plan: a contribution per worker, the kept reply and
  // the reply being made, and the residual.
  void LogMemory(const Plan& plan) const {
    std::uint64_t contributions = 0;
    std::uint64_t replies = 0;
    std::uint64_t residuals = 0;
    for (const Unit& unit : plan.units) {
      if (unit.server != index_) continue;
      std::uint64_t uplink = 0;
      std::uint64_t downlink = 0;
      bool feedback = false;
      for (const Phase& phase : unit.phases) {
        const auto bytes = WireBytes(unit, phase, config_.compressors());
        if (!bytes.ok()) continue;
        uplink = std::max(uplink, bytes->uplink);
        downlink = std::max(downlink, bytes->downlink);
        feedback = feedback || phase.downlink_feedback != Feedback::kNone;
      }
      contributions += uplink * (unit.op == ReduceOp::kBroadcast ? 1 : config_.job.workers);
      replies += 2 * downlink;
      if (feedback) residuals += unit.num_elements * sizeof(float);
    }
    const auto mib = [](std::uint64_t bytes) {
      return fmt::format("{:.1f}", static_cast<double>(bytes) / (1024.0 * 1024.0));
    };
    LogInfo("server", "memory for this plan, at most, in MiB",
            {Field("all", mib(contributions + replies + residuals)),
             Field("contributions", mib(contributions)), Field("replies", mib(replies)),
             Field("residuals", mib(residuals))});
  }

  void OnEveryoneTold(std::uint32_t lane) override {
    LogDebug("server", "every worker has been told of the failure", {Field("lane", lane)});
    const std::lock_guard lock(mu_);
    ++told_lanes_;
    changed_.notify_all();
  }

  void OnLaneFinished(std::uint32_t lane) override {
    LogDebug("server", "every worker has said goodbye", {Field("lane", lane)});
    const std::lock_guard lock(mu_);
    ++finished_lanes_;
    changed_.notify_all();
  }

  void InstallOnAllLanes(std::shared_ptr<const Plan> plan) override {
    if (index_ == 0 && !save_plan_path_.empty()) {
      if (const Status status = SavePlan(*plan, save_plan_path_); !status.ok()) {
        OnLaneFailed(status);
        return;
      }
    }
    LogMemory(*plan);
    const auto left = std::make_shared<std::atomic<std::size_t>>(lanes_.size());
    for (auto& lane : lanes_) {
      Lane* const each = lane.get();
      each->loop().Post([this, each, plan, left] {
        if (const Status status = each->InstallPlan(plan); !status.ok()) {
          OnLaneFailed(status);
          return;
        }
        if (left->fetch_sub(1) != 1) return;
        Lane* const first = lanes_.front().get();
        first->loop().Post([first, plan] { first->OnPlanInstalled(plan->version); });
      });
    }
  }

  const Config config_;
  const std::uint32_t index_;
  const std::string save_plan_path_;
  CodecCache codecs_;
  ResidualStore residuals_;
  BufferPool pool_;
  std::atomic<bool> started_{false};  // everyone was here
  std::unique_ptr<Executor> executor_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::string address_;

  mutable std::mutex mu_;
  mutable std::condition_variable changed_;
  Status error_;                    // guarded by mu_
  std::size_t finished_lanes_ = 0;  // guarded by mu_
  std::size_t told_lanes_ = 0;      // guarded by mu_
  bool stopped_ = false;            // guarded by mu_
  bool shutting_down_ = false;      // guarded by mu_
  bool shut_down_ = false;          // guarded by mu_
};

}  // namespace

Result<std::unique_ptr<Server>> Server::Start(const Config& config, std::uint32_t index,
                                              const std::string& save_plan_path) {
  GRADWIRE_RETURN_IF_ERROR(CheckIndex(config, index));
  const auto hosts = ChooseHosts(config, index);
  if (!hosts.ok()) return hosts.status();
  ZmqLoopOptions options;
  options.max_message_bytes = MaxFrameBytes(config.partition.bytes);
  options.dead_after_ms = config.timeouts.dead_after_ms;
  std::vector<std::unique_ptr<Loop>> loops;
  for (std::uint32_t l = 0; l < config.server.lanes; ++l) loops.push_back(MakeZmqLoop(options));
  PortChooser ports(config, index, hosts.value().listen);
  auto server = std::make_unique<ServerImpl>(config, index, save_plan_path);
  GRADWIRE_RETURN_IF_ERROR(server->Init(
      std::move(loops),
      [&](std::uint32_t lane, const PortChooser::Listen& listen) {
        return ports.ListenOnLane(lane, listen);
      },
      [&](const std::string& listening) -> Result<std::string> {
        const auto parsed = ParseTcpAddress(listening);
        if (!parsed.ok()) return parsed.status();
        return FormatTcpAddress(hosts.value().advertise, parsed.value().port);
      }));
  return std::unique_ptr<Server>(std::move(server));
}

Result<std::unique_ptr<Server>> Server::Start(const Config& config, std::uint32_t index,
                                              std::vector<std::unique_ptr<Loop>> lanes,
                                              std::vector<std::string> addresses,
                                              const std::string& save_plan_path) {
  GRADWIRE_RETURN_IF_ERROR(CheckIndex(config, index));
  if (lanes.size() != config.server.lanes || addresses.size() != lanes.size()) {
    return InvalidArgument(fmt::format("{} loops and {} addresses for {} lanes", lanes.size(),
                                       addresses.size(), config.server.lanes));
  }
  auto server = std::make_unique<ServerImpl>(config, index, save_plan_path);
  GRADWIRE_RETURN_IF_ERROR(server->Init(
      std::move(lanes),
      [&](std::uint32_t lane, const PortChooser::Listen& listen) {
        return listen(addresses[lane]);
      },
      [](const std::string& listening) -> Result<std::string> { return listening; }));
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace gradwire
