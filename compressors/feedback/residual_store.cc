#include "compressors/feedback/residual_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "common/base/byte_io.h"
#include "compressors/codecs/float_mode.h"

namespace gradwire {
namespace {

constexpr std::string_view kMagic = "GWRESIDU";
constexpr std::uint32_t kVersion = 2;

/// The part that two stretches of a tensor have in common; empty if begin >= end.
struct Overlap {
  Overlap(std::uint64_t offset_a, std::uint64_t count_a, std::uint64_t offset_b,
          std::uint64_t count_b)
      : begin(std::max(offset_a, offset_b)),
        end(std::min(offset_a + count_a, offset_b + count_b)) {}
  std::uint64_t begin;
  std::uint64_t end;
};

/// Copies what a piece at `piece_offset` has of [offset, offset + values.size()) into values;
/// returns what it wrote to.
std::span<float> CopyOut(std::span<const float> piece, std::uint64_t piece_offset,
                         std::uint64_t offset, std::span<float> values) {
  const Overlap common(piece_offset, piece.size(), offset, values.size());
  if (common.begin >= common.end) return {};
  const auto count = static_cast<std::size_t>(common.end - common.begin);
  const auto target = values.subspan(static_cast<std::size_t>(common.begin - offset), count);
  const auto source = piece.subspan(static_cast<std::size_t>(common.begin - piece_offset), count);
  std::copy(source.begin(), source.end(), target.begin());
  return target;
}

/// values <- alpha * values. The weight is finite and not negative.
void Multiply(double alpha, std::span<float> values) {
  const ScopedFloatMode ieee;
  constexpr double kMost = std::numeric_limits<float>::max();
  for (float& value : values) {
    value = static_cast<float>(std::clamp(alpha * static_cast<double>(value), -kMost, kMost));
  }
}

void AppendRange(std::vector<std::byte>& bytes, std::string_view tensor, std::uint64_t offset,
                 const GradientScale& scale, std::span<const float> values) {
  AppendText(bytes, tensor);
  AppendLe(bytes, offset);
  AppendLe(bytes, static_cast<std::uint64_t>(values.size()));
  AppendLe(bytes, scale.learning_rate);
  AppendLe(bytes, scale.loss_scale);
  AppendBytes(bytes, AsBytes(values));
}

constexpr std::string_view kDamaged = "saved residuals are damaged";

Status Damaged(std::string_view what) { return CorruptData(fmt::format("{}: {}", kDamaged, what)); }

}  // namespace

struct ResidualStore::Entry {
  std::vector<TensorRange> ranges;
  const Compressor* codec = nullptr;
  std::vector<float> values;
  Residual residual;

