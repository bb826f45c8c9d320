#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "common/config/config.h"
#include "common/config/process.h"

namespace gradwire {

/// A variable of another launcher, and what it says here. The only place where they are written
/// down; docs/configuration.md has the same table, which a test holds together.
struct Alias {
  /// Who reads it. Its text is checked in every process all the same.
  enum class Reader { kAll, kWorker, kServer };

  std::string_view variable;
  std::string_view family;  // "torchrun"
  /// What it sets: a key's path, "rank", "local_rank", "local_size", "role", the halves of the
  /// endpoint "endpoint.host" and "endpoint.port", or nothing if it is only checked.
  std::string_view target;
  Reader reader = Reader::kAll;
  /// The text for the target, empty if the variable says nothing.
  /// Errors: InvalidArgument, a message that goes on after the variable's name.
  Result<std::string> (*convert)(const std::string& text) = nullptr;
};

/// All of them, the innermost launcher first: of two for one target the first counts.
std::span<const Alias> Aliases();

/// What the aliases of an environment say, by target; the halves of the endpoint are put together
/// later, since a missing half is that of the layers below.
struct AliasValue {
  std::string text;
  std::string source;  // the variable, or variables
};
using AliasValues = std::map<std::string, AliasValue>;

/// Reads all aliases as a process of this role.
/// Errors: InvalidArgument naming variable, text and range, also of variables that do not count.
Result<AliasValues> ReadAliases(const Environment& environment, ProcessRole role);

/// The variables of other launchers that nobody reads, so that none stays silently unread.
std::vector<IgnoredVariable> IgnoredVariables(const Environment& environment);

/// A whole number out of text.
/// Errors: InvalidArgument, a message that goes on after the variable's name.
Result<std::uint32_t> ParseNumber(const std::string& text, std::uint32_t min, std::uint32_t max);

inline constexpr std::uint32_t kMaxRank = 4095;
inline constexpr std::uint32_t kMaxLocalSize = 4096;

}  // namespace gradwire
