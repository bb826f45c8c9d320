#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"

namespace gradwire {

/// The payload of a void round's Reply: the ranks whose contributions were not finite.
/// Layout: u32 each, in rank order; no bytes if only the sum was not finite.
/// Shapes: out[4 * ranks.size()] bytes.
void StoreNonfiniteRanks(std::span<const std::uint32_t> ranks, std::byte* out);

/// Errors: CorruptData if it is not whole numbers, has a rank that the job does not have, or ranks
/// out of order or twice; so there are never more than num_workers.
Result<std::vector<std::uint32_t>> ParseNonfiniteRanks(ByteView payload, std::uint32_t num_workers);

/// For messages: "1, 3", at most 16 of them and then how many more; without ranks that the sum
/// overflows.
std::string DescribeNonfiniteRanks(std::span<const std::uint32_t> ranks);

}  // namespace gradwire
