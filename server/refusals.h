#pragma once

#include <cstdint>
#include <string>

namespace gradwire {

/// What a server has refused above the transport: messages that parsed and were not for this job.
struct RefusalCounters {
  std::uint64_t unknown_peer = 0;   // messages of who has not said hello
  std::uint64_t bad_hello = 0;      // did not parse
  std::uint64_t other_version = 0;  // hellos of another protocol version
  std::uint64_t foreign_job = 0;    // hellos of another job
  std::uint64_t out_of_range = 0;   // hellos of ranks that the job does not have
  std::uint64_t not_accepted = 0;   // hellos of a taken rank, at the wrong server, after the end
  std::uint64_t out_of_place = 0;   // messages that a member may not send, or not here

  RefusalCounters& operator+=(const RefusalCounters& other);
  std::uint64_t total() const;
  /// Those that are not 0: "foreign_job=2 out_of_range=1"; empty if none is.
  std::string Describe() const;
};

}  // namespace gradwire
