#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "common/base/status.h"

namespace gradwire {

/// Reads parts off the front of some bytes, which outlive it.
class ByteReader {
 public:
  explicit ByteReader(ByteView bytes) : bytes_(bytes) {}

  /// False, with nothing taken, if there is less.
  bool Take(std::uint64_t count, ByteView& part) {
    if (count > bytes_.size()) return false;
    part = bytes_.first(static_cast<std::size_t>(count));
    bytes_ = bytes_.subspan(static_cast<std::size_t>(count));
    return true;
  }
  template <typename T>
  bool Take(T& value) {
    ByteView part;
    if (!Take(sizeof(T), part)) return false;
    value = LoadLe<T>(part.data());
    return true;
  }
  /// What AppendText wrote.
  bool TakeText(std::string& text) {
    std::uint32_t size = 0;
    ByteView bytes;
    if (!Take(size) || !Take(size, bytes)) return false;
    text = AsText(bytes);
    return true;
  }
  std::size_t left() const { return bytes_.size(); }

 private:
  ByteView bytes_;
};

template <typename T>
void AppendLe(std::vector<std::byte>& bytes, const T& value) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  StoreLe(bytes.data() + at, value);
}

inline void AppendBytes(std::vector<std::byte>& bytes, ByteView more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

/// Its length in 32 bits, then the text.
inline void AppendText(std::vector<std::byte>& bytes, std::string_view text) {
  AppendLe(bytes, static_cast<std::uint32_t>(text.size()));
  AppendBytes(bytes, AsBytes(text));
}

/// Eight bytes at a time, since what is saved may be as large as the model.
inline std::uint64_t Checksum(ByteView bytes) {
  std::uint64_t hash = Mix64(bytes.size());
  std::size_t i = 0;
  for (; i + sizeof(std::uint64_t) <= bytes.size(); i += sizeof(std::uint64_t)) {
    hash = Mix64(hash ^ LoadLe<std::uint64_t>(bytes.data() + i));
  }
  std::uint64_t last = 0;
  if (i < bytes.size()) std::memcpy(&last, bytes.data() + i, bytes.size() - i);
  return Mix64(hash ^ last);
}

/// What is between the magic and the checksum that saved bytes begin and end with.
/// Errors: CorruptData "<what>: <fault>".
Result<ByteReader> OpenSaved(ByteView saved, std::string_view magic, std::string_view what);

}  // namespace gradwire
