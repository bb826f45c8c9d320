// Units: from the caller's memory through encoder, window and reply back into it.

#include <time.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "common/base/log.h"
#include "common/plan/plan.h"
#include "common/wire/nonfinite.h"
#include "worker/client/client_impl.h"

namespace gradwire {
namespace {

// When the worth of compression is told, in steps that had some.
constexpr std::uint64_t kStepsBeforeReport = 50;

// How often the interval is looked at, in steps, and how soon after it was asked for: a change
// takes some of them.
constexpr std::uint64_t kStepsBetweenMeasures = 4;
constexpr std::uint64_t kStepsAfterAsking = OverlapMeter::kSteps;
// While a link changes, the means are of neither rate. One that is never steady is taken as it is.
constexpr int kMostUnsteadyMeasures = 8;

// CPU time and not the clock's: a codec that waits for a core which the trainer uses costs nothing
// meanwhile. A call takes about a microsecond, a unit makes four.
std::chrono::nanoseconds ThreadTime() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

Result<Handle> ClientImpl::PushPullAsync(TensorId id, ByteView input, MutableBytes output) {
  std::unique_lock lock(mu_);
  if (closing_) return InvalidArgument("PushPullAsync after Close");
  if (!error_.ok()) return error_;
  if (id.index >= tensors_.size()) {
    return InvalidArgument(
        fmt::format("tensor id {} is unknown, {} are declared", id.index, tensors_.size()));
  }
  Tensor& tensor = *tensors_[id.index];
  const std::shared_ptr<const Plan> plan = plan_;  // another may come while this waits
  const TensorDeclaration& declared = plan->tensors[id.index];
  const std::size_t bytes = declared.num_elements() * SizeOf(declared.dtype);
  if (input.size() != bytes || output.size() != bytes) {
    return InvalidArgument(fmt::format(
        "tensor '{}': input is {} bytes and output {}, expected {} ({} x {})", declared.name,
        input.size(), output.size(), bytes, declared.num_elements(), DTypeName(declared.dtype)));
  }
  const auto misaligned = [&](const std::byte* p) {
    return reinterpret_cast<std::uintptr_t>(p) % SizeOf(declared.dtype) != 0;
  };
  if (misaligned(input.data()) || misaligned(output.data())) {
    return InvalidArgument(fmt::format("tensor '{}': its memory is not aligned to its {} elements",
                                       declared.name, DTypeName(declared.dtype)));
  }
  if (tensor.in_flight) {
    return InvalidArgument(
        fmt::format("tensor '{}' on rank {} is already in flight: wait for its "
                    "handle before it is pushed again",
                    declared.name, rank_));
  }
  // A unit whose next step has ended has no room for a third.
  const auto has_no_room = [&](const auto& part) { return units_[part.first]->next_ended; };
  const auto has_room = [&] {
    return closing_ || std::none_of(tensor.parts.begin(), tensor.parts.end(), has_no_room);
  };
  if (!has_room()) {
    GRADWIRE_RETURN_IF_ERROR(Await(lock, has_room, [&] {
      const auto part = std::find_if(tensor.parts.begin(), tensor.parts.end(), has_no_room);
      return fmt::format("tensor '{}': the round of two steps ago is not answered: {}",
                         declared.name, DescribeUnitWait(*units_[part->first]));
    }));
    if (closing_) return InvalidArgument("PushPullAsync after Close");
  }

  GRADWIRE_RETURN_IF_ERROR(CheckScale(id.index));

  stats_.raw_push_bytes += bytes;
  stats_.raw_pull_bytes += bytes;
  const Handle handle{id, ++tensor.generation};
  if (tensor.parts.empty()) return handle;  // no elements: done
  if (declared.op != ReduceOp::kBroadcast) {
    overlap_.HandedOver(step_, {goodput_.bytes(), goodput_.busy()}, Clock::now());
  }
  tensor.step = step_;
  tensor.in_flight = true;
  tensor.outcome = Status();
  tensor.nonfinite_ranks.reset();
  ++in_flight_;
  tensor.units_left = static_cast<std::uint32_t>(tensor.parts.size());
  tensor.held = BlobRef(tensor.memory.get());
  const std::size_t size = SizeOf(declared.dtype);
  for (const auto& [key, m] : tensor.parts) {
    UnitWork& work = *units_[key];
    const std::size_t offset = work.unit->members[m].tensor_offset * size;
    const MemberMemory memory{input.data() + offset, output.data() + offset};
    if (work.state == UnitState::kGathering) {
      work.memory[m] = memory;
      if (work.members_here++ == 0) {
        work.step = step_;
        work.scale = ScaleOf(tensor, *work.unit);
        work.first_tensor = id.index;
      }
      if (work.members_here == work.unit->members.size()) MakeReady(work);
    } else {
      work.next_memory[m] = memory;
      if (work.next_members_here++ == 0) {
        work.next_step = step_;
        work.next_scale = ScaleOf(tensor, *work.unit);
        work.next_first_tensor = id.index;
      }
    }
  }
  return handle;
}

GradientScale ClientImpl::ScaleOf(const Tensor& tensor, const Unit& unit) const {
  const Phase& phase = unit.phases[unit.PhaseAt(step_)];
  const bool has_residual =
      phase.has_feedback() || MayHoldBack(plan_->filter, plan_->units[unit.key], step_);
  return {phase.needs_rate() ? tensor.learning_rate.value_or(0) : 0,
          has_residual ? loss_scale_ : 0};
}

Status ClientImpl::CheckScale(std::uint32_t index) const {
  const Tensor& tensor = *tensors_[index];
  const std::string& name = plan_->tensors[index].name;
  for (const auto& [key, member] : tensor.parts) {
    const UnitWork& work = *units_[key];
    const Phase& phase = work.unit->phases[work.unit->PhaseAt(step_)];
    if (phase.needs_rate() && !tensor.learning_rate) {
      return InvalidArgument(
          fmt::format("tensor '{}' on rank {} has feedback ef_lr, and no learning rate was given: "
                      "set it before the first push",
                      name, rank_));
    }
    const bool gathers = work.state == UnitState::kGathering;
    if ((gathers ? work.members_here : work.next_members_here) == 0) continue;
    const GradientScale mine = ScaleOf(tensor, *work.unit);
    const GradientScale& theirs = gathers ? work.scale : work.next_scale;
    for (const auto& [what, a, b] :
         {std::tuple{"but is pushed with learning rate", mine.learning_rate, theirs.learning_rate},
          std::tuple{"but is pushed with loss scale", mine.loss_scale, theirs.loss_scale}}) {
      if (a == b) continue;
      return InvalidArgument(fmt::format(
          "tensor '{}' on rank {} is fused with '{}', {} {}, that with {}: expected the same", name,
          rank_, plan_->tensors[gathers ? work.first_tensor : work.next_first_tensor].name, what, a,
          b));
    }
  }
  return Status::Ok();
}

Status ClientImpl::SetLearningRate(std::span<const TensorId> tensors, double rate) {
  if (!std::isfinite(rate) || rate < 0) {
    return InvalidArgument(
        fmt::format("learning rate is {}, expected a finite number from 0", rate));
  }
  const std::lock_guard lock(mu_);
  for (const TensorId id : tensors) {
    if (id.index < tensors_.size()) continue;
    return InvalidArgument(
        fmt::format("learning rate of tensor id {}, {} are declared", id.index, tensors_.size()));
  }
  for (const TensorId id : tensors) tensors_[id.index]->learning_rate = rate;
  return Status::Ok();
}

Status ClientImpl::SetLossScale(double scale) {
  if (!std::isfinite(scale) || scale < 0) {
    return InvalidArgument(fmt::format("loss scale is {}, expected a finite number from 0", scale));
  }
  const std::lock_guard lock(mu_);
  loss_scale_ = scale;
  return Status::Ok();
}

Status ClientImpl::EndStep() {
  std::unique_lock lock(mu_);
  if (has_unsaid_state_) {
    lock.unlock();
    SayUnusedState();
    lock.lock();
  }
  if (closing_) return InvalidArgument("EndStep after Close");
  if (!error_.ok()) return error_;
  GRADWIRE_RETURN_IF_ERROR(KeepPromise(lock, step_ + 1));
  ++step_;
  ConsiderInterval();
  for (const auto& work : units_) {
    if (work->state == UnitState::kGathering) {
      if (work->members_here > 0) MakeReady(*work);
    } else if (work->next_members_here > 0) {
      work->next_ended = true;
    }
  }
  if (compression_was_told_ || !first_compressed_step_ ||
      step_ - *first_compressed_step_ < kStepsBeforeReport || goodput_.bytes_per_second() == 0.0) {
    return Status::Ok();
  }
  compression_was_told_ = true;
  ClientStats worth;
  AddCompression(worth);
  lock.unlock();
  std::string text = fmt::format("compression saves {:.3f} ms and costs {:.3f} ms a step",
                                 worth.compression_saves_ms, worth.compression_costs_ms);
  if (worth.compression_costs_ms > worth.compression_saves_ms) {
    text +=
        "; plain gradients are faster here: set compression.uplink.compressor and "
        "compression.downlink.compressor to none";
  }
  LogInfo(
      "client", text,
      {Field("saves_ms", worth.compression_saves_ms), Field("costs_ms", worth.compression_costs_ms),
       Field("goodput_mbit_s", worth.goodput * 8e-6), Field("rank", rank_)});
  return Status::Ok();
}

Status ClientImpl::AskForInterval(std::uint32_t interval) {
  const std::lock_guard lock(mu_);
  if (closing_) return InvalidArgument("AskForInterval after Close");
  if (!error_.ok()) return error_;
  if (rank_ != 0 || !IsIntervalMeasured() || interval == 0 || interval > kMaxFilterInterval) {
    return InvalidArgument(fmt::format(
        "rank {} asks for the interval {}, expected rank 0 and 1 to {}, with a filter whose "
        "interval is auto",
        rank_, interval, kMaxFilterInterval));
  }
  chooses_interval_ = false;
  AskRootForInterval(interval);
  return Status::Ok();
}

void ClientImpl::AskRootForInterval(std::uint32_t interval) {
  asked_interval_ = interval;
  loop_->Post([this, interval] {
    Header header;
    header.kind = MessageKind::kAskInterval;
    header.step = interval;
    SendControl(0, header, {});
  });
}

void ClientImpl::ConsiderInterval() {
  if (rank_ != 0 || !chooses_interval_ || replays_plan_ || !IsIntervalMeasured()) return;
  const std::vector<FilterStage>& stages = plan_->filter.stages;
  // Only steps of the interval that holds count, and none of a warm-up.
  if (stages.empty() || step_ < next_measured_step_ ||
      step_ < stages.back().first_step + OverlapMeter::kSteps) {
    return;
  }
  const OverlapFigures figures = overlap_.figures();
  if (figures.steps < OverlapMeter::kSteps || figures.full_ccr() <= 0) return;
  next_measured_step_ = step_ + kStepsBetweenMeasures;
  if (!overlap_.is_steady() && ++unsteady_measures_ < kMostUnsteadyMeasures) return;
  unsteady_measures_ = 0;
  const std::uint32_t now = stages.back().interval;
  const std::uint32_t most =
      std::clamp(NumFilteredUnits(*plan_), std::uint32_t{1}, kMaxFilterInterval);
  const auto interval = interval_rule_.Decide(figures.full_ccr(), now, most);
  if (!interval) return;
  LogInfo("client", "another interval fits better",
          {Field("from", now), Field("to", *interval),
           Field("ccr", fmt::format("{:.2f}", figures.full_ccr())),
           Field("comm_ms", fmt::format("{:.2f}", figures.full_comm_ms)),
           Field("compute_ms", fmt::format("{:.2f}", figures.compute_ms)), Field("step", step_)});
  next_measured_step_ = step_ + kStepsAfterAsking;
  AskRootForInterval(*interval);
}

Status ClientImpl::KeepPromise(std::unique_lock<std::mutex>& lock, std::uint64_t step) {
  const auto keeps = [&] { return !promise_ || step < promise_->limit; };
  if (keeps()) return Status::Ok();
  return Await(lock, keeps, [&] {
    return fmt::format("step {}: another interval begins, and the root's plan has not come", step);
  });
}

void ClientImpl::OnAskStep(const Header& header) {
  Header answer;
  answer.kind = MessageKind::kStep;
  answer.round = header.round;
  {
    const std::lock_guard lock(mu_);
    // Asked twice, around a cut, it says the same.
    if (!promise_ || promise_->question != header.round) {
      promise_ = {header.round, step_, step_ + header.step};
    }
    answer.step = promise_->step;
  }
  SendControl(0, answer, {});
}

void ClientImpl::AddCompression(ClientStats& stats) const {
  stats.goodput = goodput_.bytes_per_second();
  if (!first_compressed_step_) return;
  const auto steps =
      static_cast<double>(std::max<std::uint64_t>(step_ - *first_compressed_step_, 1));
  stats.compression_costs_ms =
      std::chrono::duration<double, std::milli>(codec_time_).count() / steps;
  if (stats.goodput > 0.0) {
    stats.compression_saves_ms = static_cast<double>(saved_bytes_) / stats.goodput * 1e3 / steps;
  }
}

Status ClientImpl::PrepareUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  work.phase = unit.PhaseAt(work.step);
  const bool may_hold_back = MayHoldBack(plan_->filter, plan_->units[unit.key], work.step);
  if (work.prepared_phase == work.phase && work.may_hold_back == may_hold_back) {
    return Status::Ok();
  }
  const Phase& phase = unit.phases[work.phase];
  work.uplink = nullptr;
  work.downlink = nullptr;
  work.residual = nullptr;
  work.uplink_compresses = false;
  work.downlink_compresses = false;
  if (!IsTypedReduction(unit, work.phase)) {
    // `none` of fp32, fp16 and bf16 is the memory itself; fp64 that meets a compressor is
    // converted.
    const auto is_raw = [&](const std::string& spec) {
      return spec == "none" && unit.dtype != DType::kFloat64;
    };
    // Where the filter adds what it has held back, `none` has something to encode.
    if (!is_raw(phase.uplink) || may_hold_back) {
      const auto codec = codecs_.GetFor(phase.uplink, unit.dtype);
      if (!codec.ok()) return codec.status();
      work.uplink = *codec;
    }
    if (!is_raw(phase.downlink)) {
      const auto codec = codecs_.Get(phase.downlink);
      if (!codec.ok()) return codec.status();
      work.downlink = *codec;
    }
    const bool keeps_rest = phase.uplink_feedback != Feedback::kNone || phase.uplink == "none";
    work.drains = may_hold_back && !keeps_rest;
    if (may_hold_back || (phase.uplink_feedback != Feedback::kNone && work.uplink != nullptr)) {
      const auto residual = residuals_.Get(unit.key, RangesOf(*work.plan, unit), *work.uplink);
      if (!residual.ok()) return residual.status();
      GRADWIRE_RETURN_IF_ERROR(residuals_.ChangeCodec(unit.key, *work.uplink));
      work.residual = *residual;
    }
  }
  work.uplink_compresses = work.uplink != nullptr && phase.uplink != "none";
  work.downlink_compresses = work.downlink != nullptr && phase.downlink != "none";
  work.prepared_phase = work.phase;
  work.may_hold_back = may_hold_back;
  return Status::Ok();
}

void ClientImpl::MakeReady(UnitWork& work) {
  if (const Status status = PrepareUnit(work); !status.ok()) {
    PostFail(status);
    return;
  }
  const Unit& unit = *work.unit;
  if (!first_compressed_step_ && (work.uplink_compresses || work.downlink_compresses)) {
    first_compressed_step_ = work.step;
  }
  work.nonfinite = false;
  work.receipted = false;
  work.is_active = IsActive(plan_->filter, plan_->units[unit.key], work.step);
  if (!work.is_active) {
    work.weight = WeightAt(plan_->filter, work.step);
    work.state = UnitState::kReady;
    held_back_.Push({unit.priority, unit.key});
    ScheduleEncode();
    return;
  }
  const bool one_tensor = unit.members.size() == 1;
  if (unit.op == ReduceOp::kBroadcast && !tensors_[unit.members[0].tensor]->is_broadcast_root) {
    work.payload = {};
  } else if (work.uplink == nullptr && one_tensor) {
    // Straight from the caller's memory.
    work.payload = {tensors_[unit.members[0].tensor]->held,
                    ByteView(work.memory[0].input, unit.raw_bytes())};
    if (unit.op == ReduceOp::kBroadcast) work.memory[0].output = nullptr;  // the root has it
  } else {
    work.state = UnitState::kReady;
    ready_.Push({unit.priority, unit.key});
    ScheduleEncode();
    return;
  }
  work.state = UnitState::kSendable;
  servers_[unit.server].sendable.Push({unit.priority, unit.key});
  ScheduleSend();
}

void ClientImpl::ScheduleEncode() {
  const int most = std::max(executor_->concurrency(), 1);
  const std::size_t waiting = ready_.size() + held_back_.size();
  while (encoders_ < most && static_cast<std::size_t>(encoders_) < waiting) {
    ++encoders_;
    if (executor_->concurrency() == 0) {
      loop_->Post([this] { RunEncoder(); });
    } else {
      executor_->Post([this] { RunEncoder(); });
    }
  }
}

void ClientImpl::ScheduleSend() {
  if (send_posted_) return;
  send_posted_ = true;
  loop_->Post([this] {
    {
      const std::lock_guard lock(mu_);
      send_posted_ = false;
    }
    SendPump();
  });
}

void ClientImpl::RunEncoder() {
  std::unique_lock lock(mu_);
  const auto bound_of = [](const UnitWork& work) {
    return work.uplink != nullptr ? work.uplink->MaxEncodedSize(work.unit->num_elements)
                                  : work.unit->raw_bytes();
  };
  while (error_.ok()) {
    // What is held back needs no token, and yields to what others wait for.
    if (ready_.empty() || !encoded_.Admits(bound_of(*units_[ready_.Top().key]))) {
      if (held_back_.empty()) break;  // a receipt calls again
      UnitWork& work = *units_[held_back_.Pop().key];
      work.state = UnitState::kEncoding;
      lock.unlock();
      HoldBackUnit(work);
      NoteComputed();
      lock.lock();
      if (executor_->concurrency() > 0) continue;
      // This is the loop's thread: receipts and replies come in between, or the wire stands idle.
      --encoders_;
      if (error_.ok()) ScheduleEncode();
      return;
    }
    UnitWork& work = *units_[ready_.Top().key];
    const std::size_t bound = bound_of(work);
    ready_.Pop();
    encoded_.Take(bound);
    work.token_bytes = bound;
    work.state = UnitState::kEncoding;
    lock.unlock();
    EncodeUnit(work);
    NoteComputed();
    lock.lock();
    if (!work.outcome.ok()) PostFail(work.outcome);
    if (!error_.ok() || !work.outcome.ok()) {
      ReleaseList released;
      RetireUnit(work, work.outcome.ok() ? error_ : work.outcome, released);
      lock.unlock();
      released.Drop();
      lock.lock();
      break;
    }
    work.state = UnitState::kSendable;
    servers_[work.unit->server].sendable.Push({work.unit->priority, work.unit->key});
    if (executor_->concurrency() > 0) {
      ScheduleSend();
    } else {
      lock.unlock();
      SendPump();  // this is the loop's thread
      lock.lock();
    }
  }
  --encoders_;
}

void ClientImpl::EncodeUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  work.outcome = Status::Ok();
  if (work.uplink == nullptr) {
    const PooledBuffer buffer = pool_.Acquire(unit.raw_bytes());
    GatherBytes(unit, work.memory, buffer.bytes().data());
    work.payload = buffer.Share(unit.raw_bytes());
    return;
  }
  if (work.residual != nullptr) {
    GradientScale scale = work.scale;
    if (unit.phases[work.phase].uplink_feedback != Feedback::kEfLr) scale.learning_rate = 0;
    BringToScale(*work.uplink, scale, *work.residual);
  }
  const CodecContext context = PushContext(RoundSeedOf(work), rank_);
  UnitSource source(unit, work.memory, convert_);
  const PooledBuffer buffer = pool_.Acquire(work.uplink->MaxEncodedSize(unit.num_elements));
  const auto begin = ThreadTime();
  const auto encode = [&]() -> Result<Encoded> {
    if (!work.drains) {
      return work.uplink->Encode(source, unit.num_elements, context, work.residual, buffer.bytes());
    }
    // The residual is q until the reply says that it was delivered.
    work.uplink->Flush(*work.residual);
    if (covap::HoldBack(source, 1.0F, work.residual->values).nonfinite > 0) {
      return Encoded{.finite = false};
    }
    return EncodeSpan(*work.uplink, work.residual->values, context, buffer.bytes());
  };
  const auto encoded = encode();
  if (!encoded.ok()) {
    work.outcome = encoded.status();
    return;
  }
  if (encoded->out_of_bound != 0 && work.residual != nullptr && !work.drains) {
    std::optional<std::uint64_t> suppressed;
    {
      const std::lock_guard lock(mu_);
      suppressed = out_of_bound_log_.Admit();
    }
    if (suppressed) {
      LogWarn("client", "the residual of an uplink grows: values beyond what its compressor bounds",
              {Field("unit", Name(*work.plan, unit)), Field("step", work.step),
               Field("compressor", unit.phases[work.phase].uplink),
               Field("elements", encoded->out_of_bound), Field("of", unit.num_elements),
               Field("suppressed", *suppressed)});
    }
  }
  if (work.uplink_compresses && encoded->finite) {
    work.codec_time += ThreadTime() - begin;
    work.saved_bytes += static_cast<std::int64_t>(unit.raw_bytes()) -
                        static_cast<std::int64_t>(encoded->payload_bytes);
  }
  work.nonfinite = !encoded->finite;
  work.payload = encoded->finite ? buffer.Share(encoded->payload_bytes) : Payload{};
}

