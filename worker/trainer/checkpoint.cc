#include "worker/trainer/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string_view>
#include <system_error>

#include "common/base/byte_io.h"
#include "common/base/whole_file.h"

namespace gradwire::trainer {
namespace {

constexpr std::string_view kMagic = "GWTRAIN1";
constexpr std::string_view kDamaged = "the saved run is damaged";

Status Damaged(std::string_view what) { return CorruptData(fmt::format("{}: {}", kDamaged, what)); }

void AppendBlob(std::vector<std::byte>& bytes, ByteView blob) {
  AppendLe(bytes, static_cast<std::uint64_t>(blob.size()));
  AppendBytes(bytes, blob);
}

bool TakeBlob(ByteReader& reader, ByteView& blob) {
  std::uint64_t size = 0;
  return reader.Take(size) && reader.Take(size, blob);
}

/// Errors: as FromBytes, for the part before the tensors.
Status CheckSettings(ByteReader& reader, const Checkpoint& expected) {
  std::uint32_t count = 0;
  if (!reader.Take(count)) return Damaged("its head is cut off");
  std::vector<std::pair<std::string, std::string>> saved;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::string name;
    std::string text;
    if (!reader.TakeText(name) || !reader.TakeText(text))
      return Damaged("its settings are cut off");
    saved.emplace_back(std::move(name), std::move(text));
  }
  for (const auto& expects : expected.settings) {
    const auto& [name, text] = expects;
    const auto found = std::find_if(saved.begin(), saved.end(), [&](const auto& each) {
      return each.first == expects.first;  // clang 14 does not let a lambda capture `name`
    });
    if (found == saved.end()) return Damaged(fmt::format("it has no {}", name));
    if (found->second == text) continue;
    return InvalidArgument(
        fmt::format("the saved run has {} {}, expected {}", name, found->second, text));
  }
  return Status::Ok();
}

}  // namespace

