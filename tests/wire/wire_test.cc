#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/random.h"
#include "common/wire/control.h"
#include "common/wire/header.h"
#include "common/wire/limits.h"
#include "common/wire/nonfinite.h"
#include "common/wire/plan_data.h"
#include "gradwire/v1/wire.pb.h"
#include "tests/base/alloc_counter.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

constexpr std::uint64_t kMax64 = std::numeric_limits<std::uint64_t>::max();

/// From GRADWIRE_TEST_SEED, or new each time; printed, so that a failure can be replayed.
std::uint64_t TestSeed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("GRADWIRE_TEST_SEED");
    const std::uint64_t value = text != nullptr ? std::strtoull(text, nullptr, 0) : RandomId();
    std::cout << "GRADWIRE_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

template <typename Message>
std::vector<std::byte> Bytes(const Message& message) {
  std::string text;
  if (!message.SerializeToString(&text)) throw std::runtime_error("not serialized");
  const ByteView view = AsBytes(std::string_view(text));
  return {view.begin(), view.end()};
}

template <typename Message>
Message Parsed(const std::vector<std::byte>& bytes) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    throw std::runtime_error("not parsed");
  }
  return message;
}

// ---- Examples ----------------------------------------------------------------------------------

constexpr std::uint32_t kNumKinds = 24;

/// A header that a kind may carry, with every other field at its largest.
Header LargestHeader(MessageKind kind) {
  Header header;
  header.kind = kind;
  header.rank = kMaxRanks - 1;
  header.incarnation = kMax64;
  header.plan_version = kMax64;
  header.phase = kMaxPhases - 1;
  header.step = kMax64;
  header.round = kMax64;
  header.key = kMax64;
  header.sequence = kMax64;
  if (kind == MessageKind::kReply) header.reply = ReplyKind::kNonfinite;
  if (kind == MessageKind::kPush) {
    header.nonfinite = true;
    header.learning_rate = std::numeric_limits<double>::max();
    header.loss_scale = std::numeric_limits<double>::denorm_min();
  }
  if (kind == MessageKind::kError) header.error = StatusCode::kInternal;
  return header;
}

Hello ExampleHello() {
  Hello hello;
  hello.job_id = "demo";
  hello.protocol_version = 1;
  hello.role = Role::kServer;
  hello.rank = 65535;
  hello.incarnation = kMax64;
  hello.shared_config = {{"compression.uplink", "onebit"}, {"job.seed", ""}, {"\xff\xfe", "\x80"}};
  hello.lane_addresses = {"tcp://10.0.0.1:5701", "tcp://10.0.0.1:5702"};
  hello.host = "node-3";
  hello.pid = kMax64;
  return hello;
}

Welcome ExampleWelcome() {
  Welcome welcome;
  welcome.num_workers = 65536;
  welcome.num_servers = 2;
  welcome.addresses = {{"tcp://a:1", "tcp://a:2"}, {}};
  welcome.replays_plan = true;
  return welcome;
}

Declare ExampleDeclare() {
  Declare declare;
  declare.batch = 3;
  declare.tensors = {
      {"conv1.weight", DType::kFloat32, {64, 3, 7, 7}, 5, ReduceOp::kAverage},
      {"scalar", DType::kInt64, {}, -5, ReduceOp::kSum},
      {"empty", DType::kFloat16, {0, 1ULL << 60}, 0, ReduceOp::kBroadcast},
      {std::string(kMaxNameBytes, 'n'),
       DType::kUInt8,
       {1ULL << 62},
       std::numeric_limits<std::int32_t>::min(),
       ReduceOp::kAverage},
  };
  return declare;
}

