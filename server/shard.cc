#include "server/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/base/random.h"
#include "common/plan/units.h"
#include "common/wire/nonfinite.h"

namespace gradwire {

struct Shard::Key {
  const Unit* unit = nullptr;
  RoundState state = RoundState::kCollecting;
  std::uint64_t round = 0;  // the open one
  std::uint64_t step = 0;   // what the first push of the round said; others must agree
  std::uint32_t phase = 0;
  GradientScale scale;           // the same
  std::uint32_t first_rank = 0;  // whose push it was
  std::uint32_t present = 0;
  Clock::time_point opened;                 // when the first push of the round came
  std::vector<Contribution> contributions;  // [rank]

  // Of the phase that holds in the open round.
  std::uint32_t prepared_phase = UINT32_MAX;
  const Compressor* uplink = nullptr;
  const Compressor* downlink = nullptr;
  Residual* residual = nullptr;

  bool has_kept = false;  // the reply of round - 1
  ReduceOutput kept;
  std::uint64_t kept_step = 0;
  std::uint32_t kept_phase = 0;

  // The reduction under way: what it reads, with the plan it points into, and what came of it.
  ReduceInput input;
  std::shared_ptr<const Plan> input_plan;
  Status outcome;
  ReduceOutput result;
};

Shard::Shard(const Options& options, CodecCache& codecs, ResidualStore& residuals,
             Executor& executor, BufferPool& pool, std::function<void(std::function<void()>)> post,
             ShardOutput& output)
    : options_(options),
      codecs_(codecs),
      executor_(executor),
      pool_(pool),
      post_(std::move(post)),
      output_(output),
      residuals_(residuals) {}

Shard::~Shard() = default;

Status Shard::InstallPlan(std::shared_ptr<const Plan> plan) {
  if (plan_ != nullptr && plan->version <= plan_->version) return Status::Ok();
  const auto is_mine = [&](const Unit& unit) {
    return unit.server == options_.server && unit.lane == options_.lane;
  };
  // All is checked before anything points into the new plan.
  for (const Unit& unit : plan->units) {
    if (!is_mine(unit)) continue;
    for (const Phase& phase : unit.phases) {
      for (const std::string& spec : {phase.uplink, phase.downlink}) {
        const auto codec = codecs_.GetFor(spec, unit.dtype);
        if (!codec.ok()) return codec.status();
      }
    }
  }
  keys_.resize(plan->units.size());
  for (const Unit& unit : plan->units) {
    if (!is_mine(unit)) continue;
    std::unique_ptr<Key>& key = keys_[unit.key];
    if (key == nullptr) {
      key = std::make_unique<Key>();
      key->contributions.resize(options_.num_workers);
    }
    key->unit = &unit;
  }
  if (plan_ == nullptr || plan->filter.stages.size() > plan_->filter.stages.size()) {
    stage_version_ = plan->version;
  }
  plan_ = std::move(plan);
  return Status::Ok();
}

Shard::Key* Shard::Find(std::uint64_t key) {
  return key < keys_.size() ? keys_[key].get() : nullptr;
}

std::string Shard::Describe(const Key& key) const {
  return fmt::format("tensor {} (key {})", DescribeUnit(*plan_, *key.unit), key.unit->key);
}

Status Shard::Check(const Key& key, std::uint32_t rank, const Header& header,
                    const Payload& payload) const {
  if (header.plan_version > plan_->version) {
    return CorruptData(fmt::format("push of rank {} for {} has plan version {}, the server has {}",
                                   rank, Describe(key), header.plan_version, plan_->version));
  }
  if (const auto& stages = plan_->filter.stages; !stages.empty() &&
                                                 header.step >= stages.back().first_step &&
                                                 header.plan_version < stage_version_) {
    return CorruptData(fmt::format(
        "push of rank {} for {} in step {} has plan version {}, expected at least {} from step {} "
        "on: it has not heard of the interval {} that begins there",
        rank, Describe(key), header.step, header.plan_version, stage_version_,
        stages.back().first_step, stages.back().interval));
  }
  if (header.round != key.round) {
    return CorruptData(fmt::format("push of rank {} for {} is of round {}, expected {}", rank,
                                   Describe(key), header.round, key.round));
  }
  if (header.phase >= key.unit->phases.size() || header.phase != key.unit->PhaseAt(header.step)) {
    return CorruptData(fmt::format("push of rank {} for {} in step {} is of phase {}, expected {}",
                                   rank, Describe(key), header.step, header.phase,
                                   key.unit->PhaseAt(header.step)));
  }
  if (!IsActive(plan_->filter, *key.unit, header.step)) {
    const std::size_t stage = plan_->filter.StageAt(header.step);
    return CorruptData(fmt::format(
        "push of rank {} for {} in step {} with plan version {}: the filter sends class {} of {} "
        "in that step, the unit is of class {} (plan version {} of the server)",
        rank, Describe(key), header.step, header.plan_version,
        ActiveClass(plan_->filter.stages[stage].interval, header.step),
        plan_->filter.stages[stage].interval, key.unit->filter_classes[stage], plan_->version));
  }
  if (key.present > 0 && header.step != key.step) {
    return InvalidArgument(
        fmt::format("{}: rank {} pushes it in step {}, other ranks in step {} (round {})",
                    Describe(key), rank, header.step, key.step, key.round));
  }
  for (const auto& [what, got, others] :
       {std::tuple{"pushes it with learning rate", header.learning_rate, key.scale.learning_rate},
        std::tuple{"pushes it with loss scale", header.loss_scale, key.scale.loss_scale}}) {
    if (key.present == 0 || got == others) continue;
    return InvalidArgument(fmt::format("{}: rank {} {} {}, rank {} with {} (step {}, round {})",
                                       Describe(key), rank, what, got, key.first_rank, others,
                                       key.step, key.round));
  }
  if (header.nonfinite) {
    if (!IsFloat(key.unit->dtype) || key.unit->op == ReduceOp::kBroadcast) {
      return CorruptData(
          fmt::format("push of rank {} for {} is marked non-finite, which a {} of {} "
                      "cannot be",
                      rank, Describe(key), ReduceOpName(key.unit->op), DTypeName(key.unit->dtype)));
    }
    if (payload.empty()) return Status::Ok();
    return CorruptData(fmt::format("push of rank {} for {} is marked non-finite but has {} bytes",
                                   rank, Describe(key), payload.size()));
  }
  const Unit& unit = *key.unit;
  if (unit.op == ReduceOp::kBroadcast && payload.empty()) return Status::Ok();
  if (IsTypedReduction(unit, header.phase)) {
    if (payload.size() == unit.raw_bytes()) return Status::Ok();
    return CorruptData(fmt::format("push of rank {} for {} is {} bytes, expected {}", rank,
                                   Describe(key), payload.size(), unit.raw_bytes()));
  }
  const auto codec = codecs_.GetFor(unit.phases[header.phase].uplink, unit.dtype);
  if (!codec.ok()) return codec.status();
  const Status valid = (*codec)->Validate(payload.bytes, unit.num_elements);
  if (valid.ok()) return valid;
  return {valid.code(), fmt::format("push of rank {} for {}, round {}: {}", rank, Describe(key),
                                    header.round, valid.message())};
}

void Shard::OnPush(std::uint32_t rank, const Header& header, Payload payload,
                   Clock::time_point now) {
  Key* const key = Find(header.key);
  if (key == nullptr) {
    output_.Fail(
        CorruptData(fmt::format("push of rank {} for key {}, which server {} lane {} does "
                                "not own",
                                rank, header.key, options_.server, options_.lane)));
    return;
  }
  if (key->has_kept && header.round + 1 == key->round) {
    ++counters_.duplicate_pushes;
    SendKept(*key, rank);
    return;
  }
  if (header.round == key->round &&
      key->contributions[rank].state != Contribution::State::kAbsent) {
    ++counters_.duplicate_pushes;
    return;
  }
  if (Status status = Check(*key, rank, header, payload); !status.ok()) {
    output_.Fail(std::move(status));
    return;
  }
  if (key->present == 0) {
    key->step = header.step;
    key->phase = header.phase;
    key->scale = {header.learning_rate, header.loss_scale};
    key->first_rank = rank;
    key->opened = now;
  }
  key->contributions[rank] = {
      header.nonfinite ? Contribution::State::kNonfinite : Contribution::State::kPayload,
      std::move(payload)};
  if (++key->present == options_.num_workers) Close(*key);
}

Status Shard::Prepare(Key& key) {
  if (key.prepared_phase == key.phase) return Status::Ok();
  const Unit& unit = *key.unit;
  const Phase& phase = unit.phases[key.phase];
  if (IsTypedReduction(unit, key.phase)) {
    key.uplink = nullptr;
    key.downlink = nullptr;
    key.residual = nullptr;
  } else {
    const auto uplink = codecs_.GetFor(phase.uplink, unit.dtype);
    if (!uplink.ok()) return uplink.status();
    const auto downlink = codecs_.GetFor(phase.downlink, unit.dtype);
    if (!downlink.ok()) return downlink.status();
    key.uplink = *uplink;
    key.downlink = *downlink;
    key.residual = nullptr;
    if (phase.downlink_feedback != Feedback::kNone) {
      const auto residual = residuals_.Get(unit.key, RangesOf(*plan_, unit), *key.downlink);
      if (!residual.ok()) return residual.status();
      GRADWIRE_RETURN_IF_ERROR(residuals_.ChangeCodec(unit.key, *key.downlink));
      key.residual = *residual;
    }
  }
  key.prepared_phase = key.phase;
  return Status::Ok();
}

void Shard::Close(Key& key) {
  key.state = RoundState::kReducing;
  if (Status status = Prepare(key); !status.ok()) {
    output_.Fail(std::move(status));
    return;
  }
  key.input.unit = key.unit;
  key.input.contributions = key.contributions;
  key.input.uplink = key.uplink;
  key.input.downlink = key.downlink;
  key.input.residual = key.residual;
  key.input.scale = key.scale;
  const Phase& phase = key.unit->phases[key.phase];
  if (phase.downlink_feedback != Feedback::kEfLr) key.input.scale.learning_rate = 0;
  key.input.round_seed = RoundSeed(options_.seed, key.unit->key, key.round);
  key.input.same_both_ways = phase.uplink == phase.downlink;
  key.input.sums_unseen_values = phase.uplink == "none";
  key.input_plan = plan_;

  const bool inline_work = executor_.concurrency() == 0;
  executor_.Post([this, &key] {
    auto result = Reduce(key.input, pool_);
    if (result.ok()) {
      key.result = std::move(result).value();
      key.outcome = Status::Ok();
    } else {
      key.outcome = result.status();
    }
    if (executor_.concurrency() > 0) post_([this, &key] { Finish(key); });
  });
  if (inline_work) Finish(key);
}

void Shard::Abandon() {
  abandoned_ = true;
  for (const auto& key : keys_) {
    if (key == nullptr || key->state == RoundState::kReducing) continue;
    for (Contribution& contribution : key->contributions) contribution = {};
    key->kept = {};
  }
}

void Shard::Finish(Key& key) {
  key.state = RoundState::kCollecting;
  for (Contribution& contribution : key.contributions) contribution = {};
  if (abandoned_) return;
  if (!key.outcome.ok()) {
    output_.Fail({key.outcome.code(), fmt::format("{}, round {}: {}", Describe(key), key.round,
                                                  key.outcome.message())});
    return;
  }
  ++counters_.rounds;
  if (key.result.kind == ReplyKind::kNonfinite) {
    ++counters_.nonfinite_rounds;
    const auto ranks = ParseNonfiniteRanks(key.result.payload.bytes, options_.num_workers);
    if (const auto suppressed = nonfinite_log_.Admit(); suppressed && ranks.ok()) {
      LogWarn("shard", "void round: not finite",
              {Field("unit", Describe(key)), Field("step", key.step),
               Field("ranks", DescribeNonfiniteRanks(*ranks)), Field("suppressed", *suppressed)});
    }
  }
  if (key.result.out_of_bound != 0) {
    if (const auto suppressed = out_of_bound_log_.Admit()) {
      LogWarn("shard", "the residual of a downlink grows: values beyond what its compressor bounds",
              {Field("unit", Describe(key)), Field("step", key.step),
               Field("compressor", key.unit->phases[key.phase].downlink),
               Field("elements", key.result.out_of_bound), Field("of", key.unit->num_elements),
               Field("suppressed", *suppressed)});
    }
  }
  key.kept = std::move(key.result);
  key.result = {};
  key.kept_step = key.step;
  key.kept_phase = key.phase;
  key.has_kept = true;
  key.present = 0;
  ++key.round;
  for (std::uint32_t rank = 0; rank < options_.num_workers; ++rank) SendKept(key, rank);
}

void Shard::SendKept(const Key& key, std::uint32_t rank) {
  Header header;
  header.kind = MessageKind::kReply;
  header.plan_version = plan_->version;
  header.phase = key.kept_phase;
  header.step = key.kept_step;
  header.round = key.round - 1;
  header.key = key.unit->key;
  header.reply = key.kept.kind;
  output_.Reply(rank, header, key.kept.payload);
}

void Shard::OnRepull(std::uint32_t rank, const Header& header) {
  const Key* const key = Find(header.key);
  if (key == nullptr) {
    output_.Fail(
        CorruptData(fmt::format("repull of rank {} for key {}, which server {} lane {} "
                                "does not own",
                                rank, header.key, options_.server, options_.lane)));
    return;
  }
  if (key->has_kept && header.round + 1 == key->round) {
    SendKept(*key, rank);
    return;
  }
  if (header.round != key->round) {
    output_.Fail(CorruptData(fmt::format("repull of rank {} for {} is of round {}, expected {}",
                                         rank, Describe(*key), header.round, key->round)));
    return;
  }
  if (key->contributions[rank].state != Contribution::State::kAbsent) return;  // answers at close
  Header again = header;
  again.kind = MessageKind::kPushAgain;
  output_.Reply(rank, again, {});
}

Shard::Key* Shard::FindForState(std::uint32_t rank, const Header& header) {
  const std::string what =
      fmt::format("{} of rank {} for key {}", MessageKindName(header.kind), rank, header.key);
  Key* const key = Find(header.key);
  if (key == nullptr) {
    output_.Fail(CorruptData(fmt::format("{}, which server {} lane {} does not own", what,
                                         options_.server, options_.lane)));
  } else if (rank != 0) {
    output_.Fail(
        InvalidArgument(fmt::format("{}: worker 0 alone saves and restores servers' state", what)));
  } else if (key->present > 0) {
    output_.Fail(InvalidArgument(
        fmt::format("{} while {}, step {}, round {} is open: state is saved and restored when "
                    "nothing is in flight on any worker",
                    what, Describe(*key), key->step, key->round)));
  } else {
    return key;
  }
  return nullptr;
}

void Shard::OnReadState(std::uint32_t rank, const Header& header) {
  const Key* const key = FindForState(rank, header);
  if (key == nullptr) return;
  Header state;
  state.kind = MessageKind::kState;
  state.key = header.key;
  state.step = header.step;
  state.round = key->round;
  const std::vector<std::byte> saved = residuals_.SaveUnit(header.key);
  Payload payload;
  if (!saved.empty()) {
    const PooledBuffer buffer = pool_.Acquire(saved.size());
    std::copy(saved.begin(), saved.end(), buffer.bytes().begin());
    payload = buffer.Share(saved.size());
  }
  output_.Reply(rank, state, payload);
}

void Shard::OnWriteState(std::uint32_t rank, const Header& header, const Payload& payload) {
  Key* const key = FindForState(rank, header);
  if (key == nullptr) return;
  if (Status status = WriteState(*key, header, payload); !status.ok()) {
    output_.Fail({status.code(), fmt::format("state of rank {} for {}: {}", rank, Describe(*key),
                                             status.message())});
    return;
  }
  Header written;
  written.kind = MessageKind::kStateWritten;
  written.key = header.key;
  written.step = header.step;
  written.round = key->round;
  output_.Reply(rank, written, {});
}

Status Shard::WriteState(Key& key, const Header& header, const Payload& payload) {
  if (payload.empty()) {
    residuals_.ClearUnit(key.unit->key);
  } else {
    const Unit& unit = *key.unit;
    const auto phase = std::find_if(
        unit.phases.begin(), unit.phases.end(),
        [](const Phase& candidate) { return candidate.downlink_feedback != Feedback::kNone; });
    if (phase == unit.phases.end()) {
      return InvalidArgument(
          fmt::format("a residual of {} bytes, and the way down has no feedback", payload.size()));
    }
    const auto codec = codecs_.GetFor(phase->downlink, unit.dtype);
    if (!codec.ok()) return codec.status();
    GRADWIRE_RETURN_IF_ERROR(
        residuals_.RestoreUnit(unit.key, RangesOf(*plan_, unit), **codec, payload.bytes));
    key.prepared_phase = UINT32_MAX;  // the residual may be new, and another codec's
  }
  key.round = header.round;
  key.has_kept = false;
  key.kept = {};
  return Status::Ok();
}

std::string Shard::DescribeRoundThatWaitsFor(std::uint32_t rank) const {
  for (const auto& key : keys_) {
    if (key == nullptr || key->state != RoundState::kCollecting || key->present == 0) continue;
    if (key->contributions[rank].state != Contribution::State::kAbsent) continue;
    return fmt::format("{}, step {}, round {}", Describe(*key), key->step, key->round);
  }
  return {};
}

Shard::OldRounds Shard::FindOldRounds(Clock::time_point before) const {
  constexpr std::size_t kMost = 5;
  OldRounds found;
  std::vector<const Key*> oldest;
  for (const auto& key : keys_) {
    if (key == nullptr || key->present == 0 || key->opened >= before) continue;
    ++found.count;
    const auto place =
        std::upper_bound(oldest.begin(), oldest.end(), key.get(),
                         [](const Key* a, const Key* b) { return a->opened < b->opened; });
    if (place == oldest.end() && oldest.size() == kMost) continue;
    oldest.insert(place, key.get());
    if (oldest.size() > kMost) oldest.pop_back();
  }
  for (const Key* key : oldest) {
    OpenCall call;
    call.since = key->opened;
    call.what = fmt::format("{}, step {}, round {}", Describe(*key), key->step, key->round);
    const bool is_complete = key->present == options_.num_workers;  // an executor may be reading
    for (std::uint32_t rank = 0; rank < options_.num_workers; ++rank) {
      const bool is_here =
          is_complete || key->contributions[rank].state != Contribution::State::kAbsent;
      (is_here ? call.here : call.missing).push_back(rank);
    }
    found.oldest.push_back(std::move(call));
  }
  return found;
}

}  // namespace gradwire
