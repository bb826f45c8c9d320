#include "worker/trainer/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "worker/client/job_optimizer.h"
#include "worker/trainer/checkpoint.h"
#include "worker/trainer/kernels.h"
#include "worker/trainer/schedule.h"

namespace gradwire::trainer {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What went by between two moments of a client.
Volume Between(const ClientStats& before, const ClientStats& after) {
  return {after.raw_push_bytes - before.raw_push_bytes,
          after.raw_pull_bytes - before.raw_pull_bytes,
          after.traffic.sent_bytes - before.traffic.sent_bytes,
          after.traffic.received_bytes - before.traffic.received_bytes};
}

Status CheckOptions(const Client& client, const Model& model, const Samples& data,
                    const TrainOptions& options) {
  if (options.batch == 0 || options.batch > model.max_batch()) {
    return InvalidArgument(
        fmt::format("batch {}, expected 1 to {}", options.batch, model.max_batch()));
  }
  if (!std::isfinite(options.rate) || options.rate < 0.0) {
    return InvalidArgument(fmt::format("learning rate {}, expected 0 or more", options.rate));
  }
  if (!(options.momentum >= 0.0 && options.momentum < 1.0)) {
    return InvalidArgument(
        fmt::format("momentum {}, expected at least 0 and below 1", options.momentum));
  }
  if (!std::isfinite(options.weight_decay) || options.weight_decay < 0.0) {
    return InvalidArgument(
        fmt::format("weight decay {}, expected 0 or more", options.weight_decay));
  }
  if (data.size() == 0) return InvalidArgument("no training data");
  if (options.test_every > 0 && options.test_data == nullptr) {
    return InvalidArgument(fmt::format("a test every {} steps without data", options.test_every));
  }
  if (options.save_every > 0 && options.save_folder.empty()) {
    return InvalidArgument(
        fmt::format("saves every {} steps without a folder", options.save_every));
  }
  if (options.stop_at > 0 && options.stop_at >= options.steps) {
    return InvalidArgument(fmt::format("stops at step {}, expected below {}, the last",
                                       options.stop_at, options.steps));
  }
  if (client.num_workers() == 0) return InvalidArgument("the client knows of no workers");
  return Status::Ok();
}

/// One run; lives as long as Train.
class Run {
 public:
  Run(Client& client, Model& model, const Samples& data, const TrainOptions& options)
      : client_(client),
        model_(model),
        data_(data),
        options_(options),
        rate_{options.rate, options.warmup_steps, options.steps},
        sampler_(data.size(), options.batch, client.rank(), client.num_workers(), options.seed),
        pending_(model.parameters().size()),
        indices_(options.batch),
        labels_(options.batch) {}

