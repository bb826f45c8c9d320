#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/wire/plan_data.h"
#include "compressors/compression_rules.h"

namespace gradwire {

/// What a plan is made from, beside the declarations.
struct PlanOptions {
  std::uint32_t num_workers = 1;
  std::uint32_t num_servers = 1;
  std::uint32_t lanes_per_server = 1;
  std::uint64_t partition_bytes = 0;  // fp32 bytes of a unit; 0: auto, by compressor
  std::uint64_t fuse_below = 64 * 1024;  // bytes; tensors below it are fused
  CompressionRules compression;
};

/// An empty plan for these options.
Plan EmptyPlan(const PlanOptions& options);

/// Returns the next version with the batch appended. Units:
/// - Tensors of at least fuse_below bytes are cut into units of the partition size (auto: 1 MiB of
///   fp32 for `none`, fp16 and bf16, 2 MiB for stronger compressors), multiples of kBlockElements,
///   the last one smaller. Smaller ones of equal dtype, op and compression are fused in declared
///   order up to that size. Zero-element tensors get no unit.
/// - min_bytes applies to the unit. Integers and broadcasts go under `none`.
/// - Placement is by wire bytes, longest first, onto the least loaded (server, lane); what the plan
///   already has stays where it is.
/// Errors: InvalidArgument naming the tensor: declared before, a compressor that doesn't exist,
/// feedback refused, integer average of ... (see docs).
Result<Plan> ExtendPlan(const Plan& plan, std::span<const TensorDeclaration> batch,
                        const PlanOptions& options, const CompressorRegistry& registry);

/// A readable table: a line a unit, then bytes for each server and lane.
std::string DescribePlan(const Plan& plan);
/// Two lines for the banner.
std::string SummarizePlan(const Plan& plan);

/// Errors: Unavailable with path and reason; CorruptData for a damaged file.
Status SavePlan(const Plan& plan, const std::string& path);
Result<Plan> LoadPlan(const std::string& path);

/// Says why two declarations of the same tensor differ: "shape is [3] on rank 0, [4] on rank 1";
/// empty if they agree.
std::string DescribeDifference(const TensorDeclaration& a, std::uint32_t rank_a,
                               const TensorDeclaration& b, std::uint32_t rank_b);

}  // namespace gradwire
