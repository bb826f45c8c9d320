#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "common/base/bytes.h"
#include "common/plan/plan.h"
#include "common/wire/control.h"
#include "common/wire/header.h"
#include "common/wire/nonfinite.h"
#include "tests/fuzz/fuzz_target.h"

// What comes over a connection: the header of every message, and the payloads that are not a
// codec's (and not a residual, which config_fuzz.cc has). In `control` the first byte says which.

namespace gradwire::fuzz {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint32_t kNumWorkers = 1000;

enum Kind : unsigned { kHello, kWelcome, kDeclare, kPlan, kNonfinite, kNumKinds };

void CheckRefused(const Status& status) {
  if (status.code() == StatusCode::kCorruptData && !status.message().empty()) return;
  Fail(fmt::format("bytes are refused with '{}', expected CorruptData and a reason",
                   status.ToString()));
}

/// What is read can be written, and is then read as the same.
template <typename Message>
void CheckSame(const Message& message, const Result<Message>& again) {
  if (!again.ok()) Fail("what was read and written again is refused: " + again.status().ToString());
  if (!(*again == message)) Fail("what was read and written again is another message");
}

void RunHeader(ByteView bytes) {
  const Result<Header> header = ParseHeader(bytes);
  if (!header.ok()) return CheckRefused(header.status());
  const HeaderBytes written = SerializeHeader(*header);
  if (written.view().size() > kMaxHeaderBytes) Fail("a header is larger than any may be");
  if (MessageKindName(header->kind) == "invalid") Fail("a header's kind has no name");
  CheckSame(*header, ParseHeader(written.view()));
}

template <typename Message>
void RunMessage(const Result<Message>& message, Result<Message> (*parse)(ByteView)) {
  if (!message.ok()) return CheckRefused(message.status());
  CheckSame(*message, parse(Serialize(*message)));
}

void RunPlan(ByteView bytes) {
  const Result<Plan> plan = ParsePlan(bytes);
  RunMessage(plan, ParsePlan);
  if (!plan.ok()) return;
  // What the receiver does with it next. It has a row for each lane of each server.
  const CompressorRegistry& registry = BuiltinCompressors();
  const bool is_small = plan->num_servers <= 16 && plan->lanes_per_server <= 16;
  if (is_small && (DescribePlan(*plan).empty() || SummarizePlan(*plan).empty())) {
    Fail("a plan is described by nothing");
  }
  if (PlanToJson(*plan).empty()) Fail("a plan has no JSON");
  const std::size_t most = MaxFrameBytes(0);
  const Status fits = CheckFrames(*plan, most, registry);
  if (!fits.ok()) return;
  for (const Unit& unit : plan->units) {
    for (const Phase& phase : unit.phases) {
      const Result<UnitBytes> needed = WireBytes(unit, phase, registry);
      if (!needed.ok()) Fail("a checked plan has " + needed.status().ToString());
      if (needed->uplink > most || needed->downlink > most) {
        Fail("a checked plan has payloads beyond its frames");
      }
    }
  }
}

void RunNonfinite(ByteView bytes) {
  const Result<std::vector<std::uint32_t>> ranks = ParseNonfiniteRanks(bytes, kNumWorkers);
  if (!ranks.ok()) return CheckRefused(ranks.status());
  if (ranks->size() > kNumWorkers) Fail("more ranks than there are");
  if (DescribeNonfiniteRanks(*ranks).empty()) Fail("ranks are described by nothing");
  Bytes written(bytes.size());
  StoreNonfiniteRanks(*ranks, written.data());
  CheckSame(*ranks, ParseNonfiniteRanks(written, kNumWorkers));
}

// ---- Seeds -------------------------------------------------------------------------------------

std::vector<Bytes> HeaderSeeds() {
  std::vector<Bytes> seeds;
  for (unsigned k = 1; MessageKindName(static_cast<MessageKind>(k)) != "invalid"; ++k) {
    Header header;
    header.kind = static_cast<MessageKind>(k);
    if (header.kind == MessageKind::kReply) header.reply = ReplyKind::kNonfinite;
    if (header.kind == MessageKind::kError) header.error = StatusCode::kInternal;
    for (const bool full : {false, true}) {
      if (full) {
        header.rank = 65535;
        header.incarnation = std::numeric_limits<std::uint64_t>::max();
        header.plan_version = 7;
        header.phase = 1;
        header.step = header.round = header.key = header.sequence = std::uint64_t{1} << 40;
        header.nonfinite = header.kind == MessageKind::kPush;
        if (header.nonfinite) header.learning_rate = header.loss_scale = 0.125;
      }
      const HeaderBytes written = SerializeHeader(header);
      seeds.emplace_back(written.view().begin(), written.view().end());
    }
  }
  return seeds;
}

Plan ExamplePlan() {
  Plan plan;
  plan.version = 3;
  plan.num_workers = 2;
  plan.num_servers = 2;
  plan.lanes_per_server = 2;
  plan.tensors = {{"weight", DType::kFloat32, {100, 10}, 2, ReduceOp::kAverage},
                  {"bias", DType::kFloat32, {10}, 1, ReduceOp::kAverage},
                  {"empty", DType::kFloat32, {0}, 0, ReduceOp::kAverage},
                  {"scalar", DType::kFloat32, {}, -1, ReduceOp::kAverage},
                  {"count", DType::kInt32, {5}, 0, ReduceOp::kSum}};
  Unit first;
  first.num_elements = 600;
  first.priority = 2;
  first.server = 1;
  first.lane = 1;
  first.members = {{0, 0, 0, 600}};
  first.phases = {{0, "none", "none", Feedback::kNone, Feedback::kNone},
                  {100, "onebit", "topk(ratio=0.01)", Feedback::kEf, Feedback::kEfLr}};
  Unit second = first;
  second.key = 1;
  second.num_elements = 400;
  second.members = {{0, 600, 0, 400}};
  Unit fused = first;
  fused.key = 2;
  fused.num_elements = 11;
  fused.members = {{1, 0, 0, 10}, {3, 0, 10, 1}};
  fused.phases = {Phase{}};
  Unit count = fused;
  count.key = 3;
  count.num_elements = 5;
  count.dtype = DType::kInt32;
  count.op = ReduceOp::kSum;
  count.members = {{4, 0, 0, 5}};
  plan.units = {first, second, fused, count};
  return plan;
}

Plan HugePlan() {
  constexpr std::uint64_t kElements = std::uint64_t{1} << 62;
  Plan plan;
  plan.version = 1;
  plan.num_workers = plan.num_servers = plan.lanes_per_server = 1;
  plan.tensors = {{"all", DType::kUInt8, {kElements}, 0, ReduceOp::kSum}};
  Unit unit;
  unit.num_elements = kElements;
  unit.dtype = DType::kUInt8;
  unit.op = ReduceOp::kSum;
  unit.members = {{0, 0, 0, kElements}};
  unit.phases = {{0, "none", "onebit", Feedback::kNone, Feedback::kEf}};
  plan.units = {unit};
  return plan;
}

std::vector<Bytes> ControlSeeds() {
  Hello hello;
  hello.job_id = "demo";
  hello.protocol_version = kProtocolVersion;
  hello.role = Role::kServer;
  hello.rank = 1;
  hello.incarnation = 12345;
  hello.shared_config = {{"compression.uplink", "onebit"}, {"job.seed", "1"}};
  hello.lane_addresses = {"tcp://10.0.0.1:5701", "tcp://10.0.0.1:5702"};
  hello.host = "node-3";
  hello.pid = 4711;
  Welcome welcome;
  welcome.num_workers = 4;
  welcome.num_servers = 2;
  welcome.addresses = {{"tcp://a:1", "tcp://a:2"}, {"tcp://b:1", "tcp://b:2"}};
  Declare declare;
  declare.batch = 3;
  declare.tensors = ExamplePlan().tensors;
  Bytes ranks(2 * sizeof(std::uint32_t));
  StoreNonfiniteRanks(std::vector<std::uint32_t>{1, 3}, ranks.data());

  std::vector<Bytes> seeds;
  const auto add = [&](Kind kind, const Bytes& message) {
    seeds.push_back({static_cast<std::byte>(kind)});
    seeds.back().insert(seeds.back().end(), message.begin(), message.end());
  };
  add(kHello, Serialize(hello));
  add(kHello, Serialize(Hello{}));
  add(kWelcome, Serialize(welcome));
  add(kDeclare, Serialize(declare));
  add(kPlan, Serialize(ExamplePlan()));
  add(kPlan, Serialize(HugePlan()));
  add(kNonfinite, ranks);
  add(kNonfinite, {});
  return seeds;
}

}  // namespace

