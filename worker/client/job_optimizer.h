#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "compressors/compression_rules.h"
#include "compressors/methods/optimizer.h"
#include "worker/client/client.h"

namespace gradwire {

/// A method over the tensors that a client has declared. Under a filter with `inactive: skip` what
/// is sent apart is apart for the method too: a stretch of a tensor that always travels together
/// has norms and a t of its own, and a step that holds it back leaves it out.
///
///     AddTensor(id, name, n)                after it was declared, in any order
///     every step, for every tensor:
///       Send(id, gradient)                  gradient <- what is pushed
///       handle = client.PushPullAsync(id, gradient, pulled); ... client.Wait(handle)
///       Update(handle, pulled, rate, x)     also after EndStep, but before the tensor's next Send
///     EndStep()                             when everything was sent, beside the client's
///
/// Threads: Send and Update from several threads for different tensors; everything else alone.
class JobOptimizer {
 public:
  /// `method`: "lans(beta1=0.95)"; `job`: what the job does to what is sent. The client outlives
  /// the optimizer, and learns whether a state is sent.
  /// Errors: as ParseMethodSpec and CreateMethod.
  static Result<std::unique_ptr<JobOptimizer>> Create(Client& client, std::string_view method,
                                                      const CompressionRules& job);

  /// `name`, `n`: as it was declared; `decays`: weight decay applies to it.
  /// Errors: InvalidArgument for one that is there already, with nothing changed.
  Status AddTensor(TensorId tensor, std::string_view name, std::size_t n, bool decays);

  /// Turns this worker's gradient[n] into what it pushes, in place.
  /// Errors: InvalidArgument for a tensor that was not added, for a method that freezes and is in
  /// its warm-up where the job's is over (the job's state was restored, and the method's was not),
  /// and as Optimizer::Send.
  Status Send(TensorId tensor, std::span<float> gradient);

  /// Brings what was pulled by a complete push-pull, the tensor's last, into parameters[n]. What
  /// the filter has held back of both is left alone. Returns how many stretches of the tensor were
  /// skipped, because they are not finite; without a filter that is 0 or 1.
  /// Errors: InvalidArgument for a tensor that was not added or is still under way, and as
  /// Optimizer::Update.
  Result<std::size_t> Update(const Handle& handle, std::span<const float> pulled, double rate,
                             std::span<float> parameters);

  /// Takes back a Send whose update is not wanted; nothing if there was none.
  /// Errors: InvalidArgument for a tensor that was not added.
  Status Cancel(TensorId tensor);

  void EndStep() { optimizer_->EndStep(); }

  /// Traits, counters and what a restart needs.
  const Optimizer& state() const { return *optimizer_; }
  /// Errors: as Optimizer::Restore.
  Status Restore(ByteView saved) { return optimizer_->Restore(saved); }

 private:
  /// What is one tensor for the method.
  struct Stretch {
    ElementRange range;
    std::vector<std::uint32_t> filter_classes;
    std::size_t index = 0;  // of the optimizer's tensor
  };

  struct Added {
    std::string name;
    std::size_t n = 0;
    std::vector<Stretch> stretches;
  };

  JobOptimizer(Client& client, const CompressionRules& job, std::unique_ptr<Optimizer> optimizer)
      : client_(client),
        filter_(job.filter),
        warmup_steps_(Compresses(job) ? job.warmup_steps : 0),
        optimizer_(std::move(optimizer)) {}
  Status CheckWarmup() const;
  std::vector<Stretch> StretchesOf(TensorId tensor, std::size_t n) const;
  Result<const Added*> Find(TensorId tensor) const;
  Status CheckSize(const Added& tensor, std::size_t n, std::string_view what) const;

  Client& client_;
  const FilterRules filter_;
  const std::uint64_t warmup_steps_;  // of the job, in which it does not compress; 0: nor later
  const std::unique_ptr<Optimizer> optimizer_;
  bool skips_inactive_ = false;                       // the filter leaves alone what it holds back
  std::unordered_map<std::uint32_t, Added> tensors_;  // by TensorId::index
};

}  // namespace gradwire