void ClientImpl::HoldBackUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  GradientScale scale = work.scale;
  scale.learning_rate = 0;
  BringToScale(*work.uplink, scale, *work.residual);
  work.uplink->Flush(*work.residual);
  UnitSource source(unit, work.memory, convert_);
  const covap::HeldBack held = covap::HoldBack(source, work.weight, work.residual->values);
  std::optional<std::uint64_t> suppressed;
  bool skips = false;
  {
    const std::lock_guard lock(mu_);
    ++stats_.held_back_units;
    stats_.held_back_nonfinite += held.nonfinite;
    if (held.first) suppressed = held_back_log_.Admit();
    skips = plan_->filter.skips_inactive;
  }
  if (suppressed) {
    const UnitMember& member = MemberAt(unit, *held.first);
    LogWarn("client", "held back: elements that are not finite are left out",
            {Field("unit", Name(*work.plan, unit)), Field("step", work.step),
             Field("elements", held.nonfinite),
             Field("first",
                   fmt::format("tensor '{}', element {}", work.plan->tensors[member.tensor].name,
                               member.tensor_offset + *held.first - member.unit_offset)),
             Field("suppressed", *suppressed)});
  }
  if (!skips) FillZero(unit, work.memory);  // after the gradient was read: it may be there
  work.outcome = Status::Ok();
  FinishUnit(work);
}

