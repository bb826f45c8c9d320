#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "worker/trainer/dataset.h"
#include "worker/trainer/samples.h"

namespace gradwire::trainer {

/// Characters that a model sees of a text.
inline constexpr std::size_t kTextContext = 16;

/// Where every Debian system has texts: the licences of its package base-files.
inline constexpr const char* kDefaultTextDir = "/usr/share/common-licenses";

/// A text to guess the next character of. Sample i is the characters [i, i + kTextContext), its
/// label the one after them. A character is a byte, and its number the place among those that
/// occur.
class Text final : public Samples {
 public:
  /// The first `limit` samples (0: all) of a text in numbers below `alphabet`.
  Text(std::vector<std::uint8_t> text, std::size_t alphabet, std::size_t limit);

  /// A row of kTextContext characters, and the alphabet as classes.
  SampleShape shape() const override { return {1, kTextContext, alphabet_}; }
  std::size_t size() const override { return size_; }
  /// Writes the characters' numbers, the oldest first.
  void Read(std::size_t index, std::span<float> output) const override;
  std::uint8_t label(std::size_t index) const override { return text_[index + kTextContext]; }

 private:
  std::vector<std::uint8_t> text_;
  std::size_t alphabet_;
  std::size_t size_;
};

/// Loads one half of the texts in a folder: all regular files (no links), by name. The last tenth
/// of every file is for the test, where later versions of one licence have their ends in common;
/// the rest is for training. The alphabet is that of both.
/// Errors: NotFound naming the folder and the Debian package if there are no files, and for one
/// that can't be read; CorruptData if there are more than 64 MiB, or too few characters for a
/// sample.
Result<Text> LoadText(const std::string& folder, Split split, std::size_t limit);

}  // namespace gradwire::trainer