  /// Calls body(range, values of the range) for each range.
  template <typename Body>
  void ForEachRange(Body&& body) {
    std::size_t at = 0;
    for (const TensorRange& range : ranges) {
      const auto count = static_cast<std::size_t>(range.count);
      body(range, std::span(values).subspan(at, count));
      at += count;
    }
  }
};

/// Removes [offset, offset + count) from the pieces.
void ResidualStore::Cut(Pieces& pieces, std::uint64_t offset, std::uint64_t count) {
  Pieces rest;
  for (auto& [piece_offset, piece] : pieces) {
    const std::vector<float>& values = piece.values;
    const Overlap common(piece_offset, values.size(), offset, count);
    if (common.begin >= common.end) {
      rest.emplace(piece_offset, std::move(piece));
      continue;
    }
    const auto before = static_cast<std::ptrdiff_t>(common.begin - piece_offset);
    const auto after = static_cast<std::ptrdiff_t>(common.end - piece_offset);
    if (before > 0) {
      rest.emplace(piece_offset,
                   Piece{std::vector(values.begin(), values.begin() + before), piece.scale});
    }
    if (common.end < piece_offset + values.size()) {
      rest.emplace(common.end,
                   Piece{std::vector(values.begin() + after, values.end()), piece.scale});
    }
  }
  pieces = std::move(rest);
}

/// Moves what there is of an entry's ranges into it. The entry's residual is explicit.
void ResidualStore::TakeOver(Entry& entry, std::map<std::string, Pieces>& from) {
  GradientScale& scale = entry.residual.scale;
  bool is_first = true;
  entry.ForEachRange([&](const TensorRange& range, std::span<float> values) {
    const auto found = from.find(range.tensor);
    if (found == from.end()) return;
    for (const auto& [offset, piece] : found->second) {
      const Overlap common(offset, piece.values.size(), range.offset, range.count);
      if (common.begin >= common.end) continue;
      if (std::exchange(is_first, false)) {
        BringToScale(*entry.codec, piece.scale, entry.residual);
      }
      const std::span<float> taken = CopyOut(piece.values, offset, range.offset, values);
      if (piece.scale != scale) Multiply(ResidualWeight(piece.scale, scale), taken);
    }
    Cut(found->second, range.offset, range.count);
    if (found->second.empty()) from.erase(found);
  });
}

ResidualStore::ResidualStore() = default;
ResidualStore::~ResidualStore() = default;

Result<Residual*> ResidualStore::Get(std::uint64_t key, const std::vector<TensorRange>& ranges,
                                     const Compressor& codec) {
  const std::lock_guard lock(mu_);
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    Entry& entry = *found->second;
    if (entry.ranges != ranges) {
      return InvalidArgument(
          fmt::format("residual of key {} covers {} ranges from '{}', asked for {} from '{}'", key,
                      entry.ranges.size(), entry.ranges.empty() ? "" : entry.ranges[0].tensor,
                      ranges.size(), ranges.empty() ? "" : ranges[0].tensor));
    }
    if (entry.codec != &codec) {
      entry.codec->Flush(entry.residual);
      entry.codec = &codec;
    }
    return &entry.residual;
  }

  auto entry = std::make_unique<Entry>();
  entry->ranges = ranges;
  entry->codec = &codec;
  std::uint64_t n = 0;
  for (const TensorRange& range : ranges) n += range.count;
  entry->values.assign(static_cast<std::size_t>(n), 0.0F);
  entry->residual.values = entry->values;
  TakeOver(*entry, restored_);
  Residual* const residual = &entry->residual;
  entries_.emplace(key, std::move(entry));
  return residual;
}

