// What a job must keep to go on after a restart: residuals of workers and servers, rounds, the
// step.

#include <algorithm>
#include <set>

#include "common/base/byte_io.h"
#include "common/base/log.h"
#include "worker/client/client_impl.h"

namespace gradwire {
namespace {

constexpr std::string_view kMagic = "GWSTATE2";

// Names in one log line.
constexpr std::size_t kMostNames = 5;

/// Broadcasts and integers have no residual, and their rounds decide nothing.
bool HasState(const Unit& unit) { return unit.op != ReduceOp::kBroadcast && IsFloat(unit.dtype); }

bool Overlaps(const std::vector<TensorRange>& a, const std::vector<TensorRange>& b) {
  return std::any_of(a.begin(), a.end(), [&](const TensorRange& x) {
    return std::any_of(b.begin(), b.end(), [&](const TensorRange& y) {
      return x.tensor == y.tensor && x.offset < y.offset + y.count && y.offset < x.offset + x.count;
    });
  });
}

constexpr std::string_view kDamaged = "the saved state is damaged";

Status Damaged(std::string_view what) { return CorruptData(fmt::format("{}: {}", kDamaged, what)); }

bool TakeBlob(ByteReader& reader, ByteView& blob) {
  std::uint64_t size = 0;
  return reader.Take(size) && reader.Take(size, blob);
}

bool TakeUnit(ByteReader& reader, SavedUnit& unit) {
  std::uint32_t count = 0;
  if (!reader.Take(count) || count == 0) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    TensorRange range;
    if (!reader.TakeText(range.tensor) || !reader.Take(range.offset) || !reader.Take(range.count) ||
        range.offset + range.count < range.offset) {
      return false;
    }
    unit.ranges.push_back(std::move(range));
  }
  ByteView server;
  if (!reader.Take(unit.round) || !TakeBlob(reader, server)) return false;
  unit.server.assign(server.begin(), server.end());
  return true;
}

/// What SaveState wrote, checked through and through.
struct SavedState {
  std::uint32_t workers = 0;
  std::uint32_t rank = 0;
  std::uint64_t step = 0;
  std::uint32_t interval = 0;  // of the filter; 0: there was none
  std::vector<SavedUnit> units;
  ByteView residuals;
};

Result<SavedState> ParseState(ByteView saved) {
  auto opened = OpenSaved(saved, kMagic, kDamaged);
  if (!opened.ok()) return opened.status();
  ByteReader& reader = *opened;
  SavedState state;
  std::uint64_t num_units = 0;
  if (!reader.Take(state.workers) || !reader.Take(state.rank) || !reader.Take(state.step) ||
      !reader.Take(state.interval) || !reader.Take(num_units)) {
    return Damaged("its head is cut off");
  }
  for (std::uint64_t i = 0; i < num_units; ++i) {
    SavedUnit unit;
    if (!TakeUnit(reader, unit)) return Damaged(fmt::format("unit {} is cut off", i));
    if (!unit.server.empty()) GRADWIRE_RETURN_IF_ERROR(ResidualStore::Check(unit.server));
    state.units.push_back(std::move(unit));
  }
  if (!TakeBlob(reader, state.residuals) || reader.left() != 0) {
    return Damaged("its end is not where it should be");
  }
  GRADWIRE_RETURN_IF_ERROR(ResidualStore::Check(state.residuals));
  return state;
}

}  // namespace

