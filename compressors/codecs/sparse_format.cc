#include "compressors/codecs/sparse_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <string>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/sparse_kernels.h"

namespace gradwire {
namespace {

/// Writes the gaps of a block at a width, several a word. Returns the end of what was written, with
/// up to 8 bytes of zeros behind it. Gaps past the last one of the block are 0.
template <std::size_t kTogether>
std::byte* PackGaps(const std::uint32_t* gaps, std::size_t count, std::size_t width,
                    std::byte* to) {
  std::uint64_t word = 0;
  std::size_t filled = 0;  // below 8 before each step, which adds at most 56 (one gap: 32)
  for (std::size_t i = 0; i < count; i += kTogether) {
    std::uint64_t together = 0;
    for (std::size_t j = 0; j < kTogether; ++j)
      together |= std::uint64_t{gaps[i + j]} << (j * width);
    word |= together << filled;
    StoreLe(to, word);
    filled += kTogether * width;
    to += filled / 8;
    word >>= filled / 8 * 8;
    filled %= 8;
  }
  StoreLe(to, word);
  return to + (filled == 0 ? 0 : 1);
}

}  // namespace

Status CheckSparseElements(std::string_view name, std::size_t n) {
  if (n > kMaxSparseElements) {
    return InvalidArgument(
        fmt::format("{} was given {} elements, expected at most {}", name, n, kMaxSparseElements));
  }
  return Status::Ok();
}

std::size_t KeptCount::Of(std::size_t n) const {
  if (k != 0) return std::min(k, n);
  const double wanted = std::floor(static_cast<double>(n) * ratio + 0.5);
  return std::min(std::max<std::size_t>(static_cast<std::size_t>(wanted), 1), n);
}

ParameterInfo RatioParameter(std::string_view default_ratio) {
  // No default value, so that k alone is not taken for both.
  return {.name = "ratio",
          .kind = ParameterInfo::Kind::kNumber,
          .default_value = "",
          .min = 1e-9,
          .max = 1,
          .choices = {},
          .description = fmt::format("the part that is kept, {} if neither ratio nor k is given",
                                     default_ratio)};
}

ParameterInfo KParameter() {
  return {.name = "k",
          .kind = ParameterInfo::Kind::kInteger,
          .default_value = "",
          .min = 1,
          .max = static_cast<double>(kMaxSparseElements),
          .choices = {},
          .description = "how many are kept, in place of ratio"};
}

Result<KeptCount> KeptCountOf(std::string_view name, const Parameters& parameters,
                              double default_ratio) {
  if (parameters.Has("ratio") && parameters.Has("k")) {
    return InvalidArgument(
        fmt::format("compressor {} was given ratio and k, expected one of them", name));
  }
  KeptCount kept;
  kept.ratio = parameters.Has("ratio") ? parameters.Number("ratio") : default_ratio;
  kept.k = parameters.Has("k") ? static_cast<std::size_t>(parameters.Integer("k")) : 0;
  return kept;
}

ParameterInfo ValueParameter(std::string_view default_value) {
  return {.name = "value",
          .kind = ParameterInfo::Kind::kChoice,
          .default_value = std::string(default_value),
          .choices = {"fp16", "fp32"},
          .description = "how values are written"};
}

kernels::CastFormat ValueOf(const Parameters& parameters) {
  return parameters.Text("value") == "fp32" ? kernels::CastFormat::kF32 : kernels::CastFormat::kF16;
}

ParameterInfo IndexParameter() {
  return {.name = "index",
          .kind = ParameterInfo::Kind::kChoice,
          .default_value = "packed",
          .choices = {"packed", "u32"},
          .description = "how indices are written"};
}

IndexFormat IndexOf(const Parameters& parameters) {
  return parameters.Text("index") == "u32" ? IndexFormat::kU32 : IndexFormat::kPacked;
}

/// What is decoded at a time.
struct SparseFormat::Chunk {
  static constexpr std::size_t kCapacity = 2 * kGapBlock;
  std::size_t count = 0;
  alignas(64) std::array<std::uint32_t, kCapacity> indices;
  alignas(64) std::array<float, kCapacity> values;
};

std::byte* SparseFormat::WriteIndices(std::span<const std::uint32_t> indices, std::byte* to) const {
  if (index_ == IndexFormat::kU32) {
    if (!indices.empty()) std::memcpy(to, indices.data(), indices.size_bytes());
    return to + indices.size_bytes();
  }
  std::uint32_t next = 0;  // the index after the previous one; wraps after the last one only
  for (std::size_t begin = 0; begin < indices.size(); begin += kGapBlock) {
    const std::size_t count = std::min(kGapBlock, indices.size() - begin);
    const std::uint32_t* const block = indices.data() + begin;
    std::array<std::uint32_t, kGapBlock + 3> gaps;
    gaps[0] = block[0] - next;
    for (std::size_t i = 1; i < count; ++i) gaps[i] = block[i] - block[i - 1] - 1;
    for (std::size_t i = 0; i < 3; ++i) gaps[count + i] = 0;
    next = block[count - 1] + 1;
    std::uint32_t all = 0;
    for (std::size_t i = 0; i < count; ++i) all |= gaps[i];
    const auto width = static_cast<std::size_t>(std::bit_width(all));
    // Whole words are stored, which must not reach beyond the payload's buffer.
    std::array<std::byte, 4 * kGapBlock + 2 * sizeof(std::uint64_t)> bytes;
    if (width <= 14) {
      PackGaps<4>(gaps.data(), count, width, bytes.data());
    } else if (width <= 28) {
      PackGaps<2>(gaps.data(), count, width, bytes.data());
    } else {
      PackGaps<1>(gaps.data(), count, width, bytes.data());
    }
    *to++ = static_cast<std::byte>(width);
    const std::size_t size = (count * width + 7) / 8;
    std::memcpy(to, bytes.data(), size);
    to += size;
  }
  return to;
}

Status SparseFormat::TooShort(std::size_t got, std::size_t expected, std::size_t n) const {
  return CorruptData(fmt::format("{} payload is {} bytes, expected at least {} for {} elements",
                                 name_, got, expected, n));
}

Status SparseFormat::WrongIndex(std::size_t i, std::size_t k, std::size_t index, std::size_t next,
                                std::size_t n) const {
  return CorruptData(
      fmt::format("{} index {} of {} is {}, expected {} to {}", name_, i, k, index, next, n - 1));
}

/// Reads a block of gaps with unpack(packed, width), a kernel. Gaps are not negative, so indices
/// ascend, and only the last one has to be looked at.
template <typename Unpack>
Status SparseFormat::ReadGaps(ByteView payload, const std::byte*& at, std::size_t begin,
                              std::size_t count, std::size_t k, std::size_t n, std::size_t& next,
                              Unpack&& unpack) const {
  const auto read = static_cast<std::size_t>(at - payload.data());
  if (read == payload.size()) return TooShort(payload.size(), read + 1, n);
  const auto width = std::to_integer<std::size_t>(*at++);
  if (width > kMaxGapWidth) {
    return CorruptData(
        fmt::format("{} gap width is {}, expected at most {}", name_, width, kMaxGapWidth));
  }
  const std::size_t bits = count * width;
  const std::size_t bytes = (bits + 7) / 8;
  const std::size_t left = payload.size() - read - 1;
  if (left < bytes) return TooShort(payload.size(), read + 1 + bytes, n);
  const std::byte* from = at;
  std::array<std::byte, 4 * kGapBlock + kernels::kUnpackSlackBytes> copy;
  if (left < bytes + kernels::kUnpackSlackBytes) {
    copy.fill(std::byte{0});
    if (bytes != 0) std::memcpy(copy.data(), at, bytes);
    from = copy.data();
  }
  const kernels::UnpackedGaps gaps = unpack(from, width);
  const auto gap_at = [&](std::size_t i) {
    const std::uint64_t word = LoadLe<std::uint64_t>(from + i * width / 8) >> (i * width % 8);
    return word & ((std::uint64_t{1} << width) - 1);
  };
  if (gaps.advance > n - next) {
    // Once more, one by one, for the index that is wrong.
    for (std::size_t i = 0, lowest = next;; ++i) {
      const std::size_t index = lowest + gap_at(i);
      if (index >= n) return WrongIndex(begin + i, k, index, lowest, n);
      lowest = index + 1;
    }
  }
  if (bits % 8 != 0 && (at[bytes - 1] >> (bits % 8)) != std::byte{0}) {
    return CorruptData(fmt::format("{} gaps end in byte {:#04x}, expected {} bits of 0", name_,
                                   std::to_integer<unsigned>(at[bytes - 1]), 8 - bits % 8));
  }
  if (!gaps.least_width) {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < count; ++i) all |= gap_at(i);
    return CorruptData(
        fmt::format("{} gap width is {}, expected {}", name_, width, std::bit_width(all)));
  }
  next += gaps.advance;
  at += bytes;
  return Status::Ok();
}

