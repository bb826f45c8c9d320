#include "compressors/compression_rules.h"

#include <cstddef>
#include <string_view>

namespace gradwire {

bool MatchesPattern(std::string_view pattern, std::string_view name) {
  // Greedy with one point of return: when a character does not fit, the last `*` takes one more.
  // Linear in practice, at most |pattern| * |name|.
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t star_name = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_name = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++star_name;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace gradwire
