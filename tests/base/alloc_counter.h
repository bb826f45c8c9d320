#pragma once

#include <cstdint>

namespace gradwire {

/// Times that any thread of this program has called operator new. A test that links the counter has
/// the program's operator new replaced.
std::uint64_t NumAllocations();

}  // namespace gradwire