void ClientImpl::SendPump() {
  std::unique_lock lock(mu_);
  for (ServerLink& link : servers_) {
    while (!link.sendable.empty() && error_.ok()) {
      UnitWork& work = *units_[link.sendable.Top().key];
      if (work.state != UnitState::kSendable) {
        link.sendable.Pop();  // answered in the meantime, after a reconnect
        continue;
      }
      Connection& connection = *connections_[work.connection];
      if (!connection.up || !link.window.Admits(work.payload.size())) break;
      link.sendable.Pop();
      link.window.Take(work.payload.size());
      work.state = UnitState::kSent;
      Header header;
      header.kind = MessageKind::kPush;
      header.rank = rank_;
      header.incarnation = incarnation_;
      header.plan_version = plan_->version;
      header.phase = work.phase;
      header.step = work.step;
      header.round = work.round;
      header.key = work.unit->key;
      header.sequence = connection.next_sequence++;
      header.nonfinite = work.nonfinite;
      header.learning_rate = work.scale.learning_rate;
      header.loss_scale = work.scale.loss_scale;
      connection.unreceipted.Push({header.sequence, header.key, header.round, work.payload.size()});
      Payload payload = work.payload;
      const PeerId peer = connection.peer;
      goodput_.Sent(Clock::now());
      overlap_.Pushed(work.payload.size(), IntervalOf(work));
      lock.unlock();
      // A peer that has just gone: OnDown puts the unit back into the queue.
      (void)loop_->Send(peer, header, std::move(payload));
      lock.lock();
    }
  }
}