Status SparseFormat::ReadIndices(const std::byte* at, std::size_t begin, std::size_t count,
                                 std::size_t k, std::size_t n, std::size_t& next,
                                 std::uint32_t* indices) const {
  const bool ascending = kernels::CopyAscending(at, count, indices);
  if (ascending && indices[0] >= next && indices[count - 1] < n) {
    next = std::size_t{indices[count - 1]} + 1;
    return Status::Ok();
  }
  for (std::size_t i = 0;; ++i) {
    if (indices[i] >= n || indices[i] < next) {
      return WrongIndex(begin + i, k, indices[i], next, n);
    }
    next = std::size_t{indices[i]} + 1;
  }
}

/// Calls body(chunk) for what was kept, a checked chunk at a time.
template <bool kValues, typename Body>
Status SparseFormat::ForEachChunk(ByteView payload, std::size_t head, std::size_t k, std::size_t n,
                                  Body&& body) const {
  assert(k <= n && head <= payload.size());
  const std::size_t values_end = head + k * value_bytes_;
  if (index_ == IndexFormat::kU32) {
    GRADWIRE_RETURN_IF_ERROR(
        CheckPayloadSize(name_, n, payload.size(), values_end + k * sizeof(std::uint32_t)));
  } else if (payload.size() < values_end) {
    return TooShort(payload.size(), values_end, n);
  }
  Chunk chunk;
  const std::byte* at = payload.data() + values_end;
  std::size_t next = 0;  // the lowest index that may come
  for (std::size_t begin = 0; begin < k; begin += Chunk::kCapacity) {
    chunk.count = std::min(Chunk::kCapacity, k - begin);
    if (index_ == IndexFormat::kU32) {
      GRADWIRE_RETURN_IF_ERROR(ReadIndices(at + begin * sizeof(std::uint32_t), begin, chunk.count,
                                           k, n, next, chunk.indices.data()));
    } else {
      for (std::size_t i = 0; i < chunk.count; i += kGapBlock) {
        const std::size_t count = std::min(kGapBlock, chunk.count - i);
        GRADWIRE_RETURN_IF_ERROR(ReadGaps(
            payload, at, begin + i, count, k, n, next,
            [&](const std::byte* packed, std::size_t width) {
              return kernels::UnpackGaps(packed, width, count, static_cast<std::uint32_t>(next),
                                         chunk.indices.data() + i);
            }));
      }
    }
    if constexpr (kValues) {
      kernels::DecodeCast(value_, payload.data() + head + begin * value_bytes_, chunk.count,
                          chunk.values.data());
    }
    body(chunk);
  }
  if (index_ == IndexFormat::kU32) return Status::Ok();
  return CheckPayloadSize(name_, n, payload.size(), static_cast<std::size_t>(at - payload.data()));
}

