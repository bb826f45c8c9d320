#include "worker/client/unit_io.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gradwire {

void FloatConverter::ToFloat(DType dtype, const std::byte* from, std::size_t count,
                             float* out) const {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, from, count * sizeof(float));
      return;
    case DType::kFloat64:
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = static_cast<float>(LoadLe<double>(from + i * sizeof(double)));
      }
      return;
    default: {
      const Compressor* codec = dtype == DType::kFloat16 ? fp16_ : bf16_;
      const ByteView bytes(from, count * SizeOf(dtype));
      std::fill_n(out, count, 0.0F);
      for (std::size_t at = 0; at < count; at += kBlockElements) {
        const std::size_t size = std::min(kBlockElements, count - at);
        codec->DecodeAddRange(bytes, count, {}, at, {out + at, size});
      }
      return;
    }
  }
}

void FloatConverter::FromFloat(DType dtype, const float* from, std::size_t count,
                               std::byte* out) const {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, from, count * sizeof(float));
      return;
    case DType::kFloat64:
      for (std::size_t i = 0; i < count; ++i) {
        StoreLe(out + i * sizeof(double), static_cast<double>(from[i]));
      }
      return;
    default: {
      const Compressor* codec = dtype == DType::kFloat16 ? fp16_ : bf16_;
      const MutableBytes bytes(out, count * SizeOf(dtype));
      (void)EncodeSpan(*codec, {from, count}, {}, bytes);  // exact size: cannot be too small
      return;
    }
  }
}

const float* UnitSource::Block(std::size_t offset, std::size_t count) {
  const std::vector<UnitMember>& members = unit_.members;
  if (members.size() == 1 && unit_.dtype == DType::kFloat32 && memory_[0].input != nullptr) {
    // The members' views are checked for alignment when they are handed over.
    return reinterpret_cast<const float*>(memory_[0].input) + offset;
  }
  const std::size_t size = SizeOf(unit_.dtype);
  // The first member that reaches into the block; members are in order.
  auto member = std::partition_point(members.begin(), members.end(), [&](const UnitMember& m) {
    return m.unit_offset + m.count <= offset;
  });
  for (std::size_t done = 0; done < count; ++member) {
    const std::size_t skip = offset + done - member->unit_offset;
    const std::size_t take = std::min<std::size_t>(member->count - skip, count - done);
    const std::byte* input = memory_[static_cast<std::size_t>(member - members.begin())].input;
    if (input == nullptr) {
      std::fill_n(scratch_.data() + done, take, 0.0F);
    } else {
      convert_.ToFloat(unit_.dtype, input + skip * size, take, scratch_.data() + done);
    }
    done += take;
  }
  return scratch_.data();
}

void GatherBytes(const Unit& unit, std::span<const MemberMemory> memory, std::byte* out) {
  const std::size_t size = SizeOf(unit.dtype);
  for (std::size_t i = 0; i < unit.members.size(); ++i) {
    const UnitMember& member = unit.members[i];
    std::byte* to = out + member.unit_offset * size;
    if (memory[i].input == nullptr) {
      std::memset(to, 0, member.count * size);
    } else {
      std::memcpy(to, memory[i].input, member.count * size);
    }
  }
}

void ScatterBytes(const Unit& unit, const std::byte* from, std::span<const MemberMemory> memory) {
  const std::size_t size = SizeOf(unit.dtype);
  for (std::size_t i = 0; i < unit.members.size(); ++i) {
    const UnitMember& member = unit.members[i];
    if (memory[i].output == nullptr) continue;
    std::memcpy(memory[i].output, from + member.unit_offset * size, member.count * size);
  }
}

void ScatterFloats(const Unit& unit, const float* values, std::span<const MemberMemory> memory,
                   const FloatConverter& convert) {
  for (std::size_t i = 0; i < unit.members.size(); ++i) {
    const UnitMember& member = unit.members[i];
    if (memory[i].output == nullptr) continue;
    convert.FromFloat(unit.dtype, values + member.unit_offset, member.count, memory[i].output);
  }
}

std::optional<NonfiniteElement> FindNonfinite(const Unit& unit,
                                              std::span<const MemberMemory> memory,
                                              const FloatConverter& convert) {
  UnitSource source(unit, memory, convert);
  std::optional<std::size_t> found;
  ForEachBlock(unit.num_elements, [&](std::size_t offset, std::size_t count) {
    if (found) return;
    const float* const block = source.Block(offset, count);
    const float* const at =
        std::find_if_not(block, block + count, [](float value) { return std::isfinite(value); });
    if (at != block + count) found = offset + static_cast<std::size_t>(at - block);
  });
  if (!found) return std::nullopt;
  std::size_t m = 0;
  while (*found >= unit.members[m].unit_offset + unit.members[m].count) ++m;
  const UnitMember& member = unit.members[m];
  return NonfiniteElement{m, member.tensor_offset + *found - member.unit_offset};
}

void FillZero(const Unit& unit, std::span<const MemberMemory> memory) {
  const std::size_t size = SizeOf(unit.dtype);
  for (std::size_t i = 0; i < unit.members.size(); ++i) {
    if (memory[i].output == nullptr) continue;
    std::memset(memory[i].output, 0, unit.members[i].count * size);
  }
}

void FillVoid(const Unit& unit, std::span<const MemberMemory> memory) {
  const std::size_t size = SizeOf(unit.dtype);
  std::array<std::byte, 8> element{};
  switch (unit.dtype) {
    case DType::kFloat32:
      StoreLe(element.data(), std::numeric_limits<float>::quiet_NaN());
      break;
    case DType::kFloat64:
      StoreLe(element.data(), std::numeric_limits<double>::quiet_NaN());
      break;
    case DType::kFloat16:
      StoreLe(element.data(), std::uint16_t{0x7e00});
      break;
    case DType::kBFloat16:
      StoreLe(element.data(), std::uint16_t{0x7fc0});
      break;
    default:
      break;
  }
  for (std::size_t i = 0; i < unit.members.size(); ++i) {
    if (memory[i].output == nullptr) continue;
    for (std::size_t j = 0; j < unit.members[i].count; ++j) {
      std::memcpy(memory[i].output + j * size, element.data(), size);
    }
  }
}

}  // namespace gradwire