void ClientImpl::GiveToken(UnitWork& work) {
  encoded_.Give(work.token_bytes);
  work.token_bytes = 0;
}

void ClientImpl::OnReceipt(Connection& connection, std::uint64_t sequence) {
  {
    const std::lock_guard lock(mu_);
    bool any = false;
    const Clock::time_point now = Clock::now();
    while (!connection.unreceipted.empty() && connection.unreceipted.Front().sequence <= sequence) {
      const Unreceipted sent = connection.unreceipted.Pop();
      servers_[connection.server].window.Give(sent.bytes);
      goodput_.Receipted(sent.bytes, now);
      UnitWork& work = *units_[sent.key];
      if (work.state == UnitState::kSent && work.round == sent.round) {
        work.receipted = true;
        GiveToken(work);
      }
      any = true;
    }
    if (!any) return;
    if (!ready_.empty()) ScheduleEncode();
  }
  SendPump();
}

void ClientImpl::OnReply(const Header& header, Payload payload) {
  UnitWork* work = nullptr;
  {
    const std::lock_guard lock(mu_);
    if (header.key >= units_.size()) return;
    work = units_[header.key].get();
    if (work->round != header.round ||
        (work->state != UnitState::kSent && work->state != UnitState::kSendable)) {
      return;  // a second answer after a reconnect
    }
    work->state = UnitState::kDecoding;
    work->reply_kind = header.reply;
    overlap_.Pulled(payload.size(), IntervalOf(*work));
    work->reply = std::move(payload);
    GiveToken(*work);  // after a cut the reply may come without the receipt
    if (!ready_.empty()) ScheduleEncode();
  }
  executor_->Post([this, work] { DecodeUnit(*work); });
}