Status ResidualStore::ChangeCodec(std::uint64_t key, const Compressor& codec) {
  const std::lock_guard lock(mu_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return NotFound(fmt::format("there is no residual of key {}", key));
  found->second->codec->Flush(found->second->residual);
  found->second->codec = &codec;
  return Status::Ok();
}

std::vector<std::byte> ResidualStore::BeginSaved(std::uint64_t num_ranges) {
  std::vector<std::byte> bytes;
  AppendBytes(bytes, AsBytes(kMagic));
  AppendLe(bytes, kVersion);
  AppendLe(bytes, num_ranges);
  return bytes;
}

void ResidualStore::AppendEntry(Entry& entry, std::vector<std::byte>& bytes) {
  entry.codec->Flush(entry.residual);
  const GradientScale& scale = entry.residual.scale;
  entry.ForEachRange([&](const TensorRange& range, std::span<const float> values) {
    AppendRange(bytes, range.tensor, range.offset, scale, values);
  });
}

Result<std::vector<std::byte>> ResidualStore::Save() {
  const std::lock_guard lock(mu_);
  std::uint64_t num_ranges = 0;
  for (const auto& [key, entry] : entries_) num_ranges += entry->ranges.size();
  for (const auto& [tensor, pieces] : restored_) num_ranges += pieces.size();
  std::vector<std::byte> bytes = BeginSaved(num_ranges);
  for (const auto& [key, entry] : entries_) AppendEntry(*entry, bytes);
  for (const auto& [tensor, pieces] : restored_) {
    for (const auto& [offset, piece] : pieces) {
      AppendRange(bytes, tensor, offset, piece.scale, piece.values);
    }
  }
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

std::vector<std::byte> ResidualStore::SaveUnit(std::uint64_t key) {
  const std::lock_guard lock(mu_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return {};
  std::vector<std::byte> bytes = BeginSaved(found->second->ranges.size());
  AppendEntry(*found->second, bytes);
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

Result<std::map<std::string, ResidualStore::Pieces>> ResidualStore::ParseSaved(ByteView saved) {
  auto opened = OpenSaved(saved, kMagic, kDamaged);
  if (!opened.ok()) return opened.status();
  ByteReader& reader = *opened;
  std::uint32_t version = 0;
  if (!reader.Take(version)) return Damaged("the version is missing");
  if (version != kVersion) {
    return Damaged(fmt::format("version is {}, expected {}", version, kVersion));
  }
  std::uint64_t num_ranges = 0;
  if (!reader.Take(num_ranges)) return Damaged("the number of ranges is missing");
  std::map<std::string, Pieces> read;
  for (std::uint64_t i = 0; i < num_ranges; ++i) {
    std::uint32_t name_bytes = 0;
    ByteView name;
    std::uint64_t offset = 0;
    std::uint64_t count = 0;
    GradientScale scale;
    ByteView floats;
    if (!reader.Take(name_bytes) || !reader.Take(name_bytes, name) || !reader.Take(offset) ||
        !reader.Take(count) || !reader.Take(scale.learning_rate) ||
        !reader.Take(scale.loss_scale) || count > reader.left() / sizeof(float) ||
        offset + count < offset || !reader.Take(count * sizeof(float), floats)) {
      return Damaged(fmt::format("range {} of {} is cut off", i, num_ranges));
    }
    for (const double number : {scale.learning_rate, scale.loss_scale}) {
      if (std::isfinite(number) && number >= 0) continue;
      return Damaged(fmt::format(
          "range {} of '{}' has the learning rate {} and the loss scale {}, expected finite "
          "numbers from 0",
          i, AsText(name), scale.learning_rate, scale.loss_scale));
    }
    std::vector<float> values(static_cast<std::size_t>(count));
    if (count != 0) std::memcpy(values.data(), floats.data(), floats.size());
    if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); })) {
      return Damaged(
          fmt::format("range {} of '{}' holds a value that is not finite", i, AsText(name)));
    }
    if (count == 0) continue;
    Pieces& pieces = read[std::string(AsText(name))];
    Cut(pieces, offset, count);
    pieces.emplace(offset, Piece{std::move(values), scale});
  }
  if (reader.left() != 0) {
    return Damaged(fmt::format("{} bytes follow the last range", reader.left()));
  }
  return read;
}

Status ResidualStore::Restore(ByteView saved) {
  auto parsed = ParseSaved(saved);
  if (!parsed.ok()) return parsed.status();
  std::map<std::string, Pieces> read = std::move(parsed).value();
  const std::lock_guard lock(mu_);
  for (const auto& [key, entry] : entries_) {
    Clear(*entry);
    TakeOver(*entry, read);
  }
  restored_ = std::move(read);
  return Status::Ok();
}

Status ResidualStore::RestoreUnit(std::uint64_t key, const std::vector<TensorRange>& ranges,
                                  const Compressor& codec, ByteView saved) {
  auto parsed = ParseSaved(saved);
  if (!parsed.ok()) return parsed.status();
  const auto residual = Get(key, ranges, codec);
  if (!residual.ok()) return residual.status();
  const std::lock_guard lock(mu_);
  Entry& entry = *entries_.at(key);
  Clear(entry);
  TakeOver(entry, parsed.value());
  return Status::Ok();
}

void ResidualStore::Clear(Entry& entry) {
  entry.codec->Flush(entry.residual);
  std::fill(entry.values.begin(), entry.values.end(), 0.0F);
  entry.residual.scale = {};
}

void ResidualStore::ClearUnit(std::uint64_t key) {
  const std::lock_guard lock(mu_);
  const auto found = entries_.find(key);
  if (found != entries_.end()) Clear(*found->second);
}

