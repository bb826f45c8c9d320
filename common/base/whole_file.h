#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"

namespace gradwire {

/// Writes a file so that its name shows either all of it or what was there before: to a name of its
/// own, down to the disk, then renamed. `what` stands for it in messages: "plan".
/// Errors: Unavailable "cannot write plan '<path>': <reason>"; nothing is left behind then.
Status WriteWholeFile(const std::string& path, ByteView bytes, std::string_view what);

/// Reads a file. One that is longer than `max_bytes` is read until that shows, so that what is
/// returned is longer too.
/// Errors: Unavailable "cannot read plan '<path>': <reason>".
Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::size_t max_bytes,
                                             std::string_view what);

}  // namespace gradwire
