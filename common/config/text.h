#pragma once

#include <cstdint>
#include <string>

namespace gradwire {

/// The shortest exact written form: 65536 -> "64KiB", 1000 -> "1000".
std::string FormatSize(std::uint64_t bytes);
/// 60000 -> "60s", 1500 -> "1500ms".
std::string FormatDuration(std::int64_t milliseconds);

}  // namespace gradwire
