#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/wire/plan_data.h"

namespace gradwire {

enum class Role : std::uint8_t { kWorker = 1, kServer = 2 };

std::string_view RoleName(Role role);

/// Bytes: no control message is larger.
inline constexpr std::size_t kMaxControlBytes = std::size_t{64} << 20;

/// First message of a connection. The configuration that workers and servers must share goes with
/// it as keys and values, so that a difference can be named.
struct Hello {
  std::string job_id;
  std::uint32_t protocol_version = 0;
  Role role = Role::kWorker;
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;
  std::map<std::string, std::string> shared_config;
  std::vector<std::string> lane_addresses;  // servers only: where its lanes listen
  std::string host;                         // name of the sender's host, for messages to people
  std::uint64_t pid = 0;                    // the sender's process there, likewise

  friend bool operator==(const Hello&, const Hello&) = default;
};

/// The answer to a Hello. From the root it comes when everyone is there and has all addresses.
struct Welcome {
  std::uint32_t num_workers = 0;
  std::uint32_t num_servers = 0;
  /// [server][lane]; only from the root.
  std::vector<std::vector<std::string>> addresses;
  /// The root's plan is a saved one, whose intervals stay; only from the root.
  bool replays_plan = false;

  friend bool operator==(const Welcome&, const Welcome&) = default;
};

/// Tensors declared together, in order. Batches are counted from 0 and every worker's batch b must
/// be the same.
struct Declare {
  std::uint64_t batch = 0;
  std::vector<TensorDeclaration> tensors;

  friend bool operator==(const Declare&, const Declare&) = default;
};

/// Serialization of control messages and plans (protobuf inside). Parsing validates: names, ranks,
/// dtypes, counts, indices of members, products that overflow.
/// Errors: CorruptData naming the field.
std::vector<std::byte> Serialize(const Hello& hello);
std::vector<std::byte> Serialize(const Welcome& welcome);
std::vector<std::byte> Serialize(const Declare& declare);
std::vector<std::byte> Serialize(const Plan& plan);
Result<Hello> ParseHello(ByteView bytes);
Result<Welcome> ParseWelcome(ByteView bytes);
Result<Declare> ParseDeclare(ByteView bytes);
Result<Plan> ParsePlan(ByteView bytes);

}  // namespace gradwire