Result<std::vector<std::byte>> ClientImpl::SaveState() {
  const std::lock_guard collective(collective_mu_);
  GRADWIRE_RETURN_IF_ERROR(CheckReadyForState("SaveState"));
  // Nobody has anything in flight from here to the other barrier: one cut for all.
  GRADWIRE_RETURN_IF_ERROR(EnterBarrier(step()));
  std::vector<SavedUnit> units;
  std::uint64_t step = 0;
  std::uint32_t interval = 0;
  std::shared_ptr<const Plan> plan;
  {
    const std::lock_guard lock(mu_);
    plan = plan_;
    step = step_;
    interval = IntervalNow();
    for (const Unit& unit : plan->units) {
      if (!HasState(unit)) continue;
      units.push_back({RangesOf(*plan, unit), units_[unit.key]->round, {}});
    }
  }
  if (rank_ == 0) {
    std::size_t next = 0;
    for (const Unit& unit : plan->units) {
      if (!HasState(unit)) continue;
      SavedUnit& saved = units[next++];
      Header header;
      header.kind = MessageKind::kReadState;
      header.key = unit.key;
      auto answer = CallForState(unit, header, {});
      if (!answer.ok()) return answer.status();
      if (answer->round != saved.round) {
        const Status status =
            Internal(fmt::format("server {} is at round {} of {}, rank 0 at round {}", unit.server,
                                 answer->round, DescribeUnit(*plan, unit), saved.round));
        PostFail(status);
        return status;
      }
      saved.server.assign(answer->payload.bytes.begin(), answer->payload.bytes.end());
    }
  }
  for (const SavedUnit& unit : loaded_) {
    if (!unit.is_used) units.push_back(unit);
  }
  Result<std::vector<std::byte>> residuals = std::vector<std::byte>();
  {
    const std::lock_guard lock(mu_);  // nothing begins meanwhile
    GRADWIRE_RETURN_IF_ERROR(CheckIdle());
    residuals = residuals_.Save();
  }
  if (!residuals.ok()) return residuals.status();
  GRADWIRE_RETURN_IF_ERROR(EnterBarrier(step));

  std::vector<std::byte> bytes;
  AppendBytes(bytes, AsBytes(kMagic));
  AppendLe(bytes, config_.job.workers);
  AppendLe(bytes, rank_);
  AppendLe(bytes, step);
  AppendLe(bytes, interval);
  AppendLe(bytes, static_cast<std::uint64_t>(units.size()));
  for (const SavedUnit& unit : units) {
    AppendLe(bytes, static_cast<std::uint32_t>(unit.ranges.size()));
    for (const TensorRange& range : unit.ranges) {
      AppendText(bytes, range.tensor);
      AppendLe(bytes, range.offset);
      AppendLe(bytes, range.count);
    }
    AppendLe(bytes, unit.round);
    AppendLe(bytes, static_cast<std::uint64_t>(unit.server.size()));
    AppendBytes(bytes, unit.server);
  }
  AppendLe(bytes, static_cast<std::uint64_t>(residuals->size()));
  AppendBytes(bytes, *residuals);
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

Status ClientImpl::RestoreState(ByteView saved) {
  const std::lock_guard collective(collective_mu_);
  GRADWIRE_RETURN_IF_ERROR(CheckReadyForState("RestoreState"));
  auto parsed = ParseState(saved);
  if (!parsed.ok()) {
    PostFail(parsed.status());  // the others wait for this one
    return parsed.status();
  }
  SavedState& state = *parsed;
  if (state.workers != config_.job.workers) {
    return InvalidArgument(fmt::format(
        "the saved state is of a job of {} workers, this one has {}: residuals belong to the ranks "
        "of "
        "a job of that size. To go on with another number of workers restore none: all residuals "
        "begin at zero then",
        state.workers, config_.job.workers));
  }
  if (state.rank != rank_) {
    const Status status = InvalidArgument(fmt::format(
        "rank {} restores the state of rank {}: every rank restores its own", rank_, state.rank));
    PostFail(status);
    return status;
  }
  GRADWIRE_RETURN_IF_ERROR(EnterBarrier(state.step));
  {
    std::unique_lock lock(mu_);
    GRADWIRE_RETURN_IF_ERROR(KeepPromise(lock, state.step));
    // Nothing begins from here on.
    GRADWIRE_RETURN_IF_ERROR(CheckIdle());
    GRADWIRE_RETURN_IF_ERROR(residuals_.Restore(state.residuals));
    step_ = state.step;
    has_unsaid_state_ = true;
    // Its residuals are those of this interval; a measurement may find another one later.
    if (rank_ == 0 && IsIntervalMeasured() && state.interval > 0 &&
        state.interval <= kMaxFilterInterval) {
      AskRootForInterval(state.interval);
    }
  }
  loaded_ = std::move(state.units);
  has_loaded_ = true;
  next_key_to_restore_ = 0;
  unused_on_servers_.clear();
  return RestorePlannedUnits();
}

Status ClientImpl::RestorePlannedUnits() {
  std::shared_ptr<const Plan> plan;
  {
    const std::lock_guard lock(mu_);
    plan = plan_;
  }
  std::map<std::string, std::vector<std::size_t>> by_tensor;
  for (std::size_t i = 0; i < loaded_.size(); ++i) {
    for (const TensorRange& range : loaded_[i].ranges) by_tensor[range.tensor].push_back(i);
  }
  for (; next_key_to_restore_ < plan->units.size(); ++next_key_to_restore_) {
    const Unit& unit = plan->units[next_key_to_restore_];
    if (HasState(unit)) GRADWIRE_RETURN_IF_ERROR(RestoreUnit(*plan, unit, by_tensor));
  }
  return EnterBarrier(0);
}

Status ClientImpl::RestoreUnit(const Plan& plan, const Unit& unit,
                               const std::map<std::string, std::vector<std::size_t>>& by_tensor) {
  const std::vector<TensorRange> ranges = RangesOf(plan, unit);
  std::set<std::size_t> candidates;
  for (const TensorRange& range : ranges) {
    const auto found = by_tensor.find(range.tensor);
    if (found != by_tensor.end()) candidates.insert(found->second.begin(), found->second.end());
  }
  const bool takes_residual =
      std::any_of(unit.phases.begin(), unit.phases.end(),
                  [](const Phase& phase) { return phase.downlink_feedback != Feedback::kNone; });
  std::optional<std::uint64_t> round;
  std::vector<ByteView> parts;
  for (const std::size_t i : candidates) {
    SavedUnit& saved = loaded_[i];
    if (!Overlaps(saved.ranges, ranges)) continue;
    saved.is_used = true;
    // Another cut counts its rounds anew.
    if (saved.ranges == ranges) round = saved.round;
    if (saved.server.empty()) continue;
    if (takes_residual) {
      parts.push_back(saved.server);
    } else {
      unused_on_servers_.insert(saved.ranges.front().tensor);
    }
  }
  Header header;
  header.kind = MessageKind::kWriteState;
  header.key = unit.key;
  {
    const std::lock_guard lock(mu_);
    UnitWork& work = *units_[unit.key];
    if (round) work.round = *round;
    work.prepared_phase = UINT32_MAX;
    header.round = work.round;
  }
  if (rank_ != 0) return Status::Ok();
  auto body = ResidualStore::Select(parts, ranges);
  if (!body.ok()) return body.status();
  const auto answer = CallForState(unit, header, std::move(body).value());
  if (!answer.ok()) return answer.status();
  for (const std::size_t i : candidates) {
    if (loaded_[i].ranges == ranges) loaded_[i].server = {};  // as large as the model, all together
  }
  return Status::Ok();
}

std::uint64_t ClientImpl::step() const {
  const std::lock_guard lock(mu_);
  return step_;
}

Status ClientImpl::CheckReadyForState(std::string_view what) const {
  const std::lock_guard lock(mu_);
  if (closing_) return InvalidArgument(fmt::format("{} after Close", what));
  if (!error_.ok()) return error_;
  return CheckIdle();
}

Result<ClientImpl::StateCall> ClientImpl::CallForState(const Unit& unit, const Header& header,
                                                       std::vector<std::byte> body) {
  std::unique_lock lock(mu_);
  if (!error_.ok()) return error_;
  StateCall call;
  call.connection = units_[unit.key]->connection;
  call.header = header;
  call.header.step = ++state_calls_;
  call.body = std::move(body);
  state_call_ = std::move(call);
  loop_->Post([this] { SendStateCall(); });
  const Status status = Await(
      lock, [&] { return state_call_->is_answered; },
      [&] {
        return fmt::format("the state of tensor {} (key {}): server {} has not answered",
                           DescribeUnit(*plan_, unit), unit.key, unit.server);
      });
  StateCall answered = std::move(*state_call_);
  state_call_.reset();
  if (!status.ok()) return status;
  return answered;
}

void ClientImpl::SendStateCall() {
  std::size_t connection = 0;
  Header header;
  std::vector<std::byte> body;
  {
    const std::lock_guard lock(mu_);
    if (!state_call_ || state_call_->is_answered) return;
    connection = state_call_->connection;
    header = state_call_->header;
    body = state_call_->body;
  }
  SendControl(connection, header, body);
}

void ClientImpl::OnState(std::size_t connection, const Header& header, Payload payload) {
  const std::lock_guard lock(mu_);
  // What was asked twice, around a cut, may be answered twice.
  if (!state_call_ || state_call_->is_answered || state_call_->connection != connection ||
      state_call_->header.step != header.step) {
    return;
  }
  const bool reads = state_call_->header.kind == MessageKind::kReadState;
  if (header.kind != (reads ? MessageKind::kState : MessageKind::kStateWritten)) return;
  state_call_->round = header.round;
  state_call_->payload = std::move(payload);
  state_call_->is_answered = true;
  changed_.notify_all();
}

void ClientImpl::SayUnusedState() {
  // Somebody else's collective call may take long: then after the next step.
  const std::unique_lock collective(collective_mu_, std::try_to_lock);
  if (!collective.owns_lock()) return;
  std::set<std::string> unused(unused_on_servers_);
  std::shared_ptr<const Plan> plan;
  {
    const std::lock_guard lock(mu_);
    if (!std::exchange(has_unsaid_state_, false)) return;
    plan = plan_;
  }
  std::set<std::string> takers;
  for (const Unit& unit : plan->units) {
    const bool takes = std::any_of(unit.phases.begin(), unit.phases.end(), [](const Phase& phase) {
      return phase.uplink_feedback != Feedback::kNone;
    });
    if (!takes && unit.filter_classes.empty()) continue;
    for (const UnitMember& member : unit.members) takers.insert(plan->tensors[member.tensor].name);
  }
  for (const std::string& name : residuals_.UnclaimedTensors()) {
    if (!takers.contains(name)) unused.insert(name);
  }
  for (const SavedUnit& saved : loaded_) {
    if (!saved.is_used && !saved.server.empty()) unused.insert(saved.ranges.front().tensor);
  }
  if (unused.empty()) return;
  std::string names;
  std::size_t count = 0;
  for (const std::string& name : unused) {
    if (count++ == kMostNames) break;
    names += (names.empty() ? "'" : ", '") + name + "'";
  }
  if (unused.size() > kMostNames) names += fmt::format(" and {} more", unused.size() - kMostNames);
  LogWarn("client",
          "residuals of the saved state are not used: not declared, or without feedback now",
          {Field("tensors", names), Field("rank", rank_)});
}

}  // namespace gradwire
