#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/buffer_pool.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/ring_queue.h"
#include "common/pipeline/admission.h"
#include "common/pipeline/executor.h"
#include "common/plan/units.h"
#include "common/wire/control.h"
#include "compressors/codec_cache.h"
#include "compressors/feedback/residual_store.h"
#include "worker/client/client.h"
#include "worker/client/goodput.h"
#include "worker/client/overlap_meter.h"
#include "worker/client/unit_io.h"

namespace gradwire {

/// What a handle may still wait for after the job has failed: others giving memory back.
inline constexpr std::chrono::milliseconds kReleaseTimeout(10000);

/// How much longer than its own deadline a worker waits for a server's word on the same matter:
/// servers know who is missing.
inline constexpr std::chrono::milliseconds kServerSpeaks(3000);

/// What is queued, and the word of a failure, get this long to leave.
inline constexpr int kFarewellMs = 100;

inline std::string Name(const Plan& plan, const Unit& unit) {
  return fmt::format("tensor {} (key {})", DescribeUnit(plan, unit), unit.key);
}

/// Of a saved state, one unit: what it covered, its next round and, with rank 0, its server's
/// residual.
struct SavedUnit {
  std::vector<TensorRange> ranges;
  std::uint64_t round = 0;
  std::vector<std::byte> server;
  bool is_used = false;  // some unit of the plan has taken of it
};

/// The client, in four parts: client.cc (collective calls and the end), membership.cc
/// (connections, liveness, messages, failure), push_pull.cc (units) and state.cc (checkpoints).
/// docs/thread_model.md says which thread does what.
class ClientImpl final : public Client, private LoopHandler {
 public:
  using Clock = std::chrono::steady_clock;

  /// `pushes_state`: of the job's method.
  ClientImpl(const Config& config, std::uint32_t rank, std::unique_ptr<Loop> loop,
             bool pushes_state)
      : config_(config),
        rank_(rank),
        incarnation_(RandomId()),
        pushes_state_(pushes_state),
        codecs_(config_.compressors()),
        convert_(codecs_.Get("fp16").ok() ? *codecs_.Get("fp16") : nullptr,
                 codecs_.Get("bf16").ok() ? *codecs_.Get("bf16") : nullptr),
        executor_(MakeExecutor(Threads(config))),
        loop_(std::move(loop)),
        encoded_(2 * config.partition.credit * config.job.servers) {
    gate_->client = this;
  }

  ~ClientImpl() override;

