#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/base/status.h"

namespace gradwire {

/// Element types of tensors. The numbers are on the wire: never reuse one.
enum class DType : std::uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kInt8 = 5,
  kUInt8 = 6,
  kInt32 = 7,
  kInt64 = 8,
};

/// Bytes of one element; 0 for a number that names no dtype.
constexpr std::size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat64;
}

/// "float32", "bfloat16", ...; "invalid" for a number that names no dtype.
std::string_view DTypeName(DType dtype);

/// Errors: InvalidArgument naming the text and the dtypes there are.
Result<DType> ParseDType(std::string_view name);

/// Errors: CorruptData for a number that names no dtype. For values from the wire.
Result<DType> DTypeFromWire(std::uint32_t number);

}  // namespace gradwire
