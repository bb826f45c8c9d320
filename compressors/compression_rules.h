#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compressors/registry.h"

namespace gradwire {

enum class FeedbackMode { kAuto, kOff, kEf, kEfLr };

/// How one direction is compressed.
struct LinkCompression {
  CompressorSpec compressor;
  FeedbackMode feedback = FeedbackMode::kAuto;

  friend bool operator==(const LinkCompression&, const LinkCompression&) = default;
};

/// An exception for the tensors whose name matches the pattern (`*` and `?` as in a shell). The
/// first rule that matches counts. What it leaves out is as in CompressionRules.
struct TensorRule {
  std::string match;
  std::optional<LinkCompression> uplink;
  std::optional<LinkCompression> downlink;

  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

/// What the `compression:` section of a configuration says.
struct CompressionRules {
  LinkCompression uplink;
  LinkCompression downlink;
  std::uint64_t min_bytes = 64 * 1024;  // raw bytes of a unit; smaller units go as `none`
  std::uint64_t warmup_steps = 0;       // steps under `none` before compression begins
  std::vector<TensorRule> rules;

  friend bool operator==(const CompressionRules&, const CompressionRules&) = default;
};

/// True if `name` matches the shell pattern (`*` any text, `?` one character).
bool MatchesPattern(std::string_view pattern, std::string_view name);

}  // namespace gradwire
