#pragma once

#include <cstdint>

namespace gradwire {

/// A number for each compressor, never reused; a new compressor takes kNextWireId and moves it on.
/// Plans and messages name compressors by their written form; the number is for payloads that have
/// to say by themselves what they are.
namespace wire_id {
inline constexpr std::uint16_t kNone = 1;
inline constexpr std::uint16_t kFp16 = 2;
inline constexpr std::uint16_t kBf16 = 3;
inline constexpr std::uint16_t kOnebit = 4;
inline constexpr std::uint16_t kTopk = 5;
inline constexpr std::uint16_t kInt8 = 6;
inline constexpr std::uint16_t kRandomk = 7;
inline constexpr std::uint16_t kDithering = 8;
inline constexpr std::uint16_t kNatural = 9;
inline constexpr std::uint16_t kTerngrad = 10;
inline constexpr std::uint16_t kTwobit = 11;
inline constexpr std::uint16_t kThreshold = 12;
inline constexpr std::uint16_t kNextWireId = 13;
/// From here on numbers belong to plug-ins.
inline constexpr std::uint16_t kFirstPluginId = 0x8000;
}  // namespace wire_id

}  // namespace gradwire