void ClientImpl::OnPushAgain(const Header& header) {
  {
    const std::lock_guard lock(mu_);
    if (header.key >= units_.size()) return;
    UnitWork& work = *units_[header.key];
    if (work.round != header.round || work.state != UnitState::kSent) return;
    work.state = UnitState::kSendable;
    work.receipted = false;
    servers_[work.unit->server].sendable.Push({work.unit->priority, work.unit->key});
    ++stats_.resent_pushes;
  }
  SendPump();
}

void ClientImpl::DecodeUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  const Phase& phase = unit.phases[work.phase];
  const CodecContext context =
      PullContext(RoundSeedOf(work), config_.job.workers, phase.uplink == phase.downlink);
  const auto begin = work.downlink_compresses ? ThreadTime() : std::chrono::nanoseconds();
  Status status;
  if (work.reply_kind == ReplyKind::kNonfinite) {
    status = DecodeVoid(work);
  } else if (work.downlink == nullptr) {
    if (work.reply.size() == unit.raw_bytes()) {
      ScatterBytes(unit, work.reply.bytes.data(), work.memory);
    } else {
      status = CorruptData(
          fmt::format("reply is {} bytes, expected {}", work.reply.size(), unit.raw_bytes()));
    }
  } else if (unit.members.size() == 1 && unit.dtype == DType::kFloat32) {
    status =
        work.downlink->Decode(work.reply.bytes, context,
                              {reinterpret_cast<float*>(work.memory[0].output), unit.num_elements});
  } else {
    const PooledBuffer buffer = pool_.Acquire(unit.num_elements * sizeof(float));
    auto* const values = reinterpret_cast<float*>(buffer.bytes().data());
    status = work.downlink->Decode(work.reply.bytes, context, {values, unit.num_elements});
    if (status.ok()) ScatterFloats(unit, values, work.memory, convert_);
  }
  if (work.drains && status.ok() && work.reply_kind == ReplyKind::kResult) {
    std::fill(work.residual->values.begin(), work.residual->values.end(), 0.0F);
  }
  if (work.downlink_compresses && work.reply_kind == ReplyKind::kResult) {
    work.codec_time += ThreadTime() - begin;
    work.saved_bytes +=
        static_cast<std::int64_t>(unit.raw_bytes()) - static_cast<std::int64_t>(work.reply.size());
  }
  NoteComputed();
  work.outcome = status.ok()
                     ? Status::Ok()
                     : Status(status.code(), fmt::format("{}, round {}: {}", Name(*work.plan, unit),
                                                         work.round, status.message()));
  FinishUnit(work);
}

