#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

/// Bytes a frame takes on a connection: itself, a byte of flags, and its length in 1 or 8 bytes.
/// Source: ZMTP 3.1 (ZeroMQ RFC 37), section "Framing".
constexpr std::uint64_t FramedBytes(std::size_t frame_bytes) {
  return frame_bytes + (frame_bytes <= 255 ? 2 : 9);
}

/// Bytes a message takes: a header frame and, unless it is empty, a payload frame.
constexpr std::uint64_t MessageBytes(std::size_t header_bytes, std::size_t payload_bytes) {
  return FramedBytes(header_bytes) + (payload_bytes == 0 ? 0 : FramedBytes(payload_bytes));
}

}  // namespace gradwire
