#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/base/buffer_pool.h"
#include "common/base/log.h"
#include "common/config/config.h"
#include "common/transport/loop.h"
#include "common/wire/control.h"
#include "server/describe.h"
#include "server/refusals.h"
#include "server/root.h"
#include "server/shard.h"

namespace gradwire {

/// What a lane tells its server. Called on the lane's thread.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  /// Everyone is here: an error is from now on one of a running job.
  virtual void OnJobStarted() = 0;
  /// The job is over with an error.
  virtual void OnLaneFailed(Status status) = 0;
  /// Every worker has been told of the failure on this lane.
  virtual void OnEveryoneTold(std::uint32_t lane) = 0;
  /// Every worker has said goodbye on this lane.
  virtual void OnLaneFinished(std::uint32_t lane) = 0;
  /// The root lane has a plan for all lanes of this server; OnPlanInstalled is called when they
  /// have it.
  virtual void InstallOnAllLanes(std::shared_ptr<const Plan> plan) = 0;
};

/// A loop with the shard that lives on it: attaches workers, numbers and receipts their pushes,
/// watches that they are alive. Lane 0 of a server also keeps the connection to the root, and on
/// server 0 is the root.
/// Threads: everything but Start, Stop and the loop's own rules runs on the loop's thread.
class Lane final : public LoopHandler, public ShardOutput, public RootOutput {
 public:
  Lane(const Config& config, std::uint32_t server, std::uint32_t lane, std::unique_ptr<Loop> loop,
       CodecCache& codecs, ResidualStore& residuals, Executor& executor, BufferPool& pool,
       LaneOwner& owner);
  ~Lane() override;

  Result<std::string> Listen(const std::string& address);
  /// `lane_addresses` are those of all lanes of this server; lane 0 tells the root.
  Status Start(std::vector<std::string> lane_addresses, const CompressorRegistry& registry);
  void Stop(int linger_ms);

  Loop& loop() { return *loop_; }
  Shard& shard() { return shard_; }
  const RefusalCounters& refused() const { return refused_; }

  Status InstallPlan(std::shared_ptr<const Plan> plan) {
    return shard_.InstallPlan(std::move(plan));
  }
  /// Lane 0: all lanes of this server have the plan of this version.
  void OnPlanInstalled(std::uint64_t version);
  /// Tells every worker that the job has failed, and the root.
  void Announce(const Status& status);

 private:
  using Clock = std::chrono::steady_clock;

  /// What is known of the life of a process that has said hello here.
  struct Life {
    MemberName name;
    bool up = false;  // the last heartbeat to it could be sent
    Clock::time_point last_heard;
  };

  struct Worker {
    PeerId peer = 0;
    std::uint64_t incarnation = 0;
    Life life;
    std::uint64_t hello = 0;            // number of its last hello
    std::uint64_t held = 0;             // last push of this connection that is here
    std::size_t unreceipted_bytes = 0;  // since the last receipt
    bool receipt_due = false;
    bool said_goodbye = false;
    bool told_failure = false;
  };

  void OnMessage(PeerId from, const Header& header, Payload payload) override;
  void OnUp(PeerId peer) override;
  void OnDown(PeerId peer) override;
  void OnIdle() override;

  void Reply(std::uint32_t rank, const Header& header, const Payload& payload) override;
  void Fail(Status status) override;
  void Send(PeerId to, const Header& header, std::vector<std::byte> body) override;
  void OnWelcomed() override { owner_.OnJobStarted(); }
  void InstallLocally(std::shared_ptr<const Plan> plan) override;
  void ConnectBack(std::uint32_t server, std::uint32_t lane, const std::string& address) override;

  void OnHello(PeerId from, const Header& header, const Payload& payload);
  void SayHello(PeerId peer);
  void OnConnectedBack(PeerId from, const Header& header, const Payload& payload);
  void OnRootMessage(const Header& header, const Payload& payload);
  void OnWorkerMessage(std::uint32_t rank, const Header& header, Payload payload);
  void Attach(PeerId peer, const Hello& hello, const std::string& address);
  void Refuse(std::uint64_t RefusalCounters::*kind, PeerId peer, const Status& status);
  void SendError(PeerId peer, const Status& status);
  void LogRefusal(std::uint64_t RefusalCounters::*kind, const std::string& text);
  void CheckThatNobodyWaitsForTheGone();
  void SendReceipt(Worker& worker);
  void Tell(Worker& worker);
  void Tick();
  void SendHeartbeats(Clock::time_point now);
  void CheckThatAllAreAlive(Clock::time_point now);
  void CheckThatLifeIsThere(const Life& life, Clock::time_point now);
  void CheckTheRoot(Clock::time_point now);
  void CheckStalls(Clock::time_point now);
  std::string DescribeStall(std::vector<OpenCall> calls, std::size_t count,
                            Clock::time_point now) const;
  bool IsRoot() const { return root_ != nullptr; }

  const Config config_;
  const std::uint32_t server_;
  const std::uint32_t lane_;
  LaneOwner& owner_;
  BufferPool& pool_;
  std::unique_ptr<Loop> loop_;
  Shard shard_;
  std::unique_ptr<Root> root_;  // server 0, lane 0
  std::vector<std::string> lane_addresses_;
  const std::uint64_t incarnation_;

  std::vector<Worker> workers_;  // [rank]
  std::unordered_map<PeerId, std::uint32_t> ranks_;
  std::unordered_map<PeerId, Life> servers_;  // root only: the others
  // Root only: connections to lanes of others, to see that their addresses lead there.
  std::unordered_map<PeerId, std::pair<std::uint32_t, std::uint32_t>> connecting_back_;
  std::vector<std::uint32_t> receipts_due_;
  PeerId root_peer_ = 0;  // lane 0 of servers other than the root
  Clock::time_point root_last_heard_;
  bool root_is_up_ = false;
  bool root_was_up_ = false;
  Clock::time_point started_at_;
  Clock::time_point last_tick_;
  Clock::time_point last_heartbeat_;
  Clock::time_point last_report_;
  std::uint32_t goodbyes_ = 0;
  RefusalCounters refused_;
  LogLimiter refusal_log_;
  LogLimiter unknown_log_;
  std::unordered_set<PeerId> refused_peers_;  // have had their answer
  const std::size_t receipt_every_bytes_;
  bool everyone_told_ = false;
  bool failed_ = false;
  Status failure_;  // once it has been announced
};

}  // namespace gradwire