Status ClientImpl::DecodeVoid(UnitWork& work) {
  const Unit& unit = *work.unit;
  if (!IsFloat(unit.dtype) || unit.op == ReduceOp::kBroadcast) {
    return CorruptData(fmt::format("reply says that it is not finite, which {} of {} cannot be",
                                   ReduceOpName(unit.op), DTypeName(unit.dtype)));
  }
  const auto ranks = ParseNonfiniteRanks(work.reply.bytes, config_.job.workers);
  if (!ranks.ok()) return ranks.status();
  std::optional<std::uint64_t> suppressed;
  {
    const std::lock_guard lock(mu_);
    suppressed = NoteVoid(work, *ranks);
  }
  if (suppressed) {
    // Before the output is written, which may be the same memory.
    const auto own = FindNonfinite(unit, work.memory, convert_);
    LogWarn(
        "client", "void round: not finite, every rank gets NaN",
        {Field("unit", Name(*work.plan, unit)), Field("step", work.step),
         Field("ranks", DescribeNonfiniteRanks(*ranks)), Field("suppressed", *suppressed),
         Field("here", own ? fmt::format("tensor '{}', element {}",
                                         work.plan->tensors[unit.members[own->member].tensor].name,
                                         own->tensor_offset)
                           : "finite")});
  }
  if (work.residual != nullptr && !work.nonfinite && !work.drains) {
    work.uplink->Undo(work.payload.bytes, PushContext(RoundSeedOf(work), rank_), *work.residual);
  }
  if (work.residual != nullptr && pushes_state_) {
    // A gradient must not be lost, so q stays. A momentum has the one before in it: the next push
    // would count it twice. Before the output is written, as above.
    UnitSource source(unit, work.memory, convert_);
    RestoreAfterVoidRound(source, *work.residual);
  }
  FillVoid(unit, work.memory);
  return Status::Ok();
}

