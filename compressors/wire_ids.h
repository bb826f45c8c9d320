#pragma once

#include <cstdint>

namespace gradwire {

/// The numbers by which compressors are known on the wire and in saved plans. Never reuse one;
/// a new compressor takes kNextWireId and moves it on.
namespace wire_id {
inline constexpr std::uint16_t kNone = 1;
inline constexpr std::uint16_t kFp16 = 2;
inline constexpr std::uint16_t kBf16 = 3;
inline constexpr std::uint16_t kOnebit = 4;
inline constexpr std::uint16_t kTopk = 5;
inline constexpr std::uint16_t kNextWireId = 6;
/// From here on numbers belong to plug-ins.
inline constexpr std::uint16_t kFirstPluginId = 0x8000;
}  // namespace wire_id

}  // namespace gradwire
