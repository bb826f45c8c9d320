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

/// Which units are sent in a step. COVAP sends one in `interval`; docs/covap.md.
enum class FilterType { kNone, kCovap };
/// How units come to their classes.
enum class FilterAssign { kBalanced, kIndex };
/// What becomes of the output of a unit that is not sent.
enum class FilterInactive { kZeroFill, kSkip };

inline constexpr std::uint32_t kMaxFilterInterval = 256;

struct FilterRules {
  FilterType type = FilterType::kNone;
  std::uint32_t interval = 0;  // steps, at most kMaxFilterInterval; 0: auto
  FilterAssign assign = FilterAssign::kBalanced;
  FilterInactive inactive = FilterInactive::kZeroFill;
  /// Weight of what was held back: min(1, c0 + step * floor(t / every)). None: by interval.
  std::optional<double> c0;
  double step = 0.1;
  std::optional<std::uint64_t> every;  // steps

  friend bool operator==(const FilterRules&, const FilterRules&) = default;
};

/// An exception for the tensors whose name matches the pattern (`*` and `?` as in a shell). The
/// first rule that matches counts. What it leaves out is as in CompressionRules.
struct TensorRule {
  std::string match;
  std::optional<LinkCompression> uplink;
  std::optional<LinkCompression> downlink;
  bool is_filtered = true;  // by the filter, if there is one

  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

/// What the `compression:` section of a configuration says.
struct CompressionRules {
  LinkCompression uplink;
  LinkCompression downlink;
  std::uint64_t min_bytes = 64 * 1024;  // raw bytes of a unit; smaller units go as `none`
  std::uint64_t warmup_steps = 0;       // steps under `none` before compression begins
  FilterRules filter;
  std::vector<TensorRule> rules;

  friend bool operator==(const CompressionRules&, const CompressionRules&) = default;
};

/// True if `name` matches the shell pattern (`*` any text, `?` one character).
bool MatchesPattern(std::string_view pattern, std::string_view name);

}  // namespace gradwire