std::optional<std::uint64_t> ClientImpl::NoteVoid(const UnitWork& work,
                                                  std::span<const std::uint32_t> ranks) {
  ++stats_.nonfinite_units;
  for (std::size_t m = 0; m < work.memory.size(); ++m) {
    if (work.memory[m].input == nullptr) continue;
    auto& known = tensors_[work.unit->members[m].tensor]->nonfinite_ranks;
    std::vector<std::uint32_t> all;
    if (known) all = *known;
    all.insert(all.end(), ranks.begin(), ranks.end());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    known = std::move(all);
  }
  return nonfinite_log_.Admit();
}

void ClientImpl::FinishUnit(UnitWork& work) {
  ReleaseList released;
  Payload reply;
  {
    const std::lock_guard lock(mu_);
    if (!work.outcome.ok()) PostFail(work.outcome);
    codec_time_ += std::exchange(work.codec_time, {});
    saved_bytes_ += std::exchange(work.saved_bytes, 0);
    reply = std::move(work.reply);
    work.reply = {};
    if (work.is_active) ++work.round;
    RetireUnit(work, work.outcome, released);
    if (error_.ok()) StartNext(work);
  }
}

void ClientImpl::RetireUnit(UnitWork& work, const Status& outcome, ReleaseList& released) {
  released.Add(std::move(work.payload.owner));
  work.payload = {};
  work.state = UnitState::kGathering;
  work.members_here = 0;
  GiveToken(work);
  for (std::size_t m = 0; m < work.memory.size(); ++m) {
    if (work.memory[m].input == nullptr) continue;
    work.memory[m] = {};
    LeaveUnit(work.unit->members[m].tensor, outcome, released);
  }
}

void ClientImpl::LeaveUnit(std::uint32_t index, const Status& outcome, ReleaseList& released) {
  Tensor& tensor = *tensors_[index];
  if (!outcome.ok() && tensor.outcome.ok()) tensor.outcome = outcome;
  if (--tensor.units_left == 0) released.Add(std::move(tensor.held));
}

void ClientImpl::StartNext(UnitWork& work) {
  if (work.next_members_here == 0) return;
  work.memory.swap(work.next_memory);
  std::fill(work.next_memory.begin(), work.next_memory.end(), MemberMemory{});
  work.members_here = std::exchange(work.next_members_here, 0);
  work.step = work.next_step;
  work.scale = work.next_scale;
  work.first_tensor = work.next_first_tensor;
  const bool ended = std::exchange(work.next_ended, false);
  if (ended || work.members_here == work.unit->members.size()) MakeReady(work);
  changed_.notify_all();
}

void ClientImpl::OnMemoryReleased(std::uint32_t index) {
  const std::lock_guard lock(mu_);
  tensors_[index]->in_flight = false;
  --in_flight_;
  changed_.notify_all();
}

std::string ClientImpl::DescribeUnitWait(const UnitWork& work) const {
  const Unit& unit = *work.unit;
  switch (work.state) {
    case UnitState::kGathering: {
      std::string missing;
      for (std::size_t i = 0; i < work.memory.size(); ++i) {
        if (work.memory[i].input != nullptr) continue;
        missing +=
            (missing.empty() ? "'" : ", '") + plan_->tensors[unit.members[i].tensor].name + "'";
      }
      return fmt::format(
          "it is fused with {}, which this worker has not pushed (EndStep sends zeros for them)",
          missing);
    }
    case UnitState::kReady:
    case UnitState::kEncoding:
      return fmt::format("{} waits to be encoded", Name(*plan_, unit));
    case UnitState::kSendable:
      return fmt::format("{} waits for {} server {}", Name(*plan_, unit),
                         connections_[work.connection]->up ? "credit of" : "the connection to",
                         unit.server);
    case UnitState::kSent:
      return fmt::format("{} {} server {} and waits for the other workers", Name(*plan_, unit),
                         work.receipted ? "is at" : "is on its way to", unit.server);
    case UnitState::kDecoding:
      return fmt::format("{} is being decoded", Name(*plan_, unit));
  }
  return {};
}

