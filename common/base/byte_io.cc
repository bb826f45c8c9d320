#include "common/base/byte_io.h"

#include <fmt/format.h>

namespace gradwire {

Result<ByteReader> OpenSaved(ByteView saved, std::string_view magic, std::string_view what) {
  if (saved.size() < magic.size() + sizeof(std::uint64_t)) {
    return CorruptData(fmt::format("{}: {} bytes are too few", what, saved.size()));
  }
  const ByteView body = saved.first(saved.size() - sizeof(std::uint64_t));
  if (AsText(body.first(magic.size())) != magic) {
    return CorruptData(fmt::format("{}: the first bytes are not {}", what, magic));
  }
  const auto expected = LoadLe<std::uint64_t>(saved.data() + body.size());
  if (const std::uint64_t got = Checksum(body); got != expected) {
    return CorruptData(
        fmt::format("{}: checksum is {:016x}, expected {:016x}", what, got, expected));
  }
  return ByteReader(body.subspan(magic.size()));
}

}  // namespace gradwire
