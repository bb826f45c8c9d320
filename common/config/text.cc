#include "common/config/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <numeric>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/config/config.h"

namespace gradwire {
namespace {

struct UnitName {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::array<UnitName, 9> kSizeUnits = {{{"B", 1},
                                                 {"KB", 1000},
                                                 {"MB", 1000 * 1000},
                                                 {"GB", 1000ULL * 1000 * 1000},
                                                 {"TB", 1000ULL * 1000 * 1000 * 1000},
                                                 {"KiB", 1ULL << 10},
                                                 {"MiB", 1ULL << 20},
                                                 {"GiB", 1ULL << 30},
                                                 {"TiB", 1ULL << 40}}};
constexpr std::array<UnitName, 4> kTimeUnits = {
    {{"ms", 1}, {"s", 1000}, {"m", 60 * 1000}, {"h", 3600 * 1000}}};

/// A whole number and a unit, nothing else: no sign, no fraction, no blank.
enum class Fault { kNone, kSyntax, kTooLarge };

template <std::size_t N>
Fault ParseWithUnit(std::string_view text, const std::array<UnitName, N>& units,
                    bool unit_is_optional, std::uint64_t max, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument) return Fault::kSyntax;
  const std::string_view suffix(end, static_cast<std::size_t>(text.data() + text.size() - end));
  std::uint64_t factor = 1;
  if (!suffix.empty() || !unit_is_optional) {
    const auto found = std::find_if(units.begin(), units.end(),
                                    [&](const UnitName& unit) { return unit.name == suffix; });
    if (found == units.end()) return Fault::kSyntax;
    factor = found->factor;
  }
  if (error == std::errc::result_out_of_range || value > max / factor) return Fault::kTooLarge;
  value *= factor;
  return Fault::kNone;
}

}  // namespace

Result<std::uint64_t> ParseSize(const std::string& text) {
  std::uint64_t value = 0;
  switch (ParseWithUnit(text, kSizeUnits, true, std::numeric_limits<std::uint64_t>::max(), value)) {
    case Fault::kSyntax:
      return InvalidArgument(fmt::format(
          "'{}' is not a size, expected a whole number of bytes or one with KB, MB, GB, "
          "TB, KiB, MiB, GiB or TiB, such as 64KiB",
          text));
    case Fault::kTooLarge:
      return InvalidArgument(fmt::format("'{}' is more than 64 bits of bytes", text));
    case Fault::kNone:
      break;
  }
  return value;
}

Result<int> ParseDuration(const std::string& text) {
  std::uint64_t value = 0;
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<int>::max());
  switch (ParseWithUnit(text, kTimeUnits, false, kMax, value)) {
    case Fault::kSyntax:
      return InvalidArgument(fmt::format(
          "'{}' is not a time, expected a whole number with ms, s, m or h, such as 200ms", text));
    case Fault::kTooLarge:
      return InvalidArgument(fmt::format("'{}' is more than {} milliseconds", text, kMax));
    case Fault::kNone:
      break;
  }
  return static_cast<int>(value);
}

std::string FormatSize(std::uint64_t bytes) {
  const UnitName* best = nullptr;
  for (const UnitName& unit : kSizeUnits) {
    if (unit.factor == 1 || bytes == 0 || bytes % unit.factor != 0) continue;
    if (best == nullptr || unit.factor > best->factor) best = &unit;
  }
  return best == nullptr ? std::to_string(bytes)
                         : fmt::format("{}{}", bytes / best->factor, best->name);
}

std::string FormatDuration(std::int64_t milliseconds) {
  if (milliseconds % 1000 != 0 || milliseconds == 0) return fmt::format("{}ms", milliseconds);
  return fmt::format("{}s", milliseconds / 1000);
}

std::string NearestName(const std::string& word, const std::vector<std::string>& candidates) {
  // Beyond this many characters, a word is no slip of the finger.
  if (word.size() > 128) return {};
  std::string best;
  // A third of the letters wrong is still a slip; more is another word.
  std::size_t best_distance = word.size() / 3 + 2;
  for (const std::string& candidate : candidates) {
    // Levenshtein's distance with swaps of neighbours, three rows at a time.
    std::vector<std::size_t> before(candidate.size() + 1);
    std::vector<std::size_t> last(candidate.size() + 1);
    std::vector<std::size_t> row(candidate.size() + 1);
    std::iota(last.begin(), last.end(), std::size_t{0});
    for (std::size_t i = 1; i <= word.size(); ++i) {
      row[0] = i;
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        const std::size_t change = word[i - 1] == candidate[j - 1] ? 0 : 1;
        row[j] = std::min({row[j - 1] + 1, last[j] + 1, last[j - 1] + change});
        if (i > 1 && j > 1 && word[i - 1] == candidate[j - 2] && word[i - 2] == candidate[j - 1]) {
          row[j] = std::min(row[j], before[j - 2] + 1);
        }
      }
      std::swap(before, last);
      std::swap(last, row);
    }
    const std::size_t distance = last[candidate.size()];
    if (distance < best_distance && distance < candidate.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace gradwire
