#include "compressors/codecs/codec_checks.h"

#include <fmt/format.h>

namespace gradwire {

Status CheckEncode(std::string_view name, std::size_t n, const Residual* residual,
                   std::size_t output_bytes, std::size_t needed_bytes) {
  if (residual != nullptr && residual->values.size() != n) {
    return InvalidArgument(
        fmt::format("{} residual has {} elements, expected {}", name, residual->values.size(), n));
  }
  if (output_bytes < needed_bytes) {
    return BufferTooSmall(fmt::format("{} output is {} bytes, expected at least {} for {} elements",
                                      name, output_bytes, needed_bytes, n));
  }
  return Status::Ok();
}

Status CheckExplicit(std::string_view name, const Residual* residual) {
  if (residual != nullptr && !residual->is_explicit()) {
    return InvalidArgument(
        fmt::format("{} was given a residual that another compressor has not flushed", name));
  }
  return Status::Ok();
}

Status CheckPayloadSize(std::string_view name, std::size_t n, std::size_t got_bytes,
                        std::size_t expected_bytes) {
  if (got_bytes != expected_bytes) {
    return CorruptData(fmt::format("{} payload is {} bytes, expected {} for {} elements", name,
                                   got_bytes, expected_bytes, n));
  }
  return Status::Ok();
}

}  // namespace gradwire
