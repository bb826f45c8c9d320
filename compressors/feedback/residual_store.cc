#include "compressors/feedback/residual_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/base/random.h"

namespace gradwire {
namespace {

/// Values of one tensor by offset; pieces never overlap.
using Pieces = std::map<std::uint64_t, std::vector<float>>;

constexpr std::string_view kMagic = "GWRESIDU";
constexpr std::uint32_t kVersion = 1;

/// Eight bytes at a time, since residuals are as large as the model.
std::uint64_t Checksum(ByteView bytes) {
  std::uint64_t hash = Mix64(bytes.size());
  std::size_t i = 0;
  for (; i + sizeof(std::uint64_t) <= bytes.size(); i += sizeof(std::uint64_t)) {
    hash = Mix64(hash ^ LoadLe<std::uint64_t>(bytes.data() + i));
  }
  std::uint64_t last = 0;
  if (i < bytes.size()) std::memcpy(&last, bytes.data() + i, bytes.size() - i);
  return Mix64(hash ^ last);
}

/// The part that two stretches of a tensor have in common; empty if begin >= end.
struct Overlap {
  Overlap(std::uint64_t offset_a, std::uint64_t count_a, std::uint64_t offset_b,
          std::uint64_t count_b)
      : begin(std::max(offset_a, offset_b)),
        end(std::min(offset_a + count_a, offset_b + count_b)) {}
  std::uint64_t begin;
  std::uint64_t end;
};

/// Copies what the pieces know of [offset, offset + values.size()) into values.
void CopyOut(const Pieces& pieces, std::uint64_t offset, std::span<float> values) {
  for (const auto& [piece_offset, piece] : pieces) {
    const Overlap common(piece_offset, piece.size(), offset, values.size());
    if (common.begin >= common.end) continue;
    std::copy_n(piece.begin() + static_cast<std::ptrdiff_t>(common.begin - piece_offset),
                common.end - common.begin,
                values.begin() + static_cast<std::ptrdiff_t>(common.begin - offset));
  }
}

/// Removes [offset, offset + count) from the pieces.
void Cut(Pieces& pieces, std::uint64_t offset, std::uint64_t count) {
  Pieces rest;
  for (auto& [piece_offset, piece] : pieces) {
    const Overlap common(piece_offset, piece.size(), offset, count);
    if (common.begin >= common.end) {
      rest.emplace(piece_offset, std::move(piece));
      continue;
    }
    const auto before = static_cast<std::ptrdiff_t>(common.begin - piece_offset);
    const auto after = static_cast<std::ptrdiff_t>(common.end - piece_offset);
    if (before > 0) rest.emplace(piece_offset, std::vector(piece.begin(), piece.begin() + before));
    if (common.end < piece_offset + piece.size()) {
      rest.emplace(common.end, std::vector(piece.begin() + after, piece.end()));
    }
  }
  pieces = std::move(rest);
}

/// Reads fixed-size parts off the front of some bytes.
class Reader {
 public:
  explicit Reader(ByteView bytes) : bytes_(bytes) {}

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
  std::size_t left() const { return bytes_.size(); }