std::string_view Program() { return "frame"; }

std::vector<std::string> Targets() { return {"header", "control"}; }

std::vector<Bytes> Seeds(const std::string& target) {
  return target == "header" ? HeaderSeeds() : ControlSeeds();
}

void Run(const std::string& target, ByteView input) {
  if (target == "header") {
    const Bytes copy(input.begin(), input.end());  // ends where its memory ends
    return RunHeader(copy);
  }
  if (input.empty()) return;
  const Bytes copy(input.begin() + 1, input.end());
  switch (std::to_integer<unsigned>(input[0]) % kNumKinds) {
    case kHello:
      return RunMessage(ParseHello(copy), ParseHello);
    case kWelcome:
      return RunMessage(ParseWelcome(copy), ParseWelcome);
    case kDeclare:
      return RunMessage(ParseDeclare(copy), ParseDeclare);
    case kPlan:
      return RunPlan(copy);
    case kNonfinite:
      return RunNonfinite(copy);
    default:
      return;
  }
}

std::size_t Mutate(const std::string&, MutableBytes buffer, std::size_t size, std::uint64_t,
                   ByteMutator mutate_bytes) {
  return mutate_bytes(reinterpret_cast<std::uint8_t*>(buffer.data()), size, buffer.size());
}

}  // namespace gradwire::fuzz
