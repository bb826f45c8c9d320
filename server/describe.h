#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/wire/control.h"

namespace gradwire {

/// Who takes part in the job, as every message to people names it.
struct MemberName {
  Role role = Role::kWorker;
  std::uint32_t rank = 0;
  std::string address;  // where its connection comes from, without a port; may be empty
  std::string host;     // may be empty
  std::uint64_t pid = 0;
};

/// `address` is Loop::SenderAddress() of the hello.
MemberName NameOf(const Hello& hello, const std::string& address);

/// "worker 1 at 10.0.0.3 (host n3, pid 4242)", without what is not known.
std::string Describe(const MemberName& name);

/// Ranks in ascending order: "0-3,7"; "none" if there are none.
std::string FormatRanks(const std::vector<std::uint32_t>& ranks);

/// A round, a declaration or a barrier that some ranks have reached and others have not.
struct OpenCall {
  std::chrono::steady_clock::time_point since;  // the first rank came
  std::string what;
  std::vector<std::uint32_t> here;
  std::vector<std::uint32_t> missing;
};

/// "tensor 'w' (key 3), step 7, round 7: open for 12.3 s, ranks 0 are here, 1 missing"
std::string Describe(const OpenCall& call, std::chrono::steady_clock::time_point now);

}  // namespace gradwire