Plan ExamplePlan() {
  Plan plan;
  plan.version = 7;
  plan.num_workers = 4;
  plan.num_servers = 2;
  plan.lanes_per_server = 3;
  plan.tensors = {{"big", DType::kFloat32, {1000, 10}, 2, ReduceOp::kAverage},
                  {"small.a", DType::kFloat32, {10}, 1, ReduceOp::kAverage},
                  {"none", DType::kFloat32, {0}, 9, ReduceOp::kAverage},
                  {"small.b", DType::kFloat32, {}, -1, ReduceOp::kAverage},
                  {"count", DType::kInt32, {5}, 0, ReduceOp::kSum}};
  Unit first;
  first.key = 0;
  first.num_elements = 6000;
  first.priority = 2;
  first.server = 1;
  first.lane = 2;
  first.members = {{0, 0, 0, 6000}};
  first.phases = {{0, "none", "none", Feedback::kNone, Feedback::kNone},
                  {100, "onebit", "topk(ratio=0.01)", Feedback::kEf, Feedback::kEfLr}};
  Unit second = first;
  second.key = 1;
  second.num_elements = 4000;
  second.server = 0;
  second.members = {{0, 6000, 0, 4000}};
  Unit fused = first;
  fused.key = 2;
  fused.num_elements = 11;
  fused.priority = 1;
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

// ---- Headers -----------------------------------------------------------------------------------

TEST_CASE("every kind of header comes back as it was, within the size limit", "[wire][unit]") {
  for (std::uint32_t k = 1; k <= kNumKinds; ++k) {
    const auto kind = static_cast<MessageKind>(k);
    CAPTURE(k);
    REQUIRE(MessageKindName(kind) != "invalid");
    const Header largest = LargestHeader(kind);
    const HeaderBytes bytes = SerializeHeader(largest);
    REQUIRE(bytes.view().size() <= kMaxHeaderBytes);
    const Result<Header> parsed = ParseHeader(bytes.view());
    REQUIRE(parsed.status().ToString() == "Ok");
    REQUIRE(*parsed == largest);
    // What the largest left in the reused message must not show.
    Header small;
    small.kind = kind;
    if (kind == MessageKind::kReply) small.reply = ReplyKind::kResult;
    if (kind == MessageKind::kError) small.error = StatusCode::kTimeout;
    REQUIRE(*ParseHeader(SerializeHeader(small).view()) == small);
  }
  REQUIRE(MessageKindName(static_cast<MessageKind>(0)) == "invalid");
  REQUIRE(MessageKindName(static_cast<MessageKind>(kNumKinds + 1)) == "invalid");
}

TEST_CASE("a header with every field beyond any limit still fits its buffer", "[wire][unit]") {
  Header header = LargestHeader(static_cast<MessageKind>(255));
  header.rank = std::numeric_limits<std::uint32_t>::max();
  header.phase = std::numeric_limits<std::uint32_t>::max();
  header.reply = static_cast<ReplyKind>(255);
  header.nonfinite = true;
  header.learning_rate = -std::numeric_limits<double>::max();
  header.loss_scale = std::numeric_limits<double>::infinity();
  header.error = static_cast<StatusCode>(-1);
  REQUIRE(SerializeHeader(header).view().size() <= kMaxHeaderBytes);
  REQUIRE(!ParseHeader(SerializeHeader(header).view()).ok());
}

TEST_CASE("a header that breaks a rule is refused, with the field and both values",
          "[wire][unit]") {
  struct Case {
    std::function<void(v1::Header&)> spoil;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](v1::Header& h) { h.set_protocol_version(0); },
       "header.protocol_version is 0, expected 1"},
      {[](v1::Header& h) { h.set_protocol_version(2); },
       "header.protocol_version is 2, expected 1"},
      {[](v1::Header& h) { h.set_kind(0); }, "header.kind is 0, expected 1 to 24"},
      {[](v1::Header& h) { h.set_kind(25); }, "header.kind is 25, expected 1 to 24"},
      {[](v1::Header& h) { h.set_kind(256 + 6); }, "header.kind is 262, expected 1 to 24"},
      {[](v1::Header& h) { h.set_rank(65536); }, "header.rank is 65536, expected less than 65536"},
      {[](v1::Header& h) { h.set_phase(1024); }, "header.phase is 1024, expected less than 1024"},
      {[](v1::Header& h) { h.set_reply(3); }, "header.reply is 3, expected 0 to 2"},
      {[](v1::Header& h) { h.set_error(8); }, "header.error is 8, expected 0 to 7"},
      {[](v1::Header& h) { h.set_reply(1); }, "header.reply is 1 in a Push, expected 0"},
      {[](v1::Header& h) { h.set_error(1); }, "header.error is 1 in a Push, expected 0"},
      {[](v1::Header& h) { h.set_kind(8); }, "header.reply is 0 in a Reply, expected 1 or 2"},
      {[](v1::Header& h) { h.set_kind(15); }, "header.error is 0 in a Error, expected not 0"},
      {[](v1::Header& h) {
         h.set_kind(7);
         h.set_nonfinite(true);
       },
       "header.nonfinite is true in a Receipt, expected only in a Push"},
      {[](v1::Header& h) { h.set_learning_rate(-0.5); },
       "header.learning_rate is -0.5, expected a finite number from 0"},
      {[](v1::Header& h) { h.set_learning_rate(std::numeric_limits<double>::infinity()); },
       "header.learning_rate is inf, expected a finite number from 0"},
      {[](v1::Header& h) { h.set_loss_scale(std::numeric_limits<double>::quiet_NaN()); },
       "header.loss_scale is nan, expected a finite number from 0"},
      {[](v1::Header& h) {
         h.set_kind(7);
         h.set_learning_rate(0.5);
       },
       "header.learning_rate is 0.5 in a Receipt, expected only in a Push"},
      {[](v1::Header& h) {
         h.set_kind(9);
         h.set_loss_scale(1024);
       },
       "header.loss_scale is 1024 in a Repull, expected only in a Push"},
  };
  for (const Case& bad : cases) {
    CAPTURE(bad.message);
    v1::Header message;
    message.set_protocol_version(kProtocolVersion);
    message.set_kind(static_cast<std::uint32_t>(MessageKind::kPush));
    REQUIRE(ParseHeader(Bytes(message)).ok());
    bad.spoil(message);
    const Status status = ParseHeader(Bytes(message)).status();
    REQUIRE(status.code() == StatusCode::kCorruptData);
    REQUIRE(status.message() == bad.message);
  }
  const std::vector<std::byte> large(kMaxHeaderBytes + 1);
  REQUIRE(ParseHeader(large).status().message() == "header is 129 bytes, expected at most 128");
  REQUIRE(ParseHeader({}).status().code() == StatusCode::kCorruptData);
}