  // The client may read and write the model's gradients until their handles have completed.
  ~Run() {
    for (const std::optional<Handle>& handle : pending_) {
      if (handle) static_cast<void>(client_.Wait(*handle));
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Result<TrainReport> Go() {
    GRADWIRE_RETURN_IF_ERROR(Declare());
    GRADWIRE_RETURN_IF_ERROR(options_.restore_folder.empty() ? BroadcastParameters()
                                                             : RestoreRun());
    GRADWIRE_RETURN_IF_ERROR(TrainSteps());
    GRADWIRE_RETURN_IF_ERROR(CompareDigests());
    return report_;
  }

 private:
  Status Declare() {
    std::vector<TensorDeclaration> declarations;
    const auto num_layers = static_cast<std::int32_t>(model_.layers().size());
    for (const Parameter* p : model_.parameters()) {
      TensorDeclaration tensor;
      tensor.name = p->name;
      tensor.shape = p->shape;
      tensor.priority = num_layers - static_cast<std::int32_t>(p->layer);
      declarations.push_back(std::move(tensor));
    }
    Result<std::vector<TensorId>> ids = client_.Declare(declarations);
    GRADWIRE_RETURN_IF_ERROR(ids.status());
    if (ids->size() != declarations.size()) {
      return Internal(fmt::format("{} ids for {} tensors", ids->size(), declarations.size()));
    }
    ids_ = std::move(*ids);
    skips_inactive_ = client_.plan()->filter.skips_inactive;
    return options_.method == kNoMethod ? Status::Ok() : MakeOptimizer();
  }

  Status MakeOptimizer() {
    auto made = JobOptimizer::Create(client_, options_.method, options_.compression);
    GRADWIRE_RETURN_IF_ERROR(made.status());
    optimizer_ = std::move(made).value();
    for (const Parameter* p : model_.parameters()) {
      GRADWIRE_RETURN_IF_ERROR(
          optimizer_->AddTensor(ids_[p->index], p->name, p->value.size(), p->is_weight()));
    }
    return Status::Ok();
  }

  Status BroadcastParameters() {
    const Clock::time_point start = Clock::now();
    const ClientStats before = client_.stats();
    std::uint64_t bytes = 0;
    for (Parameter* p : model_.parameters()) {
      const MutableBytes value = std::as_writable_bytes(p->value.span());
      GRADWIRE_RETURN_IF_ERROR(client_.Broadcast(p->name + ".initial", value, 0));
      bytes += value.size();
    }
    // All start together, and nothing of this counts as a gradient round.
    GRADWIRE_RETURN_IF_ERROR(client_.Barrier());
    report_.broadcast = Between(before, client_.stats());
    report_.broadcast.raw_push_bytes = client_.rank() == 0 ? bytes : 0;
    report_.broadcast.raw_pull_bytes = client_.rank() == 0 ? 0 : bytes;
    report_.broadcast_seconds = SecondsSince(start);
    return Status::Ok();
  }

  /// A collective call: this rank's error, or who has one.
  Status AllOk(const Status& mine, std::string_view failure) {
    Status all = mine;
    for (std::uint32_t rank = 0; rank < client_.num_workers(); ++rank) {
      std::array<std::byte, 1> is_ok = {static_cast<std::byte>(mine.ok())};
      GRADWIRE_RETURN_IF_ERROR(client_.Broadcast(fmt::format("all_ok.{}", rank), is_ok, rank));
      if (all.ok() && is_ok[0] == std::byte{0}) {
        all = Internal(fmt::format("rank {} {}: its own log says why", rank, failure));
      }
    }
    return all;
  }

  /// The run as it is now; without the states of optimizer and client.
  Checkpoint Describe() {
    Checkpoint run;
    run.rank = client_.rank();
    run.step = report_.steps;
    run.curve_loss = curve_loss_;
    const auto add = [&](std::string_view name, const auto& value) {
      run.settings.emplace_back(name, fmt::format("{}", value));
    };
    add("workers", client_.num_workers());
    add("method", options_.method);
    if (options_.method == kNoMethod) {
      add("momentum", options_.momentum);
      add("weight decay", options_.weight_decay);
    }
    add("seed", options_.seed);
    add("batch", options_.batch);
    add("training samples", data_.size());
    add("steps", options_.steps);
    add("learning rate", options_.rate);
    add("warm-up steps", options_.warmup_steps);
    for (Parameter* p : model_.parameters()) {
      run.tensors.push_back({p->name, p->value.span(), p->velocity.span()});
    }
    return run;
  }

  Status SaveRun() {
    GRADWIRE_RETURN_IF_ERROR(BringInAll());
    const Clock::time_point start = Clock::now();
    const Result<std::vector<std::byte>> client = client_.SaveState();
    GRADWIRE_RETURN_IF_ERROR(client.status());
    const CheckpointFolder folder(options_.save_folder, client_.rank());
    GRADWIRE_RETURN_IF_ERROR(AllOk(WriteRun(folder, *client), "cannot save the run"));
    // Until here, every rank has the state before this one, or all have this one.
    folder.KeepOnly(report_.steps);
    aside_seconds_ += SecondsSince(start);
    return Status::Ok();
  }

  Status WriteRun(const CheckpointFolder& folder, ByteView client) {
    Result<std::vector<std::byte>> optimizer = std::vector<std::byte>();
    if (optimizer_ != nullptr) optimizer = optimizer_->state().Save();
    GRADWIRE_RETURN_IF_ERROR(optimizer.status());
    Checkpoint run = Describe();
    run.optimizer = *optimizer;
    run.client = client;
    return folder.Write(report_.steps, ToBytes(run));
  }

  Status RestoreRun() {
    const CheckpointFolder folder(options_.restore_folder, client_.rank());
    const Result<std::uint64_t> step = NewestOfAll(folder);
    GRADWIRE_RETURN_IF_ERROR(step.status());
    Result<std::vector<std::byte>> bytes = folder.Read(*step);
    Checkpoint run = Describe();
    Status mine = bytes.ok() ? TakeRun(*bytes, *step, run) : bytes.status();
    if (bytes.ok() && !mine.ok()) {
      mine = Status(mine.code(), fmt::format("'{}': {}", folder.FileOf(*step), mine.message()));
    }
    GRADWIRE_RETURN_IF_ERROR(AllOk(mine, "cannot restore the run"));
    const Status restored = client_.RestoreState(run.client);
    if (!restored.ok() && run.client.empty()) {
      return InvalidArgument(fmt::format(
          "'{}': the run was saved without servers, and this job has some", folder.FileOf(*step)));
    }
    GRADWIRE_RETURN_IF_ERROR(restored);
    report_.steps = report_.first_step = run.step;
    curve_loss_ = run.curve_loss;
    LogInfo("trainer", "goes on with a saved run",
            {Field("step", run.step), Field("folder", folder.path())});
    // Of one run all ranks have the same; after this they start together.
    return CompareDigests();
  }

  /// The newest step that all ranks have saved.
  Result<std::uint64_t> NewestOfAll(const CheckpointFolder& folder) {
    constexpr std::size_t kMostSteps = 4;  // the last state and, after a failure, that before it
    std::vector<std::uint64_t> common = folder.Steps();
    for (std::uint32_t rank = 0; rank < client_.num_workers(); ++rank) {
      std::array<std::uint64_t, kMostSteps> theirs{};  // 0: none
      const std::vector<std::uint64_t> mine = folder.Steps();
      std::copy_n(mine.begin(), std::min(mine.size(), kMostSteps), theirs.begin());
      GRADWIRE_RETURN_IF_ERROR(client_.Broadcast(fmt::format("saved_steps.{}", rank),
                                                 std::as_writable_bytes(std::span(theirs)), rank));
      if (theirs[0] == 0) {
        return InvalidArgument(fmt::format(
            "there is no saved run of rank {} in '{}', where it runs", rank, folder.path()));
      }
      std::erase_if(common, [&](std::uint64_t step) {
        return std::find(theirs.begin(), theirs.end(), step) == theirs.end();
      });
    }
    if (!common.empty()) return common.front();
    return InvalidArgument(
        fmt::format("there is no step that all ranks have saved in '{}': are the files of rank {} "
                    "of another run than the others'?",
                    folder.path(), client_.rank()));
  }

  Status TakeRun(ByteView bytes, std::uint64_t step, Checkpoint& run) {
    GRADWIRE_RETURN_IF_ERROR(FromBytes(bytes, run));
    if (run.step != step) {
      return CorruptData(fmt::format("the saved run is at step {}, expected {}", run.step, step));
    }
    if (run.step >= LastStep()) {
      return InvalidArgument(fmt::format(
          "the saved run is at step {}, and this one ends at step {}", run.step, LastStep()));
    }
    return optimizer_ == nullptr ? Status::Ok() : optimizer_->Restore(run.optimizer);
  }

  /// Steps done when this run ends.
  std::uint64_t LastStep() const {
    return options_.stop_at > 0 ? options_.stop_at : options_.steps;
  }

  bool SavesNow() const {
    if (options_.save_folder.empty() || report_.steps == options_.steps) return false;
    return report_.steps == options_.stop_at ||
           (options_.save_every > 0 && report_.steps % options_.save_every == 0);
  }

  Status TrainSteps() {
    const ClientStats before = client_.stats();
    start_ = Clock::now();
    mark_ = start_;
    mark_stats_ = before;
    mark_step_ = report_.first_step;
    std::vector<double> losses;  // the last ones, for the report
    constexpr std::size_t kLastLosses = 100;
    losses.reserve(kLastLosses);
    for (std::uint64_t step = report_.first_step; step < LastStep(); ++step) {
      double loss = 0.0;
      GRADWIRE_RETURN_IF_ERROR(TrainStep(step, loss));
      const std::uint64_t done = step - report_.first_step;
      if (done == 0) report_.first_loss = loss;
      if (losses.size() < kLastLosses) {
        losses.push_back(loss);
      } else {
        losses[done % kLastLosses] = loss;
      }
      report_.steps = step + 1;
      if (options_.on_step) options_.on_step(step, loss);
      ReportProgress(loss);
      GRADWIRE_RETURN_IF_ERROR(TestOnTheWay(loss));
      if (SavesNow()) GRADWIRE_RETURN_IF_ERROR(SaveRun());
    }
    GRADWIRE_RETURN_IF_ERROR(BringInAll());
    report_.seconds = SecondsSince(start_) - aside_seconds_;
    report_.compute_seconds = report_.seconds - report_.wait_seconds - report_.hand_over_seconds;
    if (!losses.empty()) {
      report_.last_loss =
          std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
    }
    const ClientStats after = client_.stats();
    report_.gradients = Between(before, after);
    report_.nonfinite_units = after.nonfinite_units - before.nonfinite_units;
    report_.overlap = after.overlap;
    report_.interval = after.interval;
    return Status::Ok();
  }

  Status TrainStep(std::uint64_t step, double& loss) {
    LoadBatch(step);
    GRADWIRE_RETURN_IF_ERROR(
        model_.Forward(options_.batch, [this](std::size_t layer) { return BringIn(layer); }));
    loss = model_.Loss(labels_).loss;
    pushed_rate_ = static_cast<float>(rate_.At(step));
    GRADWIRE_RETURN_IF_ERROR(client_.SetLearningRate(ids_, static_cast<double>(pushed_rate_)));
    GRADWIRE_RETURN_IF_ERROR(
        model_.Backward(options_.batch, [this](Parameter& p) { return HandOver(p); }));
    const Clock::time_point start = Clock::now();
    const Status ended = client_.EndStep();
    report_.hand_over_seconds += SecondsSince(start);
    report_.flops += model_.StepFlops(options_.batch);
    if (optimizer_ != nullptr) optimizer_->EndStep();
    return ended;
  }

  void LoadBatch(std::uint64_t step) {
    sampler_.Batch(step, indices_);
    const std::size_t size = data_.sample_size();
    for (std::size_t i = 0; i < indices_.size(); ++i) {
      data_.Read(indices_[i], model_.input().subspan(i * size, size));
      labels_[i] = data_.label(indices_[i]);
    }
  }

  /// Starts the push-pull of a gradient, or what the method makes of it, in place.
  Status HandOver(Parameter& p) {
    if (optimizer_ != nullptr) {
      GRADWIRE_RETURN_IF_ERROR(optimizer_->Send(ids_[p.index], p.gradient.span()));
    }
    const Clock::time_point start = Clock::now();
    const MutableBytes bytes = std::as_writable_bytes(p.gradient.span());
    const Result<Handle> handle = client_.PushPullAsync(ids_[p.index], bytes, bytes);
    report_.hand_over_seconds += SecondsSince(start);
    GRADWIRE_RETURN_IF_ERROR(handle.status());
    pending_[p.index] = *handle;
    return Status::Ok();
  }

  Status BringInAll() {
    for (std::size_t layer = 0; layer < model_.layers().size(); ++layer) {
      GRADWIRE_RETURN_IF_ERROR(BringIn(layer));
    }
    return Status::Ok();
  }

  /// Adds a point to the curve if it is time for one.
  Status TestOnTheWay(double loss) {
    curve_loss_ += loss;
    if (options_.test_every == 0 || report_.steps % options_.test_every != 0) return Status::Ok();
    GRADWIRE_RETURN_IF_ERROR(BringInAll());
    const Clock::time_point start = Clock::now();
    CurvePoint point;
    point.step = report_.steps;
    point.seconds = SecondsSince(start_) - aside_seconds_;
    point.loss = curve_loss_ / static_cast<double>(options_.test_every);
    point.test = Evaluate(model_, *options_.test_data);
    report_.curve.push_back(point);
    curve_loss_ = 0.0;
    aside_seconds_ += SecondsSince(start);
    return Status::Ok();
  }

  /// Waits for the gradients of one layer and updates it, with the rate of the step that pushed
  /// them.
  Status BringIn(std::size_t layer) {
    for (Parameter& p : model_.layers()[layer]->parameters()) {
      if (!pending_[p.index]) continue;
      const Clock::time_point start = Clock::now();
      const Handle handle = *pending_[p.index];
      pending_[p.index].reset();
      const Status done = client_.Wait(handle);
      report_.wait_seconds += SecondsSince(start);
      GRADWIRE_RETURN_IF_ERROR(done);
      if (optimizer_ != nullptr) {
        const auto skipped = optimizer_->Update(handle, p.gradient.span(),
                                                static_cast<double>(pushed_rate_), p.value.span());
        GRADWIRE_RETURN_IF_ERROR(skipped.status());
        report_.skipped_updates += *skipped;
        continue;
      }
      std::vector<ElementRange> ranges = {{0, p.gradient.size()}};
      if (skips_inactive_) {
        // What the filter holds back still has this worker's own gradient: it is not looked at.
        Result<std::vector<ElementRange>> active = client_.ActiveRanges(handle);
        GRADWIRE_RETURN_IF_ERROR(active.status());
        ranges = std::move(active).value();
      }
      const bool is_finite = std::all_of(ranges.begin(), ranges.end(), [&](const auto& range) {
        return gradwire_nn_all_finite(range.count, p.gradient.data() + range.offset) != 0;
      });
      if (!is_finite) {
        ++report_.skipped_updates;
        continue;
      }
      const double decay = p.is_weight() ? options_.weight_decay : 0.0;
      for (const ElementRange& range : ranges) {
        gradwire_nn_sgd_update(range.count, pushed_rate_, static_cast<float>(options_.momentum),
                               static_cast<float>(decay), p.gradient.data() + range.offset,
                               p.velocity.data() + range.offset, p.value.data() + range.offset);
      }
    }
    return Status::Ok();
  }

  void ReportProgress(double loss) {
    mark_loss_ += loss;
    if (options_.progress_every_s <= 0.0 || !options_.on_progress) return;
    const double seconds = SecondsSince(mark_);
    if (seconds < options_.progress_every_s && report_.steps != LastStep()) return;
    const ClientStats stats = client_.stats();
    const Volume volume = Between(mark_stats_, stats);
    const auto steps = static_cast<double>(report_.steps - mark_step_);
    const double idle = report_.wait_seconds + report_.hand_over_seconds;
    const double compute = seconds - (idle - mark_idle_);
    const std::uint64_t raw = volume.raw_push_bytes + volume.raw_pull_bytes;
    const std::uint64_t wire = volume.sent_bytes + volume.received_bytes;
    Progress progress;
    progress.step = report_.steps;
    progress.total_steps = options_.steps;
    progress.loss = mark_loss_ / steps;
    progress.steps_per_second = steps / seconds;
    progress.raw_megabytes_per_second = static_cast<double>(raw) * 1e-6 / seconds;
    progress.wire_megabytes_per_second = static_cast<double>(wire) * 1e-6 / seconds;
    progress.ratio = Ratio(raw, wire);
    progress.gflops = steps * model_.StepFlops(options_.batch) / compute * 1e-9;
    progress.overlap = stats.overlap;
    progress.interval = stats.interval;
    options_.on_progress(progress);
    mark_ = Clock::now();
    mark_stats_ = stats;
    mark_step_ = report_.steps;
    mark_idle_ = idle;
    mark_loss_ = 0.0;
  }

  /// Every rank tells its digest to all, so that all fail if one differs.
  Status CompareDigests() {
    report_.digest = model_.Digest();
    for (std::uint32_t rank = 0; rank < client_.num_workers(); ++rank) {
      std::uint64_t theirs = report_.digest;
      GRADWIRE_RETURN_IF_ERROR(client_.Broadcast(
          fmt::format("digest.{}", rank), std::as_writable_bytes(std::span(&theirs, 1)), rank));
      if (theirs != report_.digest && !differs_from_) differs_from_ = {rank, theirs};
    }
    if (!differs_from_) return Status::Ok();
    return Internal(fmt::format(
        "after {} steps the parameters of rank {} have digest {:016x}, those of rank {} {:016x}",
        report_.steps, client_.rank(), report_.digest, differs_from_->rank, differs_from_->digest));
  }

  struct OtherDigest {
    std::uint32_t rank;
    std::uint64_t digest;
  };

  Client& client_;
  Model& model_;
  const Samples& data_;
  const TrainOptions& options_;
  const LearningRate rate_;
  BatchSampler sampler_;
  std::vector<TensorId> ids_;                   // by Parameter::index
  std::vector<std::optional<Handle>> pending_;  // by Parameter::index
  std::unique_ptr<JobOptimizer> optimizer_;     // null: SGD without a method
  std::vector<std::size_t> indices_;
  std::vector<std::uint8_t> labels_;
  bool skips_inactive_ = false;  // the filter leaves alone what it holds back
  float pushed_rate_ = 0.0F;     // of the step whose gradients are pending
  TrainReport report_;
  std::optional<OtherDigest> differs_from_;

  Clock::time_point start_;
  double aside_seconds_ = 0.0;  // of the tests on the way, and of saving
  double curve_loss_ = 0.0;     // sum since the last point of the curve
  // Where the last progress report was made.
  Clock::time_point mark_;
  ClientStats mark_stats_;
  std::uint64_t mark_step_ = 0;
  double mark_idle_ = 0.0;
  double mark_loss_ = 0.0;
};

}  // namespace

double DefaultRate(std::string_view method) {
  if (method == kNoMethod) return 0.05;
  if (method == "sgd" || method == "dist_ef_sgdm") return 0.01;
  if (method == "adamw" || method == "onebit_adam") return 0.001;
  return 0.01;  // a step's length over that of the tensor
}

Result<TrainReport> Train(Client& client, Model& model, const Samples& data,
                          const TrainOptions& options) {
  GRADWIRE_RETURN_IF_ERROR(CheckOptions(client, model, data, options));
  return Run(client, model, data, options).Go();
}

TestResult Evaluate(Model& model, const Samples& data) {
  TestResult result;
  if (data.size() == 0) return result;
  std::size_t correct = 0;
  std::vector<std::uint8_t> labels(model.max_batch());
  const std::size_t size = data.sample_size();
  for (std::size_t first = 0; first < data.size(); first += model.max_batch()) {
    const std::size_t count = std::min(model.max_batch(), data.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      data.Read(first + i, model.input().subspan(i * size, size));
      labels[i] = data.label(first + i);
    }
    // Nothing is pending, so the callback has nothing to do and Forward can't fail.
    static_cast<void>(model.Forward(count, [](std::size_t) { return Status::Ok(); }));
    const BatchResult batch = model.Loss(std::span(labels).first(count));
    result.loss += batch.loss * static_cast<double>(count);
    correct += batch.correct;
  }
  result.loss /= static_cast<double>(data.size());
  result.accuracy = static_cast<double>(correct) / static_cast<double>(data.size());
  return result;
}

}  // namespace gradwire::trainer
