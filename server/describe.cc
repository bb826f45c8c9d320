#include "server/describe.h"

#include <fmt/format.h>

#include <string_view>

namespace gradwire {

MemberName NameOf(const Hello& hello, const std::string& address) {
  // An IPv6 socket shows IPv4 peers this way.
  constexpr std::string_view kMapped = "::ffff:";
  const bool is_mapped = address.starts_with(kMapped) && address.find('.') != std::string::npos;
  return {hello.role, hello.rank, is_mapped ? address.substr(kMapped.size()) : address, hello.host,
          hello.pid};
}

std::string Describe(const MemberName& name) {
  std::string text = fmt::format("{} {}", RoleName(name.role), name.rank);
  if (!name.address.empty()) text += fmt::format(" at {}", name.address);
  if (!name.host.empty() && name.pid != 0) {
    text += fmt::format(" (host {}, pid {})", name.host, name.pid);
  } else if (!name.host.empty()) {
    text += fmt::format(" (host {})", name.host);
  } else if (name.pid != 0) {
    text += fmt::format(" (pid {})", name.pid);
  }
  return text;
}

std::string FormatRanks(const std::vector<std::uint32_t>& ranks) {
  if (ranks.empty()) return "none";
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (!text.empty()) text += ",";
    if (end - i < 3) {
      text += fmt::format("{}", ranks[i]);
      ++i;
    } else {
      text += fmt::format("{}-{}", ranks[i], ranks[end - 1]);
      i = end;
    }
  }
  return text;
}

std::string Describe(const OpenCall& call, std::chrono::steady_clock::time_point now) {
  const double seconds = std::chrono::duration<double>(now - call.since).count();
  if (call.missing.empty()) {
    return fmt::format("{}: open for {:.1f} s, all ranks are here and the sum is being made",
                       call.what, seconds);
  }
  return fmt::format("{}: open for {:.1f} s, ranks {} are here, {} missing", call.what, seconds,
                     FormatRanks(call.here), FormatRanks(call.missing));
}

}  // namespace gradwire