TEST_CASE("a field that a later writer adds to a header is passed over", "[wire][unit]") {
  Header header = LargestHeader(MessageKind::kPush);
  const HeaderBytes bytes = SerializeHeader(header);
  std::vector<std::byte> longer(bytes.view().begin(), bytes.view().end());
  longer.push_back(std::byte{0x80});  // field 16, a varint
  longer.push_back(std::byte{0x01});
  longer.push_back(std::byte{99});
  const Result<Header> parsed = ParseHeader(longer);
  REQUIRE(parsed.ok());
  REQUIRE(*parsed == header);
}

TEST_CASE("nothing of a received header shows in the next one that is sent", "[wire][unit]") {
  const Header heartbeat;
  const HeaderBytes before = SerializeHeader(heartbeat);
  // As long as a header may be, and full of fields that nobody knows.
  const HeaderBytes known = SerializeHeader(LargestHeader(MessageKind::kPush));
  std::vector<std::byte> longest(known.view().begin(), known.view().end());
  while (longest.size() + 2 <= kMaxHeaderBytes) {
    longest.push_back(std::byte{15 << 3});
    longest.push_back(std::byte{1});
  }
  REQUIRE(ParseHeader(longest).ok());
  const HeaderBytes after = SerializeHeader(heartbeat);
  REQUIRE(AsText(after.view()) == AsText(before.view()));
  REQUIRE(SerializeHeader(LargestHeader(MessageKind::kPush)).view().size() == known.view().size());
}

TEST_CASE("headers allocate nothing in steady state", "[wire][unit]") {
  const Header push = LargestHeader(MessageKind::kPush);
  bool equal = true;
  const auto use = [&] {
    const HeaderBytes bytes = SerializeHeader(push);
    const Result<Header> parsed = ParseHeader(bytes.view());
    equal = equal && parsed.ok() && *parsed == push;
  };
  use();
  const std::uint64_t before = NumAllocations();
  for (int i = 0; i < 1000; ++i) use();
  REQUIRE(NumAllocations() == before);
  REQUIRE(equal);
}

