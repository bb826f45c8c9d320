#include "worker/client/job_optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/wire/plan_data.h"

namespace gradwire {

Result<std::unique_ptr<JobOptimizer>> JobOptimizer::Create(Client& client, std::string_view method,
                                                           const CompressionRules& job) {
  auto optimizer = Optimizer::Create(method, &job);
  if (!optimizer.ok()) return optimizer.status();
  if (optimizer.value()->traits().pushes_state) client.PushesState();
  return std::unique_ptr<JobOptimizer>(new JobOptimizer(client, job, std::move(optimizer).value()));
}

/// In order. While an interval is measured each unit's part of the tensor is one: units that are of
/// one class now may be of two later.
std::vector<JobOptimizer::Stretch> JobOptimizer::StretchesOf(TensorId tensor, std::size_t n) const {
  std::vector<Stretch> pieces;
  if (skips_inactive_) {
    const std::shared_ptr<const Plan> plan = client_.plan();
    for (const Unit& unit : plan->units) {
      for (const UnitMember& member : unit.members) {
        if (member.tensor != tensor.index) continue;
        pieces.push_back({{member.tensor_offset, member.count}, unit.filter_classes});
      }
    }
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Stretch& a, const Stretch& b) { return a.range.offset < b.range.offset; });
  const bool is_measured = filter_.type == FilterType::kCovap && filter_.interval == 0;
  std::vector<Stretch> stretches;
  for (Stretch& piece : pieces) {
    if (!is_measured && !stretches.empty() &&
        stretches.back().filter_classes == piece.filter_classes) {
      stretches.back().range.count += piece.range.count;
    } else {
      stretches.push_back(std::move(piece));
    }
  }
  if (stretches.size() <= 1) stretches = {Stretch{{0, n}, {}}};
  return stretches;
}

Status JobOptimizer::AddTensor(TensorId tensor, std::string_view name, std::size_t n, bool decays) {
  if (tensors_.contains(tensor.index)) {
    return InvalidArgument(fmt::format("method {}: tensor '{}' is there already, with {} values",
                                       optimizer_->name(), name, tensors_[tensor.index].n));
  }
  skips_inactive_ = client_.plan()->filter.skips_inactive;
  Added entry{std::string(name), n, StretchesOf(tensor, n)};
  const auto name_of = [&](const Stretch& stretch) {
    const auto [offset, count] = stretch.range;
    if (entry.stretches.size() == 1) return entry.name;
    return fmt::format("{}[{}:{}]", name, offset, offset + count);
  };
  // All of them or none: a stretch that was left behind would be in every saved state.
  for (const Stretch& stretch : entry.stretches) {
    GRADWIRE_RETURN_IF_ERROR(optimizer_->CheckNew(name_of(stretch)));
  }
  for (Stretch& stretch : entry.stretches) {
    const auto added = optimizer_->AddTensor(name_of(stretch), stretch.range.count, decays);
    if (!added.ok()) return added.status();
    stretch.index = *added;
  }
  tensors_.emplace(tensor.index, std::move(entry));
  return Status::Ok();
}

Result<const JobOptimizer::Added*> JobOptimizer::Find(TensorId tensor) const {
  const auto found = tensors_.find(tensor.index);
  if (found != tensors_.end()) return &found->second;
  return InvalidArgument(
      fmt::format("method {}: tensor {} was not added to it", optimizer_->name(), tensor.index));
}

Status JobOptimizer::CheckSize(const Added& tensor, std::size_t n, std::string_view what) const {
  if (n == tensor.n) return Status::Ok();
  return InvalidArgument(fmt::format("method {}: {} of tensor '{}' has {} values, expected {}",
                                     optimizer_->name(), what, tensor.name, n, tensor.n));
}

/// What a method freezes at the end of its warm-up was learned in it, without compression.
Status JobOptimizer::CheckWarmup() const {
  const std::uint64_t freeze_step = optimizer_->traits().freeze_step;
  if (warmup_steps_ == 0 || optimizer_->step() >= freeze_step) return Status::Ok();
  const std::uint64_t job_step = client_.step();
  if (job_step < warmup_steps_) return Status::Ok();
  return InvalidArgument(fmt::format(
      "method {} is in step {} of its warm-up of {}, and the job in step {}, in which it "
      "compresses: "
      "was the job's state restored without that of the method, or are steps of the job ended that "
      "are none of the method?",
      optimizer_->name(), optimizer_->step(), freeze_step, job_step));
}

Status JobOptimizer::Send(TensorId tensor, std::span<float> gradient) {
  const auto added = Find(tensor);
  if (!added.ok()) return added.status();
  GRADWIRE_RETURN_IF_ERROR(CheckWarmup());
  GRADWIRE_RETURN_IF_ERROR(CheckSize(**added, gradient.size(), "the gradient"));
  for (const Stretch& stretch : added.value()->stretches) {
    GRADWIRE_RETURN_IF_ERROR(optimizer_->Send(
        stretch.index, gradient.subspan(stretch.range.offset, stretch.range.count)));
  }
  return Status::Ok();
}

Result<std::size_t> JobOptimizer::Update(const Handle& handle, std::span<const float> pulled,
                                         double rate, std::span<float> parameters) {
  const auto added = Find(handle.tensor);
  if (!added.ok()) return added.status();
  GRADWIRE_RETURN_IF_ERROR(CheckSize(**added, pulled.size(), "what was pulled"));
  GRADWIRE_RETURN_IF_ERROR(CheckSize(**added, parameters.size(), "the parameters"));
  if (!client_.Poll(handle)) {
    return InvalidArgument(fmt::format("method {}: the push-pull of tensor '{}' is still under way",
                                       optimizer_->name(), added.value()->name));
  }
  std::vector<ElementRange> sent = {{0, pulled.size()}};
  if (skips_inactive_) {
    auto active = client_.ActiveRanges(handle);
    if (!active.ok()) return active.status();
    sent = std::move(active).value();
  }
  std::size_t num_skipped = 0;
  for (const Stretch& stretch : added.value()->stretches) {
    const auto [offset, count] = stretch.range;
    const bool is_sent = std::any_of(
        sent.begin(), sent.end(), [&, offset = offset, count = count](const ElementRange& range) {
          return range.offset <= offset && offset + count <= range.offset + range.count;
        });
    if (!is_sent) {
      GRADWIRE_RETURN_IF_ERROR(optimizer_->Cancel(stretch.index));
      continue;
    }
    const auto outcome = optimizer_->Update(stretch.index, pulled.subspan(offset, count), rate,
                                            parameters.subspan(offset, count));
    if (!outcome.ok()) return outcome.status();
    if (*outcome == Optimizer::Outcome::kSkipped) ++num_skipped;
  }
  return num_skipped;
}

Status JobOptimizer::Cancel(TensorId tensor) {
  const auto added = Find(tensor);
  if (!added.ok()) return added.status();
  for (const Stretch& stretch : added.value()->stretches) {
    GRADWIRE_RETURN_IF_ERROR(optimizer_->Cancel(stretch.index));
  }
  return Status::Ok();
}

}  // namespace gradwire