Result<std::vector<std::byte>> ResidualStore::Select(const std::vector<ByteView>& saved,
                                                     const std::vector<TensorRange>& ranges) {
  std::uint64_t count = 0;
  std::vector<std::byte> parts;
  for (const ByteView bytes : saved) {
    const auto parsed = ParseSaved(bytes);
    if (!parsed.ok()) return parsed.status();
    for (const TensorRange& range : ranges) {
      const auto found = parsed->find(range.tensor);
      if (found == parsed->end()) continue;
      for (const auto& [offset, piece] : found->second) {
        const Overlap common(offset, piece.values.size(), range.offset, range.count);
        if (common.begin >= common.end) continue;
        AppendRange(parts, range.tensor, common.begin, piece.scale,
                    std::span(piece.values)
                        .subspan(static_cast<std::size_t>(common.begin - offset),
                                 static_cast<std::size_t>(common.end - common.begin)));
        ++count;
      }
    }
  }
  if (count == 0) return parts;
  std::vector<std::byte> bytes = BeginSaved(count);
  AppendBytes(bytes, parts);
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

std::vector<std::string> ResidualStore::UnclaimedTensors() const {
  const std::lock_guard lock(mu_);
  std::vector<std::string> names;
  for (const auto& [tensor, pieces] : restored_) {
    if (!pieces.empty()) names.push_back(tensor);
  }
  return names;
}

std::vector<float> ResidualStore::Read(const std::string& tensor, std::uint64_t count) {
  const std::lock_guard lock(mu_);
  std::vector<float> all(static_cast<std::size_t>(count), 0.0F);
  if (const auto restored = restored_.find(tensor); restored != restored_.end()) {
    for (const auto& [offset, piece] : restored->second) CopyOut(piece.values, offset, 0, all);
  }
  for (const auto& [key, entry] : entries_) {
    const bool holds =
        std::any_of(entry->ranges.begin(), entry->ranges.end(),
                    [&](const TensorRange& range) { return range.tensor == tensor; });
    if (!holds) continue;
    entry->codec->Flush(entry->residual);
    entry->ForEachRange([&](const TensorRange& range, std::span<const float> values) {
      if (range.tensor == tensor) CopyOut(values, range.offset, 0, all);
    });
  }
  return all;
}

std::size_t ResidualStore::size_bytes() const {
  const std::lock_guard lock(mu_);
  std::size_t floats = 0;
  for (const auto& [key, entry] : entries_) {
    floats += entry->values.size() + entry->residual.pending.capacity();
  }
  for (const auto& [tensor, pieces] : restored_) {
    for (const auto& [offset, piece] : pieces) floats += piece.values.size();
  }
  return floats * sizeof(float);
}

double ResidualWeight(const GradientScale& then, const GradientScale& now) {
  double alpha = 1;
  if (then.learning_rate > 0 && now.learning_rate > 0) {
    alpha *= then.learning_rate / now.learning_rate;
  }
  if (then.loss_scale > 0 && now.loss_scale > 0) alpha *= now.loss_scale / then.loss_scale;
  // Absurd numbers must not make a NaN of a residual that is 0.
  return std::isnan(alpha) ? 1 : std::min(alpha, std::numeric_limits<double>::max());
}

void BringToScale(const Compressor& codec, const GradientScale& now, Residual& residual) {
  if (now == residual.scale) return;
  const double alpha = ResidualWeight(residual.scale, now);
  residual.scale = now;
  if (alpha == 1) return;
  codec.Flush(residual);
  Multiply(alpha, residual.values);
}

void RestoreAfterVoidRound(BlockSource& input, Residual& residual) {
  ForEachBlock(residual.values.size(), [&](std::size_t offset, std::size_t count) {
    const float* block = input.Block(offset, count);
    float* values = residual.values.data() + offset;
    for (std::size_t i = 0; i < count; ++i) {
      // Where the input is not finite the residual kept its value.
      if (std::isfinite(block[i])) values[i] -= block[i];
    }
  });
}

}  // namespace gradwire
