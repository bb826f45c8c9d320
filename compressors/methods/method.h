#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "compressors/compression_rules.h"
#include "compressors/registry.h"

namespace gradwire {

/// What the rest of a job must know of a method.
struct MethodTraits {
  /// After the freeze it sends a state (a momentum) and not a gradient. A filter would add several
  /// of them up, and a round that is void must leave them as they were.
  bool pushes_state = false;
  /// Only with a compressor in both directions.
  bool needs_two_way = false;
  /// A tensor that was not communicated in a step is left untouched; a zero gradient in its place
  /// would shrink it.
  bool needs_skip = false;
  /// Steps before this one are the warm-up, in which the gradient is sent; 0: there is none.
  std::uint64_t freeze_step = 0;
};

/// What a method keeps of one tensor between its steps.
struct TensorState {
  std::uint64_t updates = 0;               // that were done, not counting steps that were skipped
  bool is_frozen = false;                  // the warm-up is over for this tensor
  bool decays = true;                      // weight decay applies to it
  std::array<double, 3> numbers{};         // as the method wants
  std::vector<std::vector<float>> arrays;  // Method::num_arrays(), of n values each, zeros at first
};

/// The arithmetic of one adaptive optimizer with its parameters set, for one tensor at a time. It
/// is immutable; what changes is in TensorState, which Optimizer keeps. Spans have the tensor's n
/// values. Nothing here allocates. The same inputs give the same bits on every machine and
/// instruction set. Threads: safe for different tensors.
class Method {
 public:
  virtual ~Method() = default;
  virtual MethodTraits traits() const = 0;
  /// Arrays of n floats that a tensor's state has.
  virtual std::size_t num_arrays() const = 0;

  /// Turns a worker's gradient into what it sends, in place. What is not finite in it stays so: the
  /// round is then void.
  virtual void Send(TensorState& state, std::span<float> gradient) const = 0;

  /// Ends the warm-up of a tensor that has had at least one update.
  virtual void Freeze(TensorState& state) const = 0;

  /// Brings what was pulled into the parameters; state.updates counts this update already. The
  /// values pulled are finite.
  /// Memory traffic, in floats read and written an element, Send included, in as few passes as the
  /// norms allow: sgd 5, adamw 7, lamb 10, lans and clan 11, dist_ef_sgdm 9, after the freeze
  /// onebit_adam 8 and onebit_lamb 13. Beyond the caches a step takes at most 1.5 times what moving
  /// them takes (docs/results/updates.md).
  virtual void Update(TensorState& state, std::span<const float> pulled, double rate,
                      std::span<float> parameters) const = 0;
};

/// Everything that is known of a method by name.
struct MethodInfo {
  std::string name;
  std::string description;
  std::string source;  // the paper
  std::vector<ParameterInfo> parameters;
  std::function<Result<std::unique_ptr<const Method>>(const Parameters&)> create;
};

/// The methods of this build: sgd adamw lamb lans clan dist_ef_sgdm onebit_adam onebit_lamb.
const std::vector<MethodInfo>& Methods();

/// Checks a spec and makes the method. `job`, what a job does to what the method sends, is null
/// where the method is used without one; with one freeze_step may be left out and is then the job's
/// warmup_steps.
/// Errors: NotFound with the nearest name; InvalidArgument for a parameter (as CheckParameters),
/// for a freeze_step that is missing or differs from the job's warmup_steps, for a method that
/// needs a compressor in both directions and has none in one of them, and for one that does not go
/// with the job's filter.
Result<std::unique_ptr<const Method>> CreateMethod(const CompressorSpec& spec,
                                                   const CompressionRules* job);

/// The spec with every parameter that the method then has, defaults and the job's freeze_step
/// included, numbers in their shortest form: two specs that make the same method have the same.
/// Errors: as CreateMethod for name and parameters.
Result<CompressorSpec> CompleteMethodSpec(const CompressorSpec& spec, const CompressionRules* job);

/// True if anything of the job is compressed after the warm-up.
bool Compresses(const CompressionRules& job);

/// The method of a job that leaves updates to its caller.
inline constexpr std::string_view kNoMethod = "none";

/// Of a setting `method:`, none or a spec, what can be said without the rest of the job.
/// Errors: as CreateMethod for name and parameters.
Status CheckMethodSpec(const CompressorSpec& spec);

/// What a job must know of its method, none or a spec.  Errors: as CreateMethod.
Result<MethodTraits> JobMethodTraits(const CompressorSpec& spec, const CompressionRules& job);

/// Reads "lans(beta1=0.95)". Errors: InvalidArgument for text that is not name or
/// name(key=value,...).
Result<CompressorSpec> ParseMethodSpec(std::string_view text);

}  // namespace gradwire