std::vector<std::byte> ToBytes(const Checkpoint& checkpoint) {
  const ByteView magic = AsBytes(kMagic);
  std::vector<std::byte> bytes(magic.begin(), magic.end());
  AppendLe(bytes, checkpoint.rank);
  AppendLe(bytes, checkpoint.step);
  AppendLe(bytes, static_cast<std::uint32_t>(checkpoint.settings.size()));
  for (const auto& [name, text] : checkpoint.settings) {
    AppendText(bytes, name);
    AppendText(bytes, text);
  }
  AppendLe(bytes, checkpoint.curve_loss);
  AppendLe(bytes, static_cast<std::uint32_t>(checkpoint.tensors.size()));
  for (const Checkpoint::Tensor& tensor : checkpoint.tensors) {
    AppendText(bytes, tensor.name);
    AppendLe(bytes, static_cast<std::uint64_t>(tensor.value.size()));
    AppendBytes(bytes, std::as_bytes(tensor.value));
    AppendBytes(bytes, std::as_bytes(tensor.velocity));
  }
  AppendBlob(bytes, checkpoint.optimizer);
  AppendBlob(bytes, checkpoint.client);
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

Status FromBytes(ByteView saved, Checkpoint& checkpoint) {
  auto opened = OpenSaved(saved, kMagic, kDamaged);
  if (!opened.ok()) return opened.status();
  ByteReader& reader = *opened;
  std::uint32_t rank = 0;
  std::uint64_t step = 0;
  if (!reader.Take(rank) || !reader.Take(step)) return Damaged("its head is cut off");
  if (rank != checkpoint.rank) {
    return InvalidArgument(
        fmt::format("the saved run is of rank {}, expected {}", rank, checkpoint.rank));
  }
  GRADWIRE_RETURN_IF_ERROR(CheckSettings(reader, checkpoint));
  double curve_loss = 0.0;
  std::uint32_t count = 0;
  if (!reader.Take(curve_loss) || !reader.Take(count)) return Damaged("its head is cut off");
  if (count != checkpoint.tensors.size()) {
    return InvalidArgument(fmt::format("the saved run has another model: {} tensors, expected {}",
                                       count, checkpoint.tensors.size()));
  }
  std::vector<ByteView> floats;  // value, velocity, of each tensor
  for (const Checkpoint::Tensor& expected : checkpoint.tensors) {
    std::string name;
    std::uint64_t n = 0;
    if (!reader.TakeText(name) || !reader.Take(n)) {
      return Damaged(fmt::format("tensor '{}' is cut off", expected.name));
    }
    if (name != expected.name || n != expected.value.size()) {
      return InvalidArgument(fmt::format(
          "the saved run has another model: tensor '{}' of {} values, expected '{}' of {}", name, n,
          expected.name, expected.value.size()));
    }
    for (int array = 0; array < 2; ++array) {
      if (!reader.Take(n * sizeof(float), floats.emplace_back())) {
        return Damaged(fmt::format("tensor '{}' is cut off", name));
      }
    }
  }
  ByteView optimizer;
  ByteView client;
  if (!TakeBlob(reader, optimizer) || !TakeBlob(reader, client) || reader.left() != 0) {
    return Damaged("its end is not where it should be");
  }
  for (std::size_t t = 0; t < checkpoint.tensors.size(); ++t) {
    const Checkpoint::Tensor& tensor = checkpoint.tensors[t];
    if (tensor.value.empty()) continue;
    std::memcpy(tensor.value.data(), floats[2 * t].data(), floats[2 * t].size());
    std::memcpy(tensor.velocity.data(), floats[2 * t + 1].data(), floats[2 * t + 1].size());
  }
  checkpoint.step = step;
  checkpoint.curve_loss = curve_loss;
  checkpoint.optimizer = optimizer;
  checkpoint.client = client;
  return Status::Ok();
}

std::string CheckpointFolder::FileOf(std::uint64_t step) const {
  return (std::filesystem::path(path_) / fmt::format("rank-{}.step-{}", rank_, step)).string();
}

Status CheckpointFolder::Write(std::uint64_t step, ByteView bytes) const {
  std::error_code error;
  std::filesystem::create_directories(path_, error);  // a failure shows when the file is written
  const Status written = WriteWholeFile(FileOf(step), bytes, "cannot write saved run");
  return written.ok() ? written : Internal(written.message());
}

Result<std::vector<std::byte>> CheckpointFolder::Read(std::uint64_t step) const {
  auto read =
      ReadWholeFile(FileOf(step), std::numeric_limits<std::size_t>::max(), "cannot read saved run");
  if (!read.ok()) return Internal(read.status().message());
  return read;
}

void CheckpointFolder::KeepOnly(std::uint64_t step) const {
  const std::string keep = FileOf(step);
  const auto [steps, unfinished] = Files();
  std::vector<std::string> others = unfinished;
  for (const std::uint64_t other : steps) others.push_back(FileOf(other));
  for (const std::string& file : others) {
    std::error_code error;
    if (file != keep) std::filesystem::remove(file, error);
  }
}

std::vector<std::uint64_t> CheckpointFolder::Steps() const { return Files().first; }

std::pair<std::vector<std::uint64_t>, std::vector<std::string>> CheckpointFolder::Files() const {
  const std::string prefix = fmt::format("rank-{}.step-", rank_);
  std::vector<std::uint64_t> steps;
  std::vector<std::string> unfinished;
  std::error_code error;
  // With increment(error), since ++ may throw.
  for (std::filesystem::directory_iterator file(path_, error), end; !error && file != end;
       file.increment(error)) {
    const std::string name = file->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    if (name.ends_with(kUnfinishedSuffix)) unfinished.push_back(file->path().string());
    std::uint64_t step = 0;
    const char* const last = name.data() + name.size();
    const auto [parsed, fault] = std::from_chars(name.data() + prefix.size(), last, step);
    if (fault == std::errc() && parsed == last) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return {std::move(steps), std::move(unfinished)};
}

}  // namespace gradwire::trainer
