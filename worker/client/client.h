#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/config/config.h"
#include "common/transport/loop.h"
#include "common/wire/plan_data.h"
#include "worker/client/overlap_meter.h"

namespace gradwire {

/// A tensor that every worker has declared; an index into the plan.
struct TensorId {
  std::uint32_t index = 0;
  friend bool operator==(const TensorId&, const TensorId&) = default;
};

/// One push-pull under way. Copyable; stays valid after completion until the same tensor is pushed
/// again.
struct Handle {
  TensorId tensor;
  std::uint64_t generation = 0;
};

/// Elements [offset, offset + count) of a tensor.
struct ElementRange {
  std::uint64_t offset = 0;
  std::uint64_t count = 0;
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

/// What a client has done since it connected. Bytes are frames plus the transport's framing.
struct ClientStats {
  TrafficCounters traffic;
  std::uint64_t raw_push_bytes = 0;  // gradients handed over, at their own dtype
  std::uint64_t raw_pull_bytes = 0;
  std::uint64_t nonfinite_units = 0;  // rounds that were void
  std::uint64_t resent_pushes = 0;
  std::uint64_t reconnects = 0;
  /// Of units that the filter held back: how often, and elements that were not finite and are lost.
  std::uint64_t held_back_units = 0;
  std::uint64_t held_back_nonfinite = 0;
  /// What compression is worth, since the first step that had any (docs/operations.md says how it
  /// is estimated); all 0 without it. goodput: bytes a second, 0 before the first receipt.
  double compression_saves_ms = 0;  // a step; negative if payloads are larger than gradients
  double compression_costs_ms = 0;  // a step
  double goodput = 0;
  /// Of the filter, in the step that is open: steps in which a unit is sent once; 0 without a
  /// filter.
  std::uint32_t interval = 0;
  /// How much of the communication the caller's computing can hide, over the last 16 steps. Needs
  /// EndStep between steps.
  OverlapFigures overlap;
};

/// A worker's connection to the servers: declares tensors and push-pulls them.
///
/// Memory: `input` is read only and must stay valid and unchanged, `output` must stay valid and
/// untouched by the caller, from PushPull until the handle has completed (also with an error). They
/// may be the same array, but must not overlap otherwise. Gradwire sends large uncompressed
/// gradients from the caller's memory; the handle completes only when the transport has let go of
/// it.
///
/// Threads: every method is safe from any thread; calls for one tensor must not overlap. Declare,
/// Broadcast and Barrier are collective: every worker calls them in the same order.
class Client {
 public:
  /// Connects, learns the plan's shape from the root and waits until every process is there.
  /// Errors: Timeout after timeouts.start; InvalidArgument if the configurations differ (key and
  /// both values named); Unavailable.
  static Result<std::unique_ptr<Client>> Connect(const Config& config, std::uint32_t rank);

  /// The same over a given loop (not yet started): tests use the in-process network.
  static Result<std::unique_ptr<Client>> Connect(const Config& config, std::uint32_t rank,
                                                 std::unique_ptr<Loop> loop);

  /// Closes. With push-pulls still in flight it gives them up instead, and the job ends with an
  /// error that says so: nobody waits for a process that is on its way out. Returns once their
  /// memory is not read any more (bounded; logged if somebody still does).
  virtual ~Client() = default;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t num_workers() const = 0;

  /// Declares tensors together (small ones are fused). Blocks until every worker has declared the
  /// same batch. Returns their ids in order.
  /// Errors: InvalidArgument to every worker, naming tensor, ranks and both values, if they differ.
  virtual Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) = 0;

  /// Pushes `input` and pulls the average (or sum) over all workers into `output`. Returns at once.
  /// What the filter holds back in this step stays here, and its output is zeros or left alone.
  /// Shapes: both num_elements * SizeOf(dtype) bytes, in the tensor's dtype.
  /// Members of a fused unit leave when all of them are there, or at EndStep.
  /// Errors: InvalidArgument for a wrong size, an unknown tensor or one that is already in flight,
  /// for a missing learning rate (`ef_lr`), or for a learning rate or loss scale that differs from
  /// that of a tensor it is fused with: then nothing is sent and the job goes on. Timeout if the
  /// round of two steps ago is not answered within timeouts.stall_stop; the job's error.
  virtual Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) = 0;

  /// Blocks until the push-pull has completed. A round that was not finite completes with NaN in
  /// every element and is counted.
  /// Errors: Timeout after timeouts.stall_stop, naming tensor and what is missing; the job's error
  /// (Unavailable, naming the server, if one is lost). What had completed before stays completed.
  virtual Status Wait(const Handle& handle) = 0;
  /// The same with the caller's own deadline: when that is shorter than timeouts.stall_stop, the
  /// Timeout ends nothing, and the handle can be waited for again. A client whose push-pulls are
  /// complete when they return needs no other than this.
  virtual Status WaitFor(const Handle& handle, std::chrono::milliseconds /*timeout*/) {
    return Wait(handle);
  }
  /// True once Wait would return at once.
  virtual bool Poll(const Handle& handle) = 0;
  /// Of a push-pull that has completed, until its tensor is pushed again: which ranks'
  /// contributions were not finite, in order, over all units of the tensor. Tensors that are fused
  /// share this. An empty list: every contribution was finite, but the sum was not. No list: the
  /// result is finite, or the handle is not such a one.
  virtual std::optional<std::vector<std::uint32_t>> NonfiniteRanks(const Handle& /*handle*/) const {
    return std::nullopt;
  }

