#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/plan/plan.h"
#include "common/transport/loop.h"
#include "common/wire/control.h"
#include "server/describe.h"

namespace gradwire {

/// How the root speaks. Called on the root lane's thread.
class RootOutput {
 public:
  virtual ~RootOutput() = default;
  virtual void Send(PeerId to, const Header& header, std::vector<std::byte> body) = 0;
  /// Everyone is here.
  virtual void OnWelcomed() = 0;
  /// Installs a plan on this server's own lanes, then calls OnPlanAck(0, version).
  virtual void InstallLocally(std::shared_ptr<const Plan> plan) = 0;
  virtual void Fail(Status status) = 0;
  /// Makes a connection to a lane's advertised address and says hello there; calls OnLaneReached
  /// with who answers.
  virtual void ConnectBack(std::uint32_t server, std::uint32_t lane,
                           const std::string& address) = 0;
};

/// The job's control: who is there, what they have declared, the plan, barriers.
/// Threads: the root lane's only.
class Root {
 public:
  using Clock = std::chrono::steady_clock;

  /// `lane_addresses` are server 0's own: this process is there from the start.
  Root(const Config& config, const CompressorRegistry& registry,
       std::vector<std::string> lane_addresses, RootOutput& output);

  /// A process says hello (again, after a cut). `peer` is where to answer, `address` where it comes
  /// from.
  /// Errors: what the peer is refused with: rank out of range, a rank that another process has. A
  /// configuration that differs fails the whole job.
  Status OnHello(PeerId peer, const Hello& hello, const std::string& address);

  /// The address that this lane advertises leads to lane 0 or another of `answering`.
  void OnLaneReached(std::uint32_t server, std::uint32_t lane, std::uint32_t answering);

  void OnDeclare(std::uint32_t rank, Declare declare, Clock::time_point now);
  void OnPlanAck(std::uint32_t server, std::uint64_t version);
  /// Worker 0 wants another interval of the filter. The last wish counts, as far as there are units
  /// for it: also those of later declarations. One change is made after the other. Fails the job if
  /// that worker may not ask.
  void OnAskInterval(std::uint32_t rank, std::uint64_t interval);
  /// A worker's answer to how far it is.
  void OnStep(std::uint32_t rank, std::uint64_t question, std::uint64_t step);
  /// A worker has said goodbye: it begins no step any more.
  void OnLeft(std::uint32_t rank);
  void OnBarrier(std::uint32_t rank, std::uint64_t number, std::uint64_t step,
                 Clock::time_point now);
  /// Until everyone is there: says who is missing now and then, fails at the deadline.
  void WatchStart(Clock::time_point now);

  bool everyone_is_here() const { return welcomed_; }
  /// "waiting for 1 of 2 workers"
  std::string DescribeWait() const;
  /// "worker 0 at 10.0.0.2 (host n2, pid 7)": who has said hello, and who has not.
  std::string DescribeHere() const;
  std::string DescribeMissing() const;
  /// An open collective call that a rank which will make no more is missing in; empty if none is.
  std::string DescribeCallThatWaitsFor(std::uint32_t rank) const;
  /// Declarations and barriers that some ranks have reached and others have not.
  std::vector<OpenCall> OpenCalls() const;

 private:
  struct Member {
    PeerId peer = 0;
    std::uint64_t incarnation = 0;
    MemberName name;
    std::vector<std::string> lane_addresses;
    std::vector<bool> lane_reached;        // servers: the root's connection to it has been answered
    Clock::time_point hello_at;            // the first
    std::optional<Declare> declared;       // the open batch
    std::optional<std::uint64_t> barrier;  // the number it has reached
    std::uint64_t barrier_step = 0;        // what it said there
    std::uint64_t acknowledged_plan = 0;   // servers
    bool has_left = false;                 // workers
  };

  /// A change of the filter's interval, while the workers are asked how far they are.
  struct IntervalChange {
    std::uint32_t interval = 1;
    std::uint64_t steps_ahead = 0;                      // of any worker the change begins
    std::vector<std::optional<std::uint64_t>> reached;  // [rank]
    Clock::time_point opened;
  };

  void WelcomeIfComplete();
  /// An address that only its own host can use does not do for members of other hosts.
  Status CheckLoopback() const;
  /// The first lane of a server that has said hello and cannot be reached; empty if there is none
  /// that has had its time.
  std::string DescribeUnreachedLane(Clock::time_point now) const;
  void SendWelcome(const Member& worker);
  void SendPlan(PeerId peer);
  void CloseBatchIfComplete();
  /// Begins with the interval that is wanted, unless it is there or a change or a plan is under
  /// way.
  void BeginIntervalChange();
  void SendAskStep(const Member& worker);
  void CompleteIntervalChange();
  /// Makes this the plan: the servers get it, and the workers when all of those have it.
  void Adopt(Plan plan);
  void HandOutIfAcknowledged();

  const Config config_;
  const std::map<std::string, std::string> shared_config_;
  const CompressorRegistry& registry_;
  RootOutput& output_;
  PlanOptions plan_options_;
  std::optional<Plan> saved_plan_;
  std::vector<Member> workers_;
  std::vector<Member> servers_;  // [0] is this process
  bool welcomed_ = false;
  std::shared_ptr<const Plan> plan_;
  std::uint64_t batches_ = 0;          // closed ones
  bool plan_is_out_ = true;            // false while servers install it
  std::uint32_t wanted_interval_ = 0;  // 0: none yet
  std::optional<IntervalChange> change_;
  std::uint64_t changes_ = 0;   // begun; numbers the questions
  std::uint64_t barriers_ = 0;  // closed ones
  Clock::time_point declare_opened_;
  Clock::time_point barrier_opened_;
  const Clock::time_point started_at_;
  Clock::time_point last_report_;
};

/// What a process is refused with whose rank another one has. `is_running`: the job has begun.
Status RefuseTakenRank(const MemberName& refused, const MemberName& holder, bool is_running);

/// What a plan is made from, as the configuration says it.
PlanOptions MakePlanOptions(const Config& config);

}  // namespace gradwire
