#include "common/base/dtype.h"

#include <array>
#include <string>
#include <utility>

namespace gradwire {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 8> kNames = {{
    {DType::kFloat32, "float32"},
    {DType::kFloat16, "float16"},
    {DType::kBFloat16, "bfloat16"},
    {DType::kFloat64, "float64"},
    {DType::kInt8, "int8"},
    {DType::kUInt8, "uint8"},
    {DType::kInt32, "int32"},
    {DType::kInt64, "int64"},
}};

}  // namespace

std::string_view DTypeName(DType dtype) {
  for (const auto& [value, name] : kNames) {
    if (value == dtype) return name;
  }
  return "invalid";
}

Result<DType> ParseDType(std::string_view name) {
  std::string known;
  for (const auto& [value, text] : kNames) {
    if (text == name) return value;
    known += known.empty() ? "" : ", ";
    known += text;
  }
  return InvalidArgument("dtype '" + std::string(name) + "' is unknown, expected one of " + known);
}

Result<DType> DTypeFromWire(std::uint32_t number) {
  if (number > 255 || SizeOf(static_cast<DType>(number)) == 0) {
    return CorruptData("dtype number " + std::to_string(number) + " names no dtype");
  }
  return static_cast<DType>(number);
}

}  // namespace gradwire
