#include "common/wire/nonfinite.h"

#include <fmt/format.h>

#include <algorithm>

namespace gradwire {
namespace {

constexpr std::size_t kRankBytes = sizeof(std::uint32_t);
constexpr std::size_t kMostDescribed = 16;

}  // namespace

void StoreNonfiniteRanks(std::span<const std::uint32_t> ranks, std::byte* out) {
  for (std::size_t i = 0; i < ranks.size(); ++i) StoreLe(out + i * kRankBytes, ranks[i]);
}

Result<std::vector<std::uint32_t>> ParseNonfiniteRanks(ByteView payload,
                                                       std::uint32_t num_workers) {
  if (payload.size() % kRankBytes != 0 || payload.size() / kRankBytes > num_workers) {
    return CorruptData(
        fmt::format("reply of a void round is {} bytes, expected {} for each of at most {} ranks",
                    payload.size(), kRankBytes, num_workers));
  }
  std::vector<std::uint32_t> ranks(payload.size() / kRankBytes);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    ranks[i] = LoadLe<std::uint32_t>(payload.data() + i * kRankBytes);
    const std::uint32_t least = i == 0 ? 0 : ranks[i - 1] + 1;
    if (ranks[i] < least || ranks[i] >= num_workers) {
      return CorruptData(
          fmt::format("reply of a void round has rank {} at position {}, expected "
                      "{} to {}",
                      ranks[i], i, least, num_workers - 1));
    }
  }
  return ranks;
}

std::string DescribeNonfiniteRanks(std::span<const std::uint32_t> ranks) {
  if (ranks.empty()) return "none (the sum overflows)";
  const std::size_t count = std::min(ranks.size(), kMostDescribed);
  std::string text = fmt::format("{}", fmt::join(ranks.first(count), ", "));
  if (ranks.size() > count) text += fmt::format(" and {} more", ranks.size() - count);
  return text;
}

}  // namespace gradwire