TEST_CASE("headers may be made and read on many threads at once", "[wire][unit]") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([t, &wrong] {
      Header header;
      header.kind = MessageKind::kPush;
      for (std::uint64_t i = 0; i < 2000; ++i) {
        header.key = t;
        header.sequence = i;
        const Result<Header> parsed = ParseHeader(SerializeHeader(header).view());
        if (!parsed.ok() || !(*parsed == header)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(wrong == 0);
}

// ---- Control messages --------------------------------------------------------------------------

TEST_CASE("control messages come back as they were", "[wire][unit]") {
  const auto hello = ParseHello(Serialize(ExampleHello()));
  REQUIRE(hello.status().ToString() == "Ok");
  REQUIRE(*hello == ExampleHello());
  REQUIRE(*ParseHello(Serialize(Hello{})) == Hello{});

  const auto welcome = ParseWelcome(Serialize(ExampleWelcome()));
  REQUIRE(welcome.status().ToString() == "Ok");
  REQUIRE(*welcome == ExampleWelcome());

  const auto declare = ParseDeclare(Serialize(ExampleDeclare()));
  REQUIRE(declare.status().ToString() == "Ok");
  REQUIRE(*declare == ExampleDeclare());
  REQUIRE(*ParseDeclare(Serialize(Declare{})) == Declare{});

  const auto plan = ParsePlan(Serialize(ExamplePlan()));
  REQUIRE(plan.status().ToString() == "Ok");
  REQUIRE(*plan == ExamplePlan());
}

TEST_CASE("a plan of the largest model that is thought of passes", "[wire][unit]") {
  Plan plan;
  plan.num_workers = 2;
  plan.num_servers = 1;
  plan.lanes_per_server = 1;
  constexpr std::uint64_t kUnits = 100000;  // 2 MiB each: 50 billion parameters
  constexpr std::uint64_t kElements = 512 * 1024;
  plan.tensors = {{"huge", DType::kFloat32, {kUnits, kElements}, 0, ReduceOp::kAverage}};
  for (std::uint64_t key = 0; key < kUnits; ++key) {
    Unit unit;
    unit.key = key;
    unit.num_elements = kElements;
    unit.members = {{0, key * kElements, 0, kElements}};
    unit.phases = {Phase{}};
    plan.units.push_back(unit);
  }
  const auto parsed = ParsePlan(Serialize(plan));
  REQUIRE(parsed.status().ToString() == "Ok");
  REQUIRE(*parsed == plan);
}

template <typename Message>
struct BadMessage {
  std::function<void(Message&)> spoil;
  std::string message;
};

template <typename Message, typename Parse>
void CheckRefused(const std::vector<std::byte>& good, Parse parse,
                  const std::vector<BadMessage<Message>>& cases) {
  for (const BadMessage<Message>& bad : cases) {
    CAPTURE(bad.message);
    Message message = Parsed<Message>(good);
    REQUIRE(parse(Bytes(message)).ok());
    bad.spoil(message);
    const Status status = parse(Bytes(message)).status();
    REQUIRE(status.code() == StatusCode::kCorruptData);
    REQUIRE(status.message() == bad.message);
  }
}

const std::string kLong(kMaxNameBytes + 1, 'x');

TEST_CASE("a hello that breaks a rule is refused, with the field and both values", "[wire][unit]") {
  using M = v1::Hello;
  CheckRefused<M>(
      Serialize(ExampleHello()), ParseHello,
      {
          {[](M& m) { m.set_job_id(kLong); },
           "hello.job_id is 1025 bytes long, expected 0 to 1024"},
          {[](M& m) { m.set_role(0); }, "hello.role is 0, expected 1 to 2"},
          {[](M& m) { m.set_role(3); }, "hello.role is 3, expected 1 to 2"},
          {[](M& m) { m.set_role(1); }, "hello.lane_addresses has 2 entries, expected at most 0"},
          {[](M& m) { m.set_rank(65536); }, "hello.rank is 65536, expected less than 65536"},
          {[](M& m) { m.add_shared_config(); },
           "hello.shared_config[3].key is 0 bytes long, expected 1 to 1024"},
          {[](M& m) { m.mutable_shared_config(0)->set_key(kLong); },
           "hello.shared_config[0].key is 1025 bytes long, expected 1 to 1024"},
          {[](M& m) { m.mutable_shared_config(1)->set_value(std::string(65537, 'v')); },
           "hello.shared_config['job.seed'] is 65537 bytes long, expected 0 to 65536"},
          {[](M& m) {
             *m.add_shared_config() = m.shared_config(1);
             m.mutable_shared_config(3)->set_value("2");
           },
           "hello.shared_config['job.seed'] is given as '' and as '2'"},
          {[](M& m) {
             for (std::size_t i = 0; i < kMaxSettings; ++i) {
               m.add_shared_config()->set_key("key" + std::to_string(i));
             }
           },
           "hello.shared_config has 4099 entries, expected at most 4096"},
          {[](M& m) { m.add_lane_addresses(std::string()); },
           "hello.lane_addresses[2] is 0 bytes long, expected 1 to 1024"},
          {[](M& m) { m.set_lane_addresses(0, kLong); },
           "hello.lane_addresses[0] is 1025 bytes long, expected 1 to 1024"},
          {[](M& m) {
             for (std::uint32_t i = 0; i < kMaxLanes; ++i)
               m.add_lane_addresses(std::string(1, 'a'));
           },
           "hello.lane_addresses has 1026 entries, expected at most 1024"},
      });
}

TEST_CASE("a welcome that breaks a rule is refused, with the field and both values",
          "[wire][unit]") {
  using M = v1::Welcome;
  CheckRefused<M>(
      Serialize(ExampleWelcome()), ParseWelcome,
      {
          {[](M& m) { m.set_num_workers(0); }, "welcome.num_workers is 0, expected 1 to 65536"},
          {[](M& m) { m.set_num_workers(65537); },
           "welcome.num_workers is 65537, expected 1 to 65536"},
          {[](M& m) { m.set_num_servers(0); }, "welcome.num_servers is 0, expected 1 to 65536"},
          {[](M& m) { m.set_num_servers(3); },
           "welcome.servers has 2 entries, expected 0 or num_servers 3"},
          {[](M& m) { m.mutable_servers(1)->add_lanes(std::string()); },
           "welcome.servers[1].lanes[0] is 0 bytes long, expected 1 to 1024"},
          {[](M& m) { m.mutable_servers(0)->set_lanes(1, kLong); },
           "welcome.servers[0].lanes[1] is 1025 bytes long, expected 1 to 1024"},
          {[](M& m) {
             for (std::uint32_t i = 0; i <= kMaxLanes; ++i)
               m.mutable_servers(1)->add_lanes(std::string(1, 'a'));
           },
           "welcome.servers[1].lanes has 1025 entries, expected at most 1024"},
      });
}

TEST_CASE("a declaration that breaks a rule is refused, with the field and both values",
          "[wire][unit]") {
  using M = v1::Declare;
  const std::string too_large = " takes more than 4611686018427387904 bytes";
  CheckRefused<M>(
      Serialize(ExampleDeclare()), ParseDeclare,
      {
          {[](M& m) { m.mutable_tensors(1)->set_name(""); },
           "declare.tensors[1].name is 0 bytes long, expected 1 to 1024"},
          {[](M& m) { m.mutable_tensors(1)->set_name(kLong); },
           "declare.tensors[1].name is 1025 bytes long, expected 1 to 1024"},
          {[](M& m) { m.mutable_tensors(0)->set_dtype(0); },
           "declare.tensors[0].dtype: dtype number 0 names no dtype"},
          {[](M& m) { m.mutable_tensors(0)->set_dtype(257); },
           "declare.tensors[0].dtype: dtype number 257 names no dtype"},
          {[](M& m) { m.mutable_tensors(2)->set_op(0); },
           "declare.tensors[2].op is 0, expected 1 to 3"},
          {[](M& m) { m.mutable_tensors(2)->set_op(4); },
           "declare.tensors[2].op is 4, expected 1 to 3"},
          {[](M& m) {
             for (int i = 0; i < 61; ++i) m.mutable_tensors(0)->add_shape(1);
           },
           "declare.tensors[0].shape has 65 entries, expected at most 64"},
          // 2^33 * 2^33 wraps to 4, and times a zero the product would be 0.
          {[](M& m) {
             m.mutable_tensors(1)->add_shape(1ULL << 33);
             m.mutable_tensors(1)->add_shape(1ULL << 33);
           },
           "declare.tensors[1].shape [8589934592, 8589934592] of int64" + too_large},
          {[](M& m) {
             m.mutable_tensors(2)->clear_shape();
             for (const std::uint64_t extent : {1ULL << 60, 0ULL, 4ULL}) {
               m.mutable_tensors(2)->add_shape(extent);
             }
           },
           "declare.tensors[2].shape [1152921504606846976, 0, 4] of float16" + too_large},
          {[](M& m) { m.mutable_tensors(3)->set_shape(0, (1ULL << 62) + 1); },
           "declare.tensors[3].shape [4611686018427387905] of uint8" + too_large},
          {[](M& m) { m.mutable_tensors(3)->set_shape(0, kMax64); },
           "declare.tensors[3].shape [18446744073709551615] of uint8" + too_large},
      });
}

TEST_CASE("a plan that breaks a rule is refused, with the field and both values", "[wire][unit]") {
  using M = v1::Plan;
  const auto member = [](M& m, int unit, int i) -> v1::UnitMember& {
    return *m.mutable_units(unit)->mutable_members(i);
  };
  const auto phase = [](M& m, int unit, int i) -> v1::Phase& {
    return *m.mutable_units(unit)->mutable_phases(i);
  };
  const auto add_stage = [](M& m, std::uint64_t first_step,
                            std::uint32_t interval) -> v1::FilterStage& {
    v1::FilterStage& stage = *m.add_filter_stages();
    stage.set_first_step(first_step);
    stage.set_interval(interval);
    stage.set_every(1);
    return stage;
  };
  CheckRefused<M>(
      Serialize(ExamplePlan()), ParsePlan,
      {
          {[](M& m) { m.set_num_workers(0); }, "plan.num_workers is 0, expected 1 to 65536"},
          {[](M& m) { m.set_num_workers(65537); },
           "plan.num_workers is 65537, expected 1 to 65536"},
          {[](M& m) { m.set_num_servers(0); }, "plan.num_servers is 0, expected 1 to 65536"},
          {[](M& m) { m.set_lanes_per_server(0); },
           "plan.lanes_per_server is 0, expected 1 to 1024"},
          {[](M& m) { m.set_lanes_per_server(1025); },
           "plan.lanes_per_server is 1025, expected 1 to 1024"},
          {[](M& m) { m.mutable_tensors(0)->set_dtype(99); },
           "plan.tensors[0].dtype: dtype number 99 names no dtype"},
          {[](M& m) { m.mutable_tensors(3)->set_name("big"); },
           "plan.tensors[3].name 'big' is there twice"},
          {[](M& m) { m.mutable_units(1)->set_key(2); },
           "plan.units[1].key is 2, expected its index 1"},
          {[](M& m) { m.mutable_units(1)->set_key(kMax64); },
           "plan.units[1].key is 18446744073709551615, expected its index 1"},
          {[](M& m) { m.mutable_units(0)->set_dtype(0); },
           "plan.units[0].dtype: dtype number 0 names no dtype"},
          {[](M& m) { m.mutable_units(0)->set_op(4); }, "plan.units[0].op is 4, expected 1 to 3"},
          {[](M& m) { m.mutable_units(0)->set_server(2); },
           "plan.units[0].server is 2, expected less than 2"},
          {[](M& m) { m.mutable_units(0)->set_lane(3); },
           "plan.units[0].lane is 3, expected less than 3"},
          {[](M& m) { m.mutable_units(2)->set_num_elements(0); },
           "plan.units[2].num_elements is 0, expected 1 to 1152921504606846976"},
          {[](M& m) { m.mutable_units(2)->set_num_elements(kMax64); },
           "plan.units[2].num_elements is 18446744073709551615, expected 1 to "
           "1152921504606846976"},
          {[](M& m) { m.mutable_units(2)->set_num_elements(12); },
           "plan.units[2].members cover 11 elements, expected num_elements 12"},
          {[](M& m) { m.mutable_units(2)->set_num_elements(10); },
           "plan.units[2].members[1] ends at 11, expected at most num_elements 10"},
          {[](M& m) { m.mutable_units(2)->clear_members(); },
           "plan.units[2].members cover 0 elements, expected num_elements 11"},
          {[&](M& m) { member(m, 2, 1).set_tensor(5); },
           "plan.units[2].members[1].tensor is 5, expected less than 5"},
          {[&](M& m) { member(m, 2, 1).set_count(0); },
           "plan.units[2].members[1] is 0 elements from 0, expected a stretch of tensor 'small.b' "
           "of 1 elements"},
          {[&](M& m) { member(m, 2, 0).set_tensor(2); },
           "plan.units[2].members[0] is 10 elements from 0, expected a stretch of tensor 'none' of "
           "0 elements"},
          {[&](M& m) { member(m, 1, 0).set_tensor_offset(6001); },
           "plan.units[1].members[0] is 4000 elements from 6001, expected a stretch of tensor "
           "'big' of 10000 elements"},
          // Offset and count that wrap around together.
          {[&](M& m) { member(m, 1, 0).set_tensor_offset(kMax64 - 3999 + 1); },
           "plan.units[1].members[0] is 4000 elements from 18446744073709547617, expected a "
           "stretch of tensor 'big' of 10000 elements"},
          {[&](M& m) { member(m, 1, 0).set_count(kMax64); },
           "plan.units[1].members[0] is 18446744073709551615 elements from 6000, expected a "
           "stretch of tensor 'big' of 10000 elements"},
          {[&](M& m) { member(m, 2, 1).set_unit_offset(11); },
           "plan.units[2].members[1].unit_offset is 11, expected 10"},
          {[&](M& m) { member(m, 2, 1).set_unit_offset(9); },
           "plan.units[2].members[1].unit_offset is 9, expected 10"},
          {[](M& m) { m.mutable_units(3)->set_dtype(1); },
           "plan.units[3].members[0] is of dtype int32, expected float32"},
          {[](M& m) { m.mutable_units(3)->set_op(1); },
           "plan.units[3].members[0] is of op sum, expected average"},
          {[&](M& m) { member(m, 1, 0).set_tensor_offset(5999); },
           "plan.units[1] has tensor 'big' from element 5999, expected from 6000"},
          {[](M& m) { m.mutable_units()->RemoveLast(); },
           "plan.units cover 0 elements of tensor 'count', expected 5"},
          {[](M& m) { m.mutable_units(0)->clear_phases(); },
           "plan.units[0].phases' number is 0, expected 1 to 1024"},
          {[](M& m) {
             for (std::uint32_t i = 0; i < kMaxPhases; ++i) m.mutable_units(0)->add_phases();
           },
           "plan.units[0].phases' number is 1026, expected 1 to 1024"},
          {[&](M& m) { phase(m, 0, 0).set_first_step(1); },
           "plan.units[0].phases[0].first_step is 1, expected 0"},
          {[&](M& m) { phase(m, 0, 1).set_first_step(0); },
           "plan.units[0].phases[1].first_step is 0, expected more than 0"},
          {[&](M& m) { phase(m, 0, 0).set_uplink(""); },
           "plan.units[0].phases[0].uplink is 0 bytes long, expected 1 to 1024"},
          {[&](M& m) { phase(m, 0, 1).set_downlink(kLong); },
           "plan.units[0].phases[1].downlink is 1025 bytes long, expected 1 to 1024"},
          {[&](M& m) { phase(m, 0, 0).set_uplink_feedback(3); },
           "plan.units[0].phases[0].uplink_feedback is 3, expected 0 to 2"},
          {[&](M& m) { phase(m, 0, 1).set_downlink_feedback(4); },
           "plan.units[0].phases[1].downlink_feedback is 4, expected 0 to 2"},
          {[&](M& m) { add_stage(m, 1, 2); }, "plan.filter_stages[0].first_step is 1, expected 0"},
          {[&](M& m) {
             add_stage(m, 0, 2);
             add_stage(m, 0, 2);
           },
           "plan.filter_stages[1].first_step is 0, expected more than 0"},
          {[&](M& m) { add_stage(m, 0, 0); },
           "plan.filter_stages[0].interval is 0, expected 1 to 4096"},
          {[&](M& m) { add_stage(m, 0, 2).set_every(0); },
           "plan.filter_stages[0].every is 0, expected at least 1"},
          {[&](M& m) { add_stage(m, 0, 2).set_c0(std::nan("")); },
           "plan.filter_stages[0].c0 is nan, expected 0 to 1"},
          {[&](M& m) { add_stage(m, 0, 2).set_increment(-1); },
           "plan.filter_stages[0].increment is -1, expected 0 to 1"},
          {[&](M& m) {
             for (std::uint32_t i = 0; i <= kMaxFilterStages; ++i) add_stage(m, i, 2);
           },
           "plan.filter_stages has 1025 entries, expected at most 1024"},
          {[](M& m) { m.mutable_units(0)->add_filter_classes(0); },
           "plan.units[0].filter_classes has 1 entries, expected 0 or 0"},
          {[&](M& m) {
             add_stage(m, 0, 2);
             m.mutable_units(0)->add_filter_classes(2);
           },
           "plan.units[0].filter_classes[0] is 2, expected less than 2"},
          {[&](M& m) {
             add_stage(m, 0, 2);
             m.mutable_units(3)->add_filter_classes(1);
           },
           "plan.units[3] is a sum of int32 and has filter_classes, which it cannot"},
      });
}

TEST_CASE("a message that would take many times its size in memory is refused", "[wire][unit]") {
  // Empty entries, two bytes each.
  const auto repeated = [](std::uint8_t field, std::size_t count) {
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < count; ++i) {
      bytes.push_back(static_cast<std::byte>(field << 3 | 2));
      bytes.push_back(std::byte{0});
    }
    return bytes;
  };
  const std::string expected = " entries, expected at most 2097152";
  const std::vector<std::byte> many = repeated(6, kMaxControlItems + 1);
  REQUIRE(ParsePlan(many).status().message() == "plan has 2097153" + expected);
  REQUIRE(ParseHello(many).status().message() == "hello has 2097153" + expected);
  REQUIRE(ParseDeclare(repeated(2, kMaxControlItems + 1)).status().message() ==
          "declare has 2097153" + expected);
  // Nested: one unit with very many members.
  const std::vector<std::byte> members = repeated(8, kMaxControlItems);
  std::vector<std::byte> plan = {std::byte{6 << 3 | 2}};
  for (std::size_t size = members.size(); size > 0; size >>= 7) {
    plan.push_back(static_cast<std::byte>((size & 0x7f) | (size > 0x7f ? 0x80 : 0)));
  }
  plan.insert(plan.end(), members.begin(), members.end());
  REQUIRE(ParsePlan(plan).status().message() == "plan has 2097153" + expected);
  // Larger than any.
  const std::vector<std::byte> large(kMaxControlBytes + 1);
  REQUIRE(ParsePlan(large).status().message() ==
          "plan is 67108865 bytes, expected at most 67108864");
}

// ---- Damage ------------------------------------------------------------------------------------

/// Parses as everything, wants no crash and an error that names its code.
void ParseAsAll(ByteView bytes) {
  // A copy of exactly this size, for the address sanitizer to see reads beyond it.
  const std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const auto check = [](const Status& status) {
    if (!status.ok()) {
      REQUIRE(status.code() == StatusCode::kCorruptData);
      REQUIRE(!status.message().empty());
    }
  };
  check(ParseHeader(copy).status());
  check(ParseHello(copy).status());
  check(ParseWelcome(copy).status());
  check(ParseDeclare(copy).status());
  check(ParsePlan(copy).status());
}

std::vector<std::vector<std::byte>> Examples() {
  const HeaderBytes header = SerializeHeader(LargestHeader(MessageKind::kPush));
  return {{header.view().begin(), header.view().end()},
          Serialize(ExampleHello()),
          Serialize(ExampleWelcome()),
          Serialize(ExampleDeclare()),
          Serialize(ExamplePlan())};
}

TEST_CASE("every truncation is refused or parsed, never more", "[wire][fuzz]") {
  for (const std::vector<std::byte>& example : Examples()) {
    for (std::size_t size = 0; size <= example.size(); ++size) {
      ParseAsAll(ByteView(example).first(size));
    }
  }
}

TEST_CASE("flipped bits and random bytes never do harm", "[wire][fuzz]") {
  const std::uint64_t seed = TestSeed();
  CAPTURE(seed);
  CounterRng rng(seed);
  const auto examples = Examples();
  for (int i = 0; i < 4000; ++i) {
    std::vector<std::byte> bytes = examples[rng.NextBelow(examples.size())];
    const std::uint64_t flips = 1 + rng.NextBelow(4);
    for (std::uint64_t f = 0; f < flips; ++f) {
      bytes[rng.NextBelow(bytes.size())] ^= static_cast<std::byte>(1U << rng.NextBelow(8));
    }
    ParseAsAll(bytes);
  }
  for (int i = 0; i < 4000; ++i) {
    std::vector<std::byte> bytes(rng.NextBelow(200));
    for (std::byte& b : bytes) b = static_cast<std::byte>(rng.NextBelow(256));
    ParseAsAll(bytes);
  }
}

TEST_CASE("a plan that passes holds together, however it was damaged", "[wire][fuzz]") {
  const std::uint64_t seed = TestSeed();
  CAPTURE(seed);
  CounterRng rng(seed + 1);
  const std::vector<std::byte> good = Serialize(ExamplePlan());
  int passed = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes = good;
    bytes[rng.NextBelow(bytes.size())] = static_cast<std::byte>(rng.NextBelow(256));
    const Result<Plan> plan = ParsePlan(bytes);
    if (!plan.ok()) continue;
    ++passed;
    // What users of a plan rely on without looking.
    std::vector<std::uint64_t> covered(plan->tensors.size());
    for (std::size_t u = 0; u < plan->units.size(); ++u) {
      const Unit& unit = plan->units[u];
      REQUIRE(unit.key == u);
      REQUIRE(unit.server < plan->num_servers);
      REQUIRE(unit.lane < plan->lanes_per_server);
      std::uint64_t offset = 0;
      for (const UnitMember& member : unit.members) {
        REQUIRE(member.unit_offset == offset);
        offset += member.count;
        REQUIRE(member.tensor_offset + member.count <= plan->tensors[member.tensor].num_elements());
        covered[member.tensor] += member.count;
      }
      REQUIRE(offset == unit.num_elements);
      REQUIRE(unit.PhaseAt(kMax64) == unit.phases.size() - 1);
      REQUIRE(unit.PhaseAt(0) == 0);
    }
    for (std::size_t t = 0; t < covered.size(); ++t) {
      REQUIRE(covered[t] == plan->tensors[t].num_elements());
    }
  }
  REQUIRE(passed > 0);  // names and priorities may change
}

TEST_CASE("names of roles and operations are known", "[wire][unit]") {
  REQUIRE(RoleName(Role::kWorker) == "worker");
  REQUIRE(RoleName(Role::kServer) == "server");
  REQUIRE(RoleName(static_cast<Role>(9)) == "invalid");
  REQUIRE(ReduceOpName(ReduceOp::kBroadcast) == "broadcast");
  REQUIRE(ReduceOpName(static_cast<ReduceOp>(9)) == "invalid");
}

// ---- The ranks of a void round -----------------------------------------------------------------

std::vector<std::byte> NonfiniteBytes(const std::vector<std::uint32_t>& ranks) {
  std::vector<std::byte> bytes(4 * ranks.size());
  StoreNonfiniteRanks(ranks, bytes.data());
  return bytes;
}

TEST_CASE("the ranks of a void round survive the way, also none of them", "[wire]") {
  for (const std::vector<std::uint32_t>& ranks :
       {std::vector<std::uint32_t>{}, {0}, {3}, {0, 1, 2, 3}, {1, 3}}) {
    const auto parsed = ParseNonfiniteRanks(NonfiniteBytes(ranks), 4);
    REQUIRE(parsed.ok());
    REQUIRE(*parsed == ranks);
  }
  const std::vector<std::byte> bytes = NonfiniteBytes({0x01020304});
  REQUIRE(bytes == std::vector<std::byte>{std::byte{4}, std::byte{3}, std::byte{2}, std::byte{1}});
}

TEST_CASE("ranks of a void round that cannot be are refused by name", "[wire]") {
  const auto refused = [](const std::vector<std::byte>& bytes, const std::string& expected) {
    const Status status = ParseNonfiniteRanks(bytes, 4).status();
    INFO(status.ToString());
    REQUIRE(status.code() == StatusCode::kCorruptData);
    REQUIRE(status.message().find(expected) != std::string::npos);
  };
  refused(std::vector<std::byte>(3), "is 3 bytes, expected 4 for each of at most 4 ranks");
  refused(std::vector<std::byte>(20), "is 20 bytes, expected 4 for each of at most 4 ranks");
  refused(NonfiniteBytes({4}), "has rank 4 at position 0, expected 0 to 3");
  refused(NonfiniteBytes({1, 1}), "has rank 1 at position 1, expected 2 to 3");
  refused(NonfiniteBytes({2, 1}), "has rank 1 at position 1, expected 3 to 3");
  refused(NonfiniteBytes({0, 0xffffffff}), "has rank 4294967295 at position 1, expected 1 to 3");
}

TEST_CASE("the ranks of a void round are told in a line of bounded length", "[wire]") {
  REQUIRE(DescribeNonfiniteRanks({}) == "none (the sum overflows)");
  REQUIRE(DescribeNonfiniteRanks(std::vector<std::uint32_t>{3}) == "3");
  REQUIRE(DescribeNonfiniteRanks(std::vector<std::uint32_t>{0, 7}) == "0, 7");
  std::vector<std::uint32_t> many(1000);
  for (std::uint32_t i = 0; i < 1000; ++i) many[i] = i;
  REQUIRE(DescribeNonfiniteRanks(many) ==
          "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 984 more");
}

}  // namespace
}  // namespace gradwire
