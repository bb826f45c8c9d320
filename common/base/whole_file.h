#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"

namespace gradwire {

/// How the names end of files that are not finished.
inline constexpr std::string_view kUnfinishedSuffix = ".tmp";

/// Writes a file so that its name shows either all of it or what was there before: to a name of its
/// own, down to the disk, then renamed. `failure` begins the message of an error.
/// Errors: Unavailable "<failure> '<path>': <reason>"; nothing is left behind then.
Status WriteWholeFile(const std::string& path, ByteView bytes, std::string_view failure);

/// Reads a file. One that is longer than `max_bytes` is read until that shows, so that what is
/// returned is longer too.
/// Errors: Unavailable "<failure> '<path>': <reason>".
Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::size_t max_bytes,
                                             std::string_view failure);

}  // namespace gradwire