  /// Of a tensor's last push-pull, complete or not: which of its elements are sent in that step, in
  /// order. The filter holds the others back: their output is zeros, or under `inactive: skip` what
  /// it was before, and a block of the model that keeps its own step counter does not count the
  /// step. Without a filter it is the whole tensor; a tensor of no elements has no range.
  /// Errors: InvalidArgument if the handle is not of the tensor's last push-pull.
  virtual Result<std::vector<ElementRange>> ActiveRanges(const Handle& handle) const;

  /// The learning rate of the gradients of these tensors, for push-pulls that begin afterwards.
  /// Under `ef_lr` every rank gives it before a tensor's first push, and the same one: what was not
  /// sent is weighed with the rate of then over that of now. Rate 0 leaves it as it is. Elsewhere
  /// it changes nothing.
  /// Errors: InvalidArgument for an unknown tensor, or a rate that is negative or not finite.
  /// A client without residuals ignores it.
  virtual Status SetLearningRate(std::span<const TensorId> /*tensors*/, double /*rate*/) {
    return Status::Ok();
  }
  /// What the loss, and with it every gradient, is multiplied with, for push-pulls that begin
  /// afterwards; the same on every rank. Residuals follow it, so that results can be divided by it.
  /// 0: not given (at first), which leaves residuals as they are.
  /// Errors: InvalidArgument for a scale that is negative or not finite.
  virtual Status SetLossScale(double /*scale*/) { return Status::Ok(); }

  /// What is pushed from now on is a state and not a gradient (MethodTraits::pushes_state): a round
  /// that is void leaves residuals as they were before it. Where the job has such a method it is so
  /// from the start. A client without residuals ignores it.
  virtual void PushesState() {}

  /// Rank 0 with a filter whose `interval` is `auto`: asks for another interval, and from then on
  /// the client does not measure one any more. Returns at once; the change begins some steps later,
  /// on every worker in the same step, in which the plan's new stage says so. Ask when tensors are
  /// declared: more steps than there are filtered units by then are not to be had. A job that
  /// replays a saved plan keeps that plan's intervals. Errors: InvalidArgument for another rank or
  /// filter, or an interval that is not from 1 to 256; the job's error.
  virtual Status AskForInterval(std::uint32_t interval);

  /// Ends the step: fused units with missing members go out with zeros for those; the step counter
  /// goes up (phases count steps). A unit of which no member was pushed in the step is not sent:
  /// all ranks must push some member of it in a step, or none.
  /// While a change of the filter's interval is on its way it may wait for it, a few round trips.
  /// Errors: the job's; Timeout as Wait.
  virtual Status EndStep() = 0;

  /// Copies `data` of worker `root` to all, byte for byte, whatever the compression. Collective.
  /// Not declared beforehand; name and size must agree.
  virtual Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) = 0;

  /// Blocks until every worker has called it.
  virtual Status Barrier() = 0;

  /// Waits for what is in flight, as Wait does, then says goodbye to every lane and waits for the
  /// answers. Later calls fail with InvalidArgument, except Wait and Poll; Close itself gives its
  /// first result again.
  /// Errors: InvalidArgument if something in flight can never go out (a member of a fused unit that
  /// no EndStep has sent); Timeout or Unavailable if the goodbye is not acknowledged within
  /// timeouts.dead_after, naming server, lane and address; the job's error, unless every goodbye is
  /// acknowledged by then: what becomes of the others is not its error. In flight is nothing after
  /// an error: the handles have completed with it.
  virtual Status Close() = 0;

  /// The plan as it is now, never null. A declaration, or another interval of the filter in
  /// mid-run, makes a new one: what was given out stays as it was.
  virtual std::shared_ptr<const Plan> plan() const = 0;
  /// The step that is open: how often EndStep was called, since the step of a state that was
  /// restored. 0 of a client that does not count.
  virtual std::uint64_t step() const { return 0; }
  virtual ClientStats stats() const = 0;

  /// What the job needs to go on after a restart, cut at one step: this worker's residuals, the
  /// step and the rounds; with rank 0 also the residuals of all servers. Collective, at a moment
  /// when nothing is in flight. Errors: InvalidArgument if something is.
  virtual Result<std::vector<std::byte>> SaveState() = 0;
  /// Takes what SaveState of the same rank gave. Collective; before or after the tensors are
  /// declared. Residuals belong to tensors: another plan, another cut or another compressor with
  /// feedback takes them over. What nobody has a use for is named at the next EndStep.
  /// Errors: CorruptData if it is damaged, InvalidArgument if it is another rank's or of another
  /// number of workers; nothing is changed then.
  virtual Status RestoreState(ByteView saved) = 0;
  /// The residual of one tensor, zeros where there is none.
  virtual std::vector<float> ReadResidual(TensorId tensor) = 0;
};

}  // namespace gradwire
