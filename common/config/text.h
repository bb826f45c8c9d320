#pragma once

#include <cstdint>
#include <string>

namespace gradwire {

/// The exact written form in the largest unit there is: 65536 -> "64KiB", 65537 -> "65537".
std::string FormatSize(std::uint64_t bytes);
/// 60000 -> "60s", 1500 -> "1500ms".
std::string FormatDuration(std::int64_t milliseconds);

}  // namespace gradwire
