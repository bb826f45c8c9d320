#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/dtype.h"
#include "common/wire/plan_data.h"
#include "compressors/compressor.h"

namespace gradwire {

/// Where one member of a unit lies in the caller's memory.
struct MemberMemory {
  const std::byte* input = nullptr;  // null: the caller gave no gradient, it counts as zeros
  std::byte* output = nullptr;       // null: nobody wants the result
};

/// fp32 <-> another float dtype, a stretch at a time.
/// Threads: safe.
class FloatConverter {
 public:
  /// The codecs are the ones whose payloads are the dtype's bytes ("fp16", "bf16").
  FloatConverter(const Compressor* fp16, const Compressor* bf16) : fp16_(fp16), bf16_(bf16) {}

  /// Shapes: from `count` elements of dtype to out[count].
  void ToFloat(DType dtype, const std::byte* from, std::size_t count, float* out) const;
  /// Rounds to nearest even; finite values saturate. NaN and infinities stay what they are.
  void FromFloat(DType dtype, const float* from, std::size_t count, std::byte* out) const;

 private:
  const Compressor* fp16_;
  const Compressor* bf16_;
};

/// The values of a unit as fp32 blocks, straight from the caller's memory where that is one fp32
/// tensor, gathered and converted into a block otherwise.
class UnitSource final : public BlockSource {
 public:
  UnitSource(const Unit& unit, std::span<const MemberMemory> memory, const FloatConverter& convert)
      : unit_(unit), memory_(memory), convert_(convert) {}

  const float* Block(std::size_t offset, std::size_t count) override;

 private:
  const Unit& unit_;
  std::span<const MemberMemory> memory_;
  const FloatConverter& convert_;
  alignas(64) std::array<float, kBlockElements> scratch_;
};

/// Copies a unit's members' own bytes, in order, to out[raw_bytes]; zeros for missing ones.
void GatherBytes(const Unit& unit, std::span<const MemberMemory> memory, std::byte* out);
/// The other way. Members without an output are passed over.
void ScatterBytes(const Unit& unit, const std::byte* from, std::span<const MemberMemory> memory);
/// fp32 values[num_elements] to the members' outputs in the unit's dtype.
void ScatterFloats(const Unit& unit, const float* values, std::span<const MemberMemory> memory,
                   const FloatConverter& convert);
/// Where a unit of floats holds the first value that is not finite.
struct NonfiniteElement {
  std::size_t member = 0;
  std::size_t tensor_offset = 0;  // elements
};
std::optional<NonfiniteElement> FindNonfinite(const Unit& unit,
                                              std::span<const MemberMemory> memory,
                                              const FloatConverter& convert);
/// Fills the members' outputs with zeros (what a filter holds back).
void FillZero(const Unit& unit, std::span<const MemberMemory> memory);
/// Fills the members' outputs with NaN (a void round); zeros for integers.
void FillVoid(const Unit& unit, std::span<const MemberMemory> memory);

}  // namespace gradwire
