#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "compressors/methods/method.h"

namespace gradwire {

/// A method and its state of every tensor: what a trainer has on each worker.
///
///     index = AddTensor(name, n)            once for each, in any order
///     every step, for every tensor that is communicated in it:
///       Send(index, gradient)               gradient <- what is pushed
///       ... push, pull ...
///       Update(index, pulled, rate, x)      also after EndStep, but before the tensor's next Send
///     EndStep()
///
/// The step that decides about the warm-up is the optimizer's own, one for all tensors; t of the
/// bias corrections counts each tensor's updates. A tensor that a step leaves out (neither Send nor
/// Update) is untouched, and so is its t.
/// Threads: Send and Update from several threads for different tensors; everything else alone.
class Optimizer {
 public:
  enum class Outcome {
    kUpdated,
    kSkipped,  // a value that was pulled is not finite: parameters and state are as they were
  };

  /// `written_spec`: "lans(beta1=0.95)"; `job`: null without one.  Errors: as ParseMethodSpec and
  /// CreateMethod.
  static Result<std::unique_ptr<Optimizer>> Create(std::string_view written_spec,
                                                   const CompressionRules* job);

  const std::string& name() const { return name_; }
  MethodTraits traits() const { return method_->traits(); }
  std::size_t num_tensors() const { return tensors_.size(); }
  std::uint64_t step() const { return step_; }

  /// `decays`: weight decay applies to it. Returns the tensor's index, which counts from 0.
  /// Errors: InvalidArgument for a name that is there already.
  Result<std::size_t> AddTensor(std::string_view name, std::size_t n, bool decays = true);

  /// Errors: InvalidArgument, as AddTensor would for this name.
  Status CheckNew(std::string_view name) const;

  /// Turns this worker's gradient[n] into what it pushes, in place.
  /// Errors: InvalidArgument, with nothing changed, for an unknown index, a wrong size, a tensor
  /// that was sent and not updated, or one whose warm-up ended without a single update.
  Status Send(std::size_t tensor, std::span<float> gradient);

  /// Brings pulled[n] into parameters[n]. With a NaN or an infinity in `pulled` the tensor is
  /// skipped: all workers pull the same, so all skip alike. Parameters stay finite while
  /// the method's own arithmetic does not overflow.
  /// Errors: InvalidArgument, with nothing changed, for an unknown index, a wrong size, a tensor
  /// that was not sent, or a rate that is negative or not finite.
  Result<Outcome> Update(std::size_t tensor, std::span<const float> pulled, double rate,
                         std::span<float> parameters);

  /// Takes back a Send whose push was given up.
  Status Cancel(std::size_t tensor);

  void EndStep() { ++step_; }

  /// Updates that were done and skipped, of all tensors.
  std::uint64_t updates() const;
  std::uint64_t skipped() const;

  /// Everything a restart needs, as bytes: magic, version, method, step, the tensors, a checksum.
  /// A restored optimizer goes on bit for bit as one that was not interrupted. What a worker sends
  /// may depend on its own history (dist_ef_sgdm), so each keeps its own.
  /// Errors: InvalidArgument for a tensor that was sent and not updated.
  Result<std::vector<std::byte>> Save() const;
  /// The same tensors have been added, in any order. Nothing is changed by a failure.
  /// Errors: CorruptData for damaged bytes; InvalidArgument for another method, or tensors that
  /// differ, naming one.
  Status Restore(ByteView saved);

 private:
  struct Tensor {
    std::string name;
    std::size_t n = 0;
    bool is_sent = false;
    std::uint64_t skipped = 0;
    TensorState state;
  };

  Optimizer(std::string name, std::unique_ptr<const Method> method)
      : name_(std::move(name)), method_(std::move(method)) {}
  Status Check(std::size_t tensor, std::size_t n, std::string_view what) const;

  const std::string name_;
  const std::unique_ptr<const Method> method_;
  std::uint64_t step_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace gradwire