 private:
  ByteView bytes_;
};

template <typename T>
void Append(std::vector<std::byte>& bytes, const T& value) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  StoreLe(bytes.data() + at, value);
}

void AppendBytes(std::vector<std::byte>& bytes, ByteView more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

void AppendRange(std::vector<std::byte>& bytes, std::string_view tensor, std::uint64_t offset,
                 std::span<const float> values) {
  Append(bytes, static_cast<std::uint32_t>(tensor.size()));
  AppendBytes(bytes, AsBytes(tensor));
  Append(bytes, offset);
  Append(bytes, static_cast<std::uint64_t>(values.size()));
  AppendBytes(bytes, AsBytes(values));
}

Status Damaged(std::string_view what) {
  return CorruptData(fmt::format("saved residuals are damaged: {}", what));
}

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
  entry->ForEachRange([&](const TensorRange& range, std::span<float> values) {
    const auto restored = restored_.find(range.tensor);
    if (restored == restored_.end()) return;
    CopyOut(restored->second, range.offset, values);
    Cut(restored->second, range.offset, range.count);
    if (restored->second.empty()) restored_.erase(restored);
  });
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

Result<std::vector<std::byte>> ResidualStore::Save() {
  const std::lock_guard lock(mu_);
  std::vector<std::byte> bytes;
  AppendBytes(bytes, AsBytes(kMagic));
  Append(bytes, kVersion);
  std::uint64_t num_ranges = 0;
  for (const auto& [key, entry] : entries_) num_ranges += entry->ranges.size();
  for (const auto& [tensor, pieces] : restored_) num_ranges += pieces.size();
  Append(bytes, num_ranges);
  for (const auto& [key, entry] : entries_) {
    entry->codec->Flush(entry->residual);
    entry->ForEachRange([&](const TensorRange& range, std::span<const float> values) {
      AppendRange(bytes, range.tensor, range.offset, values);
    });
  }
  for (const auto& [tensor, pieces] : restored_) {
    for (const auto& [offset, values] : pieces) AppendRange(bytes, tensor, offset, values);
  }
  Append(bytes, Checksum(bytes));
  return bytes;
}

Status ResidualStore::Restore(ByteView saved) {
  // First everything is read and checked, then it is taken over.
  if (saved.size() < kMagic.size() + sizeof(std::uint64_t)) {
    return Damaged(fmt::format("{} bytes are too few", saved.size()));
  }
  const ByteView body = saved.first(saved.size() - sizeof(std::uint64_t));
  if (AsText(body.first(kMagic.size())) != kMagic) return Damaged("they begin otherwise");
  const auto expected = LoadLe<std::uint64_t>(saved.data() + body.size());
  if (const std::uint64_t got = Checksum(body); got != expected) {
    return Damaged(fmt::format("checksum is {:016x}, expected {:016x}", got, expected));
  }
  Reader reader(body.subspan(kMagic.size()));
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
    ByteView floats;
    if (!reader.Take(name_bytes) || !reader.Take(name_bytes, name) || !reader.Take(offset) ||
        !reader.Take(count) || count > reader.left() / sizeof(float) || offset + count < offset ||
        !reader.Take(count * sizeof(float), floats)) {
      return Damaged(fmt::format("range {} of {} is cut off", i, num_ranges));
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
    pieces.emplace(offset, std::move(values));
  }
  if (reader.left() != 0) {
    return Damaged(fmt::format("{} bytes follow the last range", reader.left()));
  }

  const std::lock_guard lock(mu_);
  for (const auto& [key, entry] : entries_) {
    entry->codec->Flush(entry->residual);
    entry->ForEachRange([&](const TensorRange& range, std::span<float> values) {
      const auto found = read.find(range.tensor);
      if (found == read.end()) return;
      CopyOut(found->second, range.offset, values);
      Cut(found->second, range.offset, range.count);
    });
  }
  for (auto& [tensor, pieces] : read) {
    Pieces& kept = restored_[tensor];
    for (auto& [offset, values] : pieces) {
      Cut(kept, offset, values.size());
      kept.emplace(offset, std::move(values));
    }
    if (kept.empty()) restored_.erase(tensor);
  }
  return Status::Ok();
}

std::vector<float> ResidualStore::Read(const std::string& tensor, std::uint64_t count) {
  const std::lock_guard lock(mu_);
  std::vector<float> all(static_cast<std::size_t>(count), 0.0F);
  if (const auto restored = restored_.find(tensor); restored != restored_.end()) {
    CopyOut(restored->second, 0, all);
  }
  for (const auto& [key, entry] : entries_) {
    const bool holds =
        std::any_of(entry->ranges.begin(), entry->ranges.end(),
                    [&](const TensorRange& range) { return range.tensor == tensor; });
    if (!holds) continue;
    entry->codec->Flush(entry->residual);
    entry->ForEachRange([&](const TensorRange& range, std::span<const float> values) {
      if (range.tensor != tensor) return;
      const Overlap common(range.offset, range.count, 0, count);
      if (common.begin >= common.end) return;
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(common.begin - range.offset),
                  common.end - common.begin,
                  all.begin() + static_cast<std::ptrdiff_t>(common.begin));
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
    for (const auto& [offset, values] : pieces) floats += values.size();
  }
  return floats * sizeof(float);
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