  /// Connects to the root, then to every lane that it names, and waits until everyone is there.
  Status Init();

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t num_workers() const override { return config_.job.workers; }

  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override;
  Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) override;
  Status Wait(const Handle& handle) override;
  Status WaitFor(const Handle& handle, std::chrono::milliseconds timeout) override;
  bool Poll(const Handle& handle) override;
  std::optional<std::vector<std::uint32_t>> NonfiniteRanks(const Handle& handle) const override;
  Result<std::vector<ElementRange>> ActiveRanges(const Handle& handle) const override;
  Status SetLearningRate(std::span<const TensorId> tensors, double rate) override;
  Status SetLossScale(double scale) override;
  void PushesState() override { pushes_state_ = true; }
  Status AskForInterval(std::uint32_t interval) override;
  Status EndStep() override;
  Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) override;
  Status Barrier() override;
  Status Close() override;

  std::uint64_t step() const override;
  std::shared_ptr<const Plan> plan() const override {
    const std::lock_guard lock(mu_);
    return plan_;
  }

  ClientStats stats() const override {
    const std::lock_guard lock(mu_);
    ClientStats stats = stats_;
    stats.traffic = loop_->traffic();
    AddCompression(stats);
    stats.overlap = overlap_.figures();
    stats.interval = IntervalNow();
    return stats;
  }

  Result<std::vector<std::byte>> SaveState() override;
  Status RestoreState(ByteView saved) override;

  std::vector<float> ReadResidual(TensorId tensor) override {
    TensorDeclaration declaration;
    {
      const std::lock_guard lock(mu_);
      if (tensor.index >= plan_->tensors.size()) return {};
      declaration = plan_->tensors[tensor.index];
    }
    return residuals_.Read(declaration.name, declaration.num_elements());
  }

 private:
  enum class UnitState {
    kGathering,  // some members are missing (or all: nothing to do)
    kReady,      // waits to be encoded, or held back
    kEncoding,
    kSendable,  // waits for credit
    kSent,      // waits for the reply
    kDecoding,
  };

  // References to drop once mu_ is not held: dropping the last one takes it. Rarely more than a
  // few, so they take no memory.
  class ReleaseList {
   public:
    void Add(BlobRef reference) {
      if (!reference) return;
      if (size_ < few_.size()) {
        few_[size_++] = std::move(reference);
      } else {
        more_.push_back(std::move(reference));
      }
    }
    void Drop() {
      for (std::size_t i = 0; i < size_; ++i) few_[i] = {};
      size_ = 0;
      more_.clear();
    }

   private:
    std::array<BlobRef, 8> few_;
    std::size_t size_ = 0;
    std::vector<BlobRef> more_;
  };

  // Where memory that comes back finds the client, as long as there is one. In process a server may
  // hold a payload, and with it a CallerMemory, for longer than a client that has given up waiting.
  struct Gate {
    std::mutex mu;
    ClientImpl* client = nullptr;  // guarded by mu
  };

  // The caller's memory of one tensor: its last reference goes when nothing of ours and nothing of
  // ZeroMQ's reads the input any more. That, with the output written, is what completes a handle.
  class CallerMemory final : public Blob {
   public:
    CallerMemory(std::shared_ptr<Gate> gate, std::uint32_t tensor)
        : gate_(std::move(gate)), tensor_(tensor) {}

   private:
    void Recycle() noexcept override {
      const std::shared_ptr<Gate> gate = gate_;  // this object may go as soon as the client knows
      const std::lock_guard lock(gate->mu);
      if (gate->client != nullptr) gate->client->OnMemoryReleased(tensor_);
    }
    const std::shared_ptr<Gate> gate_;
    const std::uint32_t tensor_;
  };

  struct Tensor {
    std::unique_ptr<CallerMemory> memory;
    BlobRef held;  // while units are under way
    bool in_flight = false;
    std::uint64_t generation = 0;
    std::uint64_t step = 0;  // of the push-pull that was begun last
    std::uint32_t units_left = 0;
    Status outcome;  // of the push-pull that was begun last
    std::optional<std::vector<std::uint32_t>> nonfinite_ranks;  // of its void units
    std::optional<double> learning_rate;
    bool is_broadcast_root = false;
    std::vector<std::pair<std::uint64_t, std::size_t>> parts;  // (key, member)
  };

  struct UnitWork {
    const Unit* unit = nullptr;
    std::shared_ptr<const Plan> plan;  // keeps `unit` alive
    std::size_t connection = 0;
    UnitState state = UnitState::kGathering;

    // What the open step has handed over, and what a later one has before this round is done.
    std::vector<MemberMemory> memory;
    std::size_t members_here = 0;
    std::uint64_t step = 0;
    GradientScale scale;             // of its first member, and so of all
    std::uint32_t first_tensor = 0;  // that member's
    std::vector<MemberMemory> next_memory;
    std::size_t next_members_here = 0;
    std::uint64_t next_step = 0;
    GradientScale next_scale;
    std::uint32_t next_first_tensor = 0;
    bool next_ended = false;

    std::uint64_t round = 0;  // counts the steps in which the unit is sent
    std::uint32_t phase = 0;
    bool is_active = true;  // the filter lets it go in this step
    float weight = 1;       // else, of what it has held back before

    // Of the phase that holds now.
    std::uint32_t prepared_phase = UINT32_MAX;
    bool may_hold_back = false;  // the residual is there for the filter
    bool drains = false;  // the residual is gone with its delivery: the compressor leaves no rest
    const Compressor* uplink = nullptr;    // null: the dtype's own bytes
    const Compressor* downlink = nullptr;  // null: the same
    bool uplink_compresses = false;        // it is a codec, and not `none`
    bool downlink_compresses = false;
    Residual* residual = nullptr;

    Payload payload;  // kept until the reply: it may have to be sent again, or taken back
    bool nonfinite = false;
    std::size_t token_bytes = 0;  // what it holds of encoded_
    bool receipted = false;
    ReplyKind reply_kind = ReplyKind::kNone;
    Payload reply;
    std::chrono::nanoseconds codec_time{};  // of this round, CPU
    std::int64_t saved_bytes = 0;           // of this round, both ways
    Status outcome;
  };

  struct Unreceipted {
    std::uint64_t sequence = 0;
    std::uint64_t key = 0;
    std::uint64_t round = 0;
    std::size_t bytes = 0;
  };

  struct Connection {
    std::string address;
    std::string host;  // the address that a name led to, once something has come from there
    std::uint32_t server = 0;
    std::uint32_t lane = 0;
    PeerId peer = 0;
    bool up = false;
    bool was_up = false;
    bool welcomed = false;
    bool goodbye_done = false;
    std::uint64_t hellos = 0;  // said on it, over all its lives
    std::uint64_t next_sequence = 1;
    RingQueue<Unreceipted> unreceipted;
    Clock::time_point down_since;
    Clock::time_point last_heard;  // any message, and that it came up
  };

  // A connection that is taken for lost, while there is still something to learn about it.
  struct Loss {
    std::size_t connection = 0;
    Clock::time_point since;
    bool probing = false;
    std::string reach;  // what an attempt to connect there says
  };

  struct ServerLink {
    explicit ServerLink(std::size_t credit) : window(credit) {}
    ByteWindow window;
    AdmissionQueue sendable;
  };

  // A question about a key's state to the lane that owns it, said again after a cut.
  struct StateCall {
    std::size_t connection = 0;
    Header header;
    std::vector<std::byte> body;
    bool is_answered = false;
    std::uint64_t round = 0;
    Payload payload;
  };

  // What this worker has told the root of its steps, while the interval changes.
  struct StepPromise {
    std::uint64_t question = 0;
    std::uint64_t step = 0;   // where it was
    std::uint64_t limit = 0;  // it begins no step from here on before the plan has the change
  };

  static int Threads(const Config& config) {
    if (config.worker.threads) return static_cast<int>(*config.worker.threads);
    // With few cores the I/O thread encodes and decodes: waking another costs more (docs/results).
    const unsigned cores = std::thread::hardware_concurrency();
    return cores <= 4 ? 0 : static_cast<int>(std::min(cores / 4, 8U));
  }

  // --- the loop's thread -------------------------------------------------------------------------

  void OnMessage(PeerId from, const Header& header, Payload payload) override;
  void OnUp(PeerId peer) override;
  void OnDown(PeerId peer) override;
  void OnIdle() override;

  void AddConnection(const std::string& address, std::uint32_t server, std::uint32_t lane);
  void OnWelcome(std::size_t index, const Payload& payload);
  void OnPlan(const Header& header, const Payload& payload);
  void OnAskStep(const Header& header);
  void OnReceipt(Connection& connection, std::uint64_t sequence);
  void OnReply(const Header& header, Payload payload);
  void OnPushAgain(const Header& header);
  void OnState(std::size_t connection, const Header& header, Payload payload);
  void SendStateCall();
  void SendControl(std::size_t connection, Header header, const std::vector<std::byte>& body);
  void SendPump();
  void Tick();
  /// Looks for lost servers, and decides about the one that was found.
  void WatchServers();
  /// Begins to find out, on a thread of its own, why there is no connection to the address.
  void Probe(const std::string& address);
  /// Ends everything with an error: nothing is sent any more, handles complete with it as soon as
  /// their memory is free. Fail logs it and tells the servers, which tell the other workers.
  void Fail(Status status) { FailWith(std::move(status), /*tell=*/true); }
  void FailWith(Status status, bool tell);
  void Abort(Status status);

  // --- with mu_ held -----------------------------------------------------------------------------

  bool AllWelcomed() const;
  std::string DescribeConnection(const Connection& connection) const;
  bool IsLost(const Connection& connection, Clock::time_point now) const;
  std::string DescribeLoss(const Loss& loss) const;
  std::string DescribeUngreeted() const;
  /// What a Close must not wait for: a fused unit that lacks members. Empty: nothing of the kind.
  std::string DescribeIncomplete() const;
  /// Waits for `done` or the job's error: warns after stall_warn, gives up after stall_stop, and
  /// then fails the job with what `describe` says.
  Status Await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
               const std::function<std::string()>& describe);
  /// Waits until no memory of callers is read any more.
  bool AwaitMemory(std::unique_lock<std::mutex>& lock);
  Status SayGoodbye(std::unique_lock<std::mutex>& lock);
  Status PrepareUnit(UnitWork& work);
  /// The scale that a tensor's gradient has now, as far as a unit's phase asks for it.
  GradientScale ScaleOf(const Tensor& tensor, const Unit& unit) const;
  /// Errors: InvalidArgument if the tensor's learning rate is missing, or if it or the loss scale
  /// differs from that of what a unit has gathered already.
  Status CheckScale(std::uint32_t index) const;
  void MakeReady(UnitWork& work);
  void ScheduleEncode();
  void ScheduleSend();
  /// Puts what a finished or aborted unit held into `released`, to be dropped without the lock.
  void RetireUnit(UnitWork& work, const Status& outcome, ReleaseList& released);
  /// The tensor has one unit less under way; an error stays with its handle.
  void LeaveUnit(std::uint32_t tensor, const Status& outcome, ReleaseList& released);
  /// Tells the unit's tensors whose fault a void round is; true if it may be logged, with how many
  /// were not since the last time.
  std::optional<std::uint64_t> NoteVoid(const UnitWork& work, std::span<const std::uint32_t> ranks);
  void StartNext(UnitWork& work);
  void AddCompression(ClientStats& stats) const;
  bool IsIntervalMeasured() const {
    const FilterRules& rules = config_.compression.filter;
    return rules.type == FilterType::kCovap && rules.interval == 0;
  }
  /// Of the filter, in the open step; 0 without one.
  std::uint32_t IntervalNow() const {
    const Filter& filter = plan_->filter;
    return filter.stages.empty() ? 0 : filter.stages[filter.StageAt(step_)].interval;
  }
  /// Between two steps of rank 0: looks now and then whether another interval fits better.
  void ConsiderInterval();
  void AskRootForInterval(std::uint32_t interval);
  /// Waits for the plan that a promise was given for, if the step would break it.
  Status KeepPromise(std::unique_lock<std::mutex>& lock, std::uint64_t step);
  /// Of the unit in the step of its work: 1 if the filter leaves it alone.
  std::uint32_t IntervalOf(const UnitWork& work) const {
    const Filter& filter = plan_->filter;
    if (plan_->units[work.unit->key].filter_classes.empty()) return 1;
    return filter.stages[filter.StageAt(work.step)].interval;
  }
  void GiveToken(UnitWork& work);
  std::uint64_t RoundSeedOf(const UnitWork& work) const {
    return RoundSeed(config_.job.seed, work.unit->key, work.round);
  }
  std::string DescribeUnitWait(const UnitWork& work) const;
  std::string DescribeWait(std::uint32_t index) const;
  std::string DescribeInFlight(std::uint32_t index) const;
  /// Errors: InvalidArgument if a push-pull is under way, which changes residuals.
  Status CheckIdle() const;

  // --- with collective_mu_ held, without mu_ -----------------------------------------------------

  /// step: what all ranks must say alike; 0 where there is no such thing.
  Status EnterBarrier(std::uint64_t step);
  Status CheckReadyForState(std::string_view what) const;
  /// Asks the unit's lane and waits for its answer.
  Result<StateCall> CallForState(const Unit& unit, const Header& header,
                                 std::vector<std::byte> body);
  /// Gives units that are new in the plan what was restored for them. Collective.
  Status RestorePlannedUnits();
  Status RestoreUnit(const Plan& plan, const Unit& unit,
                     const std::map<std::string, std::vector<std::size_t>>& by_tensor);

  // --- any thread, without mu_ -------------------------------------------------------------------

  /// Names the tensors whose restored residuals nobody has a use for, once.
  void SayUnusedState();
  void RunEncoder();
  void EncodeUnit(UnitWork& work);
  /// The residual takes the gradient; nothing is sent and the unit is done.
  void HoldBackUnit(UnitWork& work);
  void DecodeUnit(UnitWork& work);
  /// Where the loop's thread encodes and decodes: it may have kept receipts waiting.
  void NoteComputed() {
    if (executor_->concurrency() > 0) return;
    const std::lock_guard lock(mu_);
    goodput_.Computed();
    computed_ = true;
  }
  /// Refuses what is no void round's reply; fills the members with NaN.
  Status DecodeVoid(UnitWork& work);
  void FinishUnit(UnitWork& work);
  void OnMemoryReleased(std::uint32_t tensor);
  void PostFail(Status status) {
    loop_->Post([this, status = std::move(status)]() mutable { Fail(std::move(status)); });
  }
  void StopLoop();
  /// What is tried while the start takes long; may block for half a second, and on names for
  /// longer.
  std::string DescribeStart();

  const Config config_;
  const std::uint32_t rank_;
  const std::uint64_t incarnation_;

  // Own synchronization.
  std::atomic<bool> pushes_state_;
  CodecCache codecs_;
  const FloatConverter convert_;
  BufferPool pool_;
  ResidualStore residuals_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Loop> loop_;
  bool loop_started_ = false;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::mutex collective_mu_;  // one collective call at a time
  // Guarded by collective_mu_.
  bool has_loaded_ = false;  // every worker has restored a state
  std::vector<SavedUnit> loaded_;
  std::size_t next_key_to_restore_ = 0;
  std::set<std::string> unused_on_servers_;  // tensors

  mutable std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_.
  Status error_;
  ClientStats stats_;
  std::shared_ptr<const Plan> plan_ = std::make_shared<const Plan>();
  std::uint64_t batches_declared_ = 0;                  // by this worker
  std::uint64_t batches_planned_ = 0;                   // that the plan here covers
  std::optional<std::vector<std::byte>> open_declare_;  // to be said again after a cut
  std::optional<StateCall> state_call_;
  bool has_unsaid_state_ = false;  // restored, and what is not used has not been named yet
  std::uint64_t state_calls_ = 0;
  std::uint64_t barrier_step_ = 0;  // of the last barrier that was entered
  std::uint64_t barriers_entered_ = 0;
  std::uint64_t barriers_done_ = 0;
  bool closing_ = false;
  bool leaving_ = false;  // saying goodbye: nothing is in flight any more
  bool closed_ = false;
  Status close_status_;
  std::uint64_t step_ = 0;
  double loss_scale_ = 0;      // 0: not given
  std::size_t in_flight_ = 0;  // tensors
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<std::unique_ptr<UnitWork>> units_;  // [key]
  std::vector<std::unique_ptr<Connection>> connections_;
  bool have_addresses_ = false;
  bool replays_plan_ = false;  // the root does: its intervals stay
  std::vector<ServerLink> servers_;
  AdmissionQueue ready_;
  AdmissionQueue held_back_;  // ready too, but nothing of them will be sent
  ByteWindow encoded_;        // encoded buffers that have no receipt
  int encoders_ = 0;
  bool send_posted_ = false;
  LogLimiter nonfinite_log_;
  LogLimiter held_back_log_;
  LogLimiter out_of_bound_log_{std::chrono::seconds(10)};
  GoodputMeter goodput_;
  OverlapMeter overlap_;
  // Of the filter's interval, rank 0.
  covap::IntervalRule interval_rule_;
  bool chooses_interval_ = true;  // false: the caller does
  std::uint64_t next_measured_step_ = 0;
  int unsteady_measures_ = 0;         // in a row
  std::uint32_t asked_interval_ = 0;  // the last one; 0: never
  // All ranks.
  std::optional<StepPromise> promise_;
  std::optional<std::uint64_t> first_compressed_step_;
  bool compression_was_told_ = false;
  std::chrono::nanoseconds codec_time_{};
  std::int64_t saved_bytes_ = 0;

  // The loop's thread only (once it has ended, StopLoop's).
  std::optional<Loss> loss_;
  std::thread probe_;
  std::atomic<bool> probe_done_{true};
  bool plan_was_told_ = false;
  bool computed_ = false;  // since the queue of messages was last empty
};

}  // namespace gradwire
