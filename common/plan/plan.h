#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/wire/plan_data.h"
#include "compressors/compression_rules.h"

namespace gradwire {

/// Of a plan at most, so that nobody's declarations can take all memory: 262144 units of 1 MiB are
/// 256 GiB of gradients.
inline constexpr std::size_t kMaxPlanUnits = std::size_t{1} << 18;
inline constexpr std::size_t kMaxPlanTensors = std::size_t{1} << 17;

/// fp32 bytes of a unit under `bytes: auto`: for compressors that keep half of the bytes or more in
/// either direction, and for stronger ones.
inline constexpr std::uint64_t kAutoPlainUnitBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kAutoStrongUnitBytes = std::uint64_t{2} << 20;

/// What a plan is made from, beside the declarations.
struct PlanOptions {
  std::uint32_t num_workers = 1;
  std::uint32_t num_servers = 1;
  std::uint32_t lanes_per_server = 1;
  std::uint64_t partition_bytes = 0;     // fp32 bytes of a unit; 0: auto, by compressor
  std::uint64_t fuse_below = 64 * 1024;  // bytes; tensors below it are fused
  CompressionRules compression;
};

/// Bytes of the largest frame that a job with this partition.bytes (0: auto) sends: every control
/// message and every unit's payload fits. What strangers send is cut off there.
std::size_t MaxFrameBytes(std::uint64_t partition_bytes);

/// Errors: InvalidArgument naming the unit whose payloads may be larger than `max_frame_bytes`.
Status CheckFrames(const Plan& plan, std::size_t max_frame_bytes,
                   const CompressorRegistry& registry);

/// An empty plan for these options.
Plan EmptyPlan(const PlanOptions& options);

/// Returns the next version with the batch appended. Units:
/// - Tensors of at least fuse_below bytes (at their dtype) are cut into units of the partition size
///   (auto: 1 MiB of fp32 for `none`, fp16 and bf16, 2 MiB for stronger compressors), multiples of
///   kBlockElements, the last one smaller. Smaller ones of equal dtype, op and compression are
///   fused in declared order up to that size. Other dtypes take the element count of the fp32 size.
///   Zero-element tensors get no unit.
/// - min_bytes applies to the unit. Integers and broadcasts go under `none`, as does everything
///   before warmup_steps. An exact compressor has no feedback: there is nothing to keep.
/// - With a filter, floats that are averaged or summed get a class of each of its stages, unless a
///   rule exempts them or they are fp64 that no compressor touches. `balanced`: by wire bytes,
///   longest first, into the class with the least. `index`: by their number in the order of the
///   backward pass, after units above the median of the batch have been cut (docs/covap.md). What
///   has a class keeps it.
/// - Placement is by wire bytes, longest first, onto the least loaded server and there the least
///   loaded lane; what the plan already has stays where it is. Broadcasts, which come once, are
///   balanced among themselves, and so is each class of the filter.
/// Units (keys, members, phases) do not depend on the number of workers, servers and lanes.
/// Errors: InvalidArgument naming the tensor: no name, declared before, too large, a compressor
/// that doesn't exist or is given wrong parameters, or feedback that does not go with the filter;
/// options that don't fit the plan.
Result<Plan> ExtendPlan(const Plan& plan, std::span<const TensorDeclaration> batch,
                        const PlanOptions& options, const CompressorRegistry& registry);

/// Returns the next version in which filtered units are sent once in `interval` steps from
/// `first_step` on: one more stage of the filter, and of each filtered unit its class in it. Units,
/// their cuts and their places stay. `balanced`: longest first, into the class that has the least
/// bytes on the unit's server and on all together.
/// Errors: InvalidArgument if there is no filter, it has as many stages as possible, first_step
/// does not come after that of the last stage, or interval is not from 1 to kMaxFilterInterval.
Result<Plan> ChangeInterval(const Plan& plan, std::uint32_t interval, std::uint64_t first_step,
                            const PlanOptions& options, const CompressorRegistry& registry);

/// Units that the filter holds back at times: no larger interval makes sense.
std::uint32_t NumFilteredUnits(const Plan& plan);

/// Returns the next version with the batch appended as the saved plan has it (`plan: file`): the
/// same units, phases, filter and placement, whatever the options say of partitions and
/// compression.
/// Errors: InvalidArgument naming the tensor and both values if the saved plan has another tensor
/// at this place, or none; if it fuses tensors of this batch with those of another; if it is for
/// another number of workers, servers or lanes; if a compressor doesn't exist.
Result<Plan> ReplayPlan(const Plan& plan, std::span<const TensorDeclaration> batch,
                        const Plan& saved, const PlanOptions& options,
                        const CompressorRegistry& registry = BuiltinCompressors());

/// Payload bytes of a unit between one worker and its server in one round: an upper bound, exact
/// for compressors of fixed size.
struct UnitBytes {
  std::uint64_t uplink = 0;
  std::uint64_t downlink = 0;
};

/// Errors: InvalidArgument for a compressor that doesn't exist.
Result<UnitBytes> WireBytes(const Unit& unit, const Phase& phase,
                            const CompressorRegistry& registry);

/// A readable table: a line a unit, then units and payload bytes a round for each server and lane.
/// Compressors that the registry doesn't know count with their raw bytes.
std::string DescribePlan(const Plan& plan,
                         const CompressorRegistry& registry = BuiltinCompressors());
/// Two lines for the banner, with a filter three. What a worker sends and receives a step is the
/// mean over an interval.
std::string SummarizePlan(const Plan& plan,
                          const CompressorRegistry& registry = BuiltinCompressors());
/// The plan as JSON, for programs: {"version", "workers", "servers", "lanes", "filter", "units"},
/// and of each unit its members and phases with compressors, their class and feedback.
/// docs/python.md has the fields. The class of a compressor that the registry doesn't know is null.
std::string PlanToJson(const Plan& plan, const CompressorRegistry& registry = BuiltinCompressors());

/// A plan in a file: a magic, the length, Serialize(plan), a checksum. The file appears whole or
/// not at all. Errors: Unavailable with path and reason; CorruptData for a damaged file.
Status SavePlan(const Plan& plan, const std::string& path);
Result<Plan> LoadPlan(const std::string& path);

/// Says why two declarations of the same tensor differ: "shape is [3] on rank 0, [4] on rank 1";
/// empty if they agree.
std::string DescribeDifference(const TensorDeclaration& a, std::uint32_t rank_a,
                               const TensorDeclaration& b, std::uint32_t rank_b);

}  // namespace gradwire