std::string ClientImpl::DescribeWait(std::uint32_t index) const {
  for (const auto& [key, m] : tensors_[index]->parts) {
    const UnitWork& work = *units_[key];
    if (work.memory[m].input != nullptr || work.next_memory[m].input != nullptr) {
      return DescribeUnitWait(work);
    }
  }
  return "its memory is still being sent";
}

Status ClientImpl::CheckIdle() const {
  if (in_flight_ == 0) return Status::Ok();
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (!tensors_[t]->in_flight) continue;
    return InvalidArgument(
        fmt::format("the residuals of rank {} change while a push-pull is under way: {}", rank_,
                    DescribeInFlight(t)));
  }
  return Status::Ok();
}

std::string ClientImpl::DescribeInFlight(std::uint32_t index) const {
  return fmt::format("tensor '{}' is in flight: {}", plan_->tensors[index].name,
                     DescribeWait(index));
}

std::string ClientImpl::DescribeIncomplete() const {
  for (const auto& work : units_) {
    if (work->state != UnitState::kGathering || work->members_here == 0) continue;
    for (std::size_t m = 0; m < work->memory.size(); ++m) {
      if (work->memory[m].input != nullptr) return DescribeInFlight(work->unit->members[m].tensor);
    }
  }
  return {};
}

Status ClientImpl::Wait(const Handle& handle) {
  std::unique_lock lock(mu_);
  const std::uint32_t index = handle.tensor.index;
  if (index >= tensors_.size()) {
    return InvalidArgument(
        fmt::format("handle names tensor {}, {} are declared", index, tensors_.size()));
  }
  Tensor& tensor = *tensors_[index];
  const auto done = [&] { return !tensor.in_flight || tensor.generation != handle.generation; };
  overlap_.WaitBegins(Clock::now());
  const Status waited = done() ? Status::Ok() : Await(lock, done, [&] {
    return fmt::format("tensor '{}' has waited: {}", plan_->tensors[index].name,
                       DescribeWait(index));
  });
  overlap_.WaitEnds(Clock::now());
  // After a failure what is left is memory that others still read.
  if (!waited.ok() && !changed_.wait_for(lock, kReleaseTimeout, done)) return waited;
  return tensor.generation == handle.generation ? tensor.outcome : error_;
}

Status ClientImpl::WaitFor(const Handle& handle, std::chrono::milliseconds timeout) {
  if (timeout < std::chrono::milliseconds(config_.timeouts.stall_stop_ms)) {
    std::unique_lock lock(mu_);
    const std::uint32_t index = handle.tensor.index;
    const auto over = [&] {
      return !error_.ok() || index >= tensors_.size() || !tensors_[index]->in_flight ||
             tensors_[index]->generation != handle.generation;
    };
    overlap_.WaitBegins(Clock::now());
    const bool in_time = changed_.wait_for(lock, timeout, over);
    overlap_.WaitEnds(Clock::now());
    if (!in_time) {
      return Timeout(fmt::format("tensor '{}' on rank {} is not complete after {} ms: {}",
                                 plan_->tensors[index].name, rank_, timeout.count(),
                                 DescribeWait(index)));
    }
  }
  return Wait(handle);
}

bool ClientImpl::Poll(const Handle& handle) {
  const std::lock_guard lock(mu_);
  if (handle.tensor.index >= tensors_.size()) return true;
  const Tensor& tensor = *tensors_[handle.tensor.index];
  return !tensor.in_flight || tensor.generation != handle.generation;
}

std::optional<std::vector<std::uint32_t>> ClientImpl::NonfiniteRanks(const Handle& handle) const {
  const std::lock_guard lock(mu_);
  if (handle.tensor.index >= tensors_.size()) return std::nullopt;
  const Tensor& tensor = *tensors_[handle.tensor.index];
  if (tensor.in_flight || tensor.generation != handle.generation) return std::nullopt;
  return tensor.nonfinite_ranks;
}

Result<std::vector<ElementRange>> ClientImpl::ActiveRanges(const Handle& handle) const {
  const std::lock_guard lock(mu_);
  const std::uint32_t index = handle.tensor.index;
  if (index >= tensors_.size() || tensors_[index]->generation != handle.generation ||
      handle.generation == 0) {
    return InvalidArgument(
        fmt::format("active ranges of tensor {}: the handle is not of its last push-pull", index));
  }
  const Tensor& tensor = *tensors_[index];
  std::vector<ElementRange> ranges;
  for (const auto& [key, m] : tensor.parts) {
    const Unit& unit = plan_->units[key];
    if (!IsActive(plan_->filter, unit, tensor.step)) continue;
    ranges.push_back({unit.members[m].tensor_offset, unit.members[m].count});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const ElementRange& a, const ElementRange& b) { return a.offset < b.offset; });
  std::vector<ElementRange> joined;
  for (const ElementRange& range : ranges) {
    if (!joined.empty() && joined.back().offset + joined.back().count == range.offset) {
      joined.back().count += range.count;
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace gradwire