Status SparseFormat::Validate(ByteView payload, std::size_t head, std::size_t k,
                              std::size_t n) const {
  return ForEachChunk<false>(payload, head, k, n, [](const Chunk&) {});
}

Status SparseFormat::Decode(ByteView payload, std::size_t head, std::size_t k,
                            std::span<float> output) const {
  std::size_t filled = 0;  // zeros go ahead of the values, so that memory is visited once
  const Status status =
      ForEachChunk<true>(payload, head, k, output.size(), [&](const Chunk& chunk) {
        const std::size_t end = std::size_t{chunk.indices[chunk.count - 1]} + 1;
        std::fill(output.data() + filled, output.data() + end, 0.0F);
        filled = end;
        for (std::size_t i = 0; i < chunk.count; ++i) output[chunk.indices[i]] = chunk.values[i];
      });
  std::fill(output.data() + filled, output.data() + output.size(), 0.0F);
  return status;
}

Status SparseFormat::DecodeAdd(ByteView payload, std::size_t head, std::size_t k,
                               std::span<float> accumulator) const {
  if (index_ == IndexFormat::kU32) {
    return ForEachChunk<true>(payload, head, k, accumulator.size(), [&](const Chunk& chunk) {
      for (std::size_t i = 0; i < chunk.count; ++i) {
        accumulator[chunk.indices[i]] += chunk.values[i];
      }
    });
  }
  const std::size_t n = accumulator.size();
  assert(k <= n && head <= payload.size());
  const std::size_t values_end = head + k * value_bytes_;
  if (payload.size() < values_end) return TooShort(payload.size(), values_end, n);
  std::array<float, kGapBlock> values;
  const std::byte* at = payload.data() + values_end;
  std::size_t next = 0;  // the lowest index that may come
  for (std::size_t begin = 0; begin < k; begin += kGapBlock) {
    const std::size_t count = std::min(kGapBlock, k - begin);
    kernels::DecodeCast(value_, payload.data() + head + begin * value_bytes_, count, values.data());
    GRADWIRE_RETURN_IF_ERROR(ReadGaps(
        payload, at, begin, count, k, n, next, [&](const std::byte* packed, std::size_t width) {
          return kernels::AddAtGaps(packed, width, count, static_cast<std::uint32_t>(next),
                                    n - next, values.data(), accumulator.data());
        }));
  }
  return CheckPayloadSize(name_, n, payload.size(), static_cast<std::size_t>(at - payload.data()));
}

void SparseFormat::DecodeAddRange(ByteView payload, std::size_t head, std::size_t k, std::size_t n,
                                  std::size_t offset, std::span<float> accumulator) const {
  const Status status = ForEachChunk<true>(payload, head, k, n, [&](const Chunk& chunk) {
    for (std::size_t i = 0; i < chunk.count; ++i) {
      const std::size_t index = chunk.indices[i];
      if (index >= offset && index - offset < accumulator.size()) {
        accumulator[index - offset] += chunk.values[i];
      }
    }
  });
  assert(status.ok());
  static_cast<void>(status);
}

}  // namespace gradwire
