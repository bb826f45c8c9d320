#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

namespace gradwire {

static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian and so are the hosts Gradwire is built for");

/// Read-only bytes, valid until the call returns unless the callee says otherwise.
using ByteView = std::span<const std::byte>;
/// Writable bytes, valid until the call returns unless the callee says otherwise.
using MutableBytes = std::span<std::byte>;

/// Loads a little-endian T from any address. Payloads arrive misaligned; never cast instead.
template <typename T>
requires std::is_trivially_copyable_v<T> T LoadLe(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Stores a T as little-endian at any address.
template <typename T>
requires std::is_trivially_copyable_v<T>
void StoreLe(void* to, T value) { std::memcpy(to, &value, sizeof(T)); }

/// The bytes of a span of trivially copyable values.
template <typename T, std::size_t N>
requires std::is_trivially_copyable_v<T> ByteView AsBytes(std::span<T, N> values) {
  return std::as_bytes(values);
}

inline ByteView AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::string_view AsText(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace gradwire
