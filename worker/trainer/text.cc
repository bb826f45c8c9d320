#include "worker/trainer/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <filesystem>
#include <system_error>
#include <utility>

namespace gradwire::trainer {
namespace {

constexpr std::size_t kMaxTextBytes = std::size_t{64} << 20;

/// The folder's regular files by name; empty and `error` set if it can't be read.
std::vector<std::string> RegularFiles(const std::string& folder, std::error_code& error) {
  std::vector<std::string> paths;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::error_code unreadable;
    if (std::filesystem::is_regular_file(entry->symlink_status(unreadable))) {
      paths.push_back(entry->path().string());
    }
  }
  if (error) paths.clear();
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

Text::Text(std::vector<std::uint8_t> text, std::size_t alphabet, std::size_t limit)
    : text_(std::move(text)),
      alphabet_(alphabet),
      size_(text_.size() > kTextContext ? text_.size() - kTextContext : 0) {
  assert(std::all_of(text_.begin(), text_.end(), [&](auto number) { return number < alphabet; }));
  if (limit != 0) size_ = std::min(size_, limit);
}

void Text::Read(std::size_t index, std::span<float> output) const {
  std::transform(text_.data() + index, text_.data() + index + kTextContext, output.begin(),
                 [](std::uint8_t number) { return static_cast<float>(number); });
}

Result<Text> LoadText(const std::string& folder, Split split, std::size_t limit) {
  std::error_code error;
  const std::vector<std::string> paths = RegularFiles(folder, error);
  if (paths.empty()) {
    return NotFound(
        fmt::format("no texts in {} ({}); install the Debian package base-files or give --data-dir",
                    folder, error ? error.message() : "no regular files"));
  }
  std::array<bool, 256> occurs{};
  std::vector<std::uint8_t> chosen;
  std::size_t total = 0;
  for (const std::string& path : paths) {
    const Result<std::vector<std::byte>> bytes = ReadMaybeGzip(path, kMaxTextBytes);
    GRADWIRE_RETURN_IF_ERROR(bytes.status());
    total += bytes->size();
    if (total > kMaxTextBytes) {
      return CorruptData(fmt::format("{}: more than {} bytes of text", folder, kMaxTextBytes));
    }
    const std::size_t for_training = bytes->size() - bytes->size() / 10;
    for (std::size_t i = 0; i < bytes->size(); ++i) {
      const auto character = std::to_integer<std::uint8_t>((*bytes)[i]);
      occurs[character] = true;
      if ((i < for_training) == (split == Split::kTrain)) chosen.push_back(character);
    }
  }
  if (chosen.size() <= kTextContext) {
    return CorruptData(fmt::format(
        "{}: too few characters for a sample: {} to {} on, expected at least {}", folder,
        chosen.size(), split == Split::kTrain ? "train" : "test", kTextContext + 1));
  }
  std::array<std::uint8_t, 256> numbers{};
  std::size_t alphabet = 0;
  for (std::size_t c = 0; c < occurs.size(); ++c) {
    if (occurs[c]) numbers[c] = static_cast<std::uint8_t>(alphabet++);
  }
  for (std::uint8_t& character : chosen) character = numbers[character];
  return Text(std::move(chosen), alphabet, limit);
}

}  // namespace gradwire::trainer
