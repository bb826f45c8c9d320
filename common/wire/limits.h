#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// What a message may say at most. Everything beyond is refused when it is parsed, before memory is
// taken for it. docs/wire_format.md has the table.

/// Ranks of workers and of servers are below this.
inline constexpr std::uint32_t kMaxRanks = 65536;
inline constexpr std::uint32_t kMaxLanes = 1024;
/// Bytes of a tensor's name, an address, a job id, a compressor's text, a setting's key.
inline constexpr std::size_t kMaxNameBytes = 1024;
/// Bytes of a setting's value.
inline constexpr std::size_t kMaxSettingBytes = 64 * 1024;
inline constexpr std::size_t kMaxSettings = 4096;
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr std::uint32_t kMaxPhases = 1024;
/// Stages of a plan's filter, and steps of an interval.
inline constexpr std::size_t kMaxFilterStages = 1024;
inline constexpr std::uint32_t kMaxInterval = 4096;
/// Bytes of one tensor at its dtype: what a pointer difference can hold.
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 62;
/// Entries of every kind (tensors, units, members, phases, texts) in one control message: two
/// million, so that a message of kMaxControlBytes can't take many times its size in memory.
inline constexpr std::size_t kMaxControlItems = std::size_t{1} << 21;

}  // namespace gradwire
