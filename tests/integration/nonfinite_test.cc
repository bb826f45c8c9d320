// Void rounds: every worker learns which push-pull has no result, and by whose fault.

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <optional>
#include <thread>

#include "common/base/buffer_pool.h"
#include "common/plan/plan.h"
#include "common/wire/control.h"
#include "common/wire/nonfinite.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

using Ranks = std::vector<std::uint32_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kHuge = 3e38F;
constexpr std::size_t kLarge = 40000;  // three units of 64 KiB

TensorDeclaration SumOf(const std::string& name, std::size_t elements) {
  return Tensor(name, elements, DType::kFloat32, ReduceOp::kSum);
}

// One push-pull of every tensor, all in one step; `change` makes a rank's values bad.
std::vector<Handle> Round(Client& client, const std::vector<TensorId>& ids,
                          std::vector<std::vector<float>>& values, Failures& failures,
                          const std::function<void(std::vector<std::vector<float>>&)>& change) {
  for (auto& each : values) std::fill(each.begin(), each.end(), 1.0F);
  change(values);
  return PushAll(client, ids, values, failures);
}

TEST_CASE("every worker learns which push-pull was void and which ranks made it so",
          "[integration][nonfinite]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  // With a mark from the worker's encoder; found by the server in what nobody has looked at.
  const std::string spec = GENERATE("onebit", "fp16", "none");
  CAPTURE(ToString(kind), spec);
  Config config = TestConfig(3);
  SetCompressor(config, spec);
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    const std::uint32_t rank = client.rank();
    const auto ids = client.Declare(
        std::vector{SumOf("large", kLarge), SumOf("other", 5000), SumOf("a", 10), SumOf("b", 10)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values = {std::vector<float>(kLarge), std::vector<float>(5000),
                                              std::vector<float>(10), std::vector<float>(10)};
    const auto expect = [&](const Handle& handle, const std::optional<Ranks>& expected,
                            const std::string& what) {
      failures.Expect(client.NonfiniteRanks(handle) == expected,
                      fmt::format("{} on rank {}", what, rank));
    };

    auto handles = Round(client, *ids, values, failures, [](auto&) {});
    for (const Handle& handle : handles) expect(handle, std::nullopt, "a finite round");

    // Rank 2 in the first unit of `large`, rank 0 in its last one: together they are one tensor's.
    const auto first = handles;
    handles = Round(client, *ids, values, failures, [&](auto& v) {
      if (rank == 2) v[0][5] = kNan;
      if (rank == 0) v[0][kLarge - 1] = -kInf;
    });
    expect(handles[0], Ranks{0, 2}, "large");
    expect(handles[1], std::nullopt, "other");
    expect(handles[2], std::nullopt, "a");
    expect(first[0], std::nullopt, "a handle of a tensor that was pushed again");
    failures.Expect(std::isnan(values[0][0]) && std::isnan(values[0][kLarge - 1]) &&
                        std::isfinite(values[0][kLarge / 2]),
                    "the units that were not finite are NaN, and no others");

    // What is fused has one fate.
    handles = Round(client, *ids, values, failures, [&](auto& v) {
      if (rank == 1) v[3][0] = kInf;
    });
    expect(handles[0], std::nullopt, "large, finite again");
    expect(handles[2], Ranks{1}, "a, by b's fault");
    expect(handles[3], Ranks{1}, "b");

    failures.Expect(client.stats().nonfinite_units == 3, "void units are counted");
    expect(Handle{{99}, 1}, std::nullopt, "a handle of no tensor");
  });
  REQUIRE(failures.Take().empty());
}

TEST_CASE("where only the sum is not finite, it is void by nobody's fault",
          "[integration][nonfinite]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::string uplink = GENERATE("none", "onebit");
  CAPTURE(ToString(kind), uplink);
  Config config = TestConfig(2);
  SetCompressor(config, "onebit");
  config.compression.uplink.compressor = *ParseCompressorSpec(uplink);
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::vector{SumOf("w", 5000)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(1, std::vector<float>(5000));
    const auto handles = Round(client, *ids, values, failures,
                               [](auto& v) { std::fill(v[0].begin(), v[0].end(), kHuge); });
    failures.Expect(client.NonfiniteRanks(handles[0]) == Ranks{}, "void without ranks");
    failures.Expect(std::isnan(values[0][0]), "NaN");
  });
  REQUIRE(failures.Take().empty());
}

TEST_CASE("a void round leaves the residual of a method's momenta as it was",
          "[integration][nonfinite]") {
  const std::string spec = GENERATE("onebit", "topk(ratio=0.1)");
  const std::string method = GENERATE("none", "onebit_adam");
  CAPTURE(spec, method);
  constexpr std::size_t kElements = 20000;  // two units
  Config config = TestConfig(2);
  SetCompressor(config, spec);
  config.compression.warmup_steps = 1;
  config.method.name = method;
  Cluster cluster(config, TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::vector{Tensor("w", kElements)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(1, std::vector<float>(kElements));
    const auto sent = [&](std::size_t i) {
      return 0.25F + static_cast<float>((i * 7 + client.rank()) % 11);
    };
    std::vector<float> before;
    for (const bool is_void : {false, false, true}) {
      before = client.ReadResidual((*ids)[0]);
      for (std::size_t i = 0; i < kElements; ++i) values[0][i] = sent(i);
      if (is_void && client.rank() == 1) values[0][3] = kNan;
      if (is_void) values[0][kElements - 1] = kInf;
      PushAll(client, *ids, values, failures);
      failures.Expect(std::isnan(values[0][0]) == is_void, "which rounds are void");
    }
    const std::vector<float> after = client.ReadResidual((*ids)[0]);
    double left_over = 0;
    for (std::size_t i = 0; i < kElements; ++i) {
      left_over = std::max(left_over, std::abs(static_cast<double>(before[i])));
      const bool is_lost = method != "none" || i == kElements - 1 || (client.rank() == 1 && i == 3);
      const float expected = before[i] + (is_lost ? 0.0F : sent(i));
      // Values are at most 22: a rounding each way is 2e-6 at most.
      if (!failures.Expect(std::abs(after[i] - expected) < 1e-5F,
                           fmt::format("rank {}, element {}: {}, expected {}", client.rank(), i,
                                       after[i], expected))) {
        return;
      }
    }
    failures.Expect(left_over > 0.1, "the round before leaves something over");
  });
  REQUIRE(failures.Take().empty());
}

// A root of one worker that answers the first push as it is told.
class ScriptedRoot final : public LoopHandler {
 public:
  ScriptedRoot(InprocNetwork& network, std::vector<std::byte> answer)
      : loop_(network.MakeLoop()), answer_(std::move(answer)) {
    REQUIRE(loop_->Listen("inproc://s0l0").ok());
    REQUIRE(loop_->Start(this, "scripted-root").ok());
  }
  ~ScriptedRoot() override { loop_->Stop(); }

 private:
  void Send(PeerId to, Header header, MessageKind kind, const std::vector<std::byte>& body) {
    header.kind = kind;
    header.incarnation = 1;
    header.sequence = 0;
    header.rank = 0;
    Payload payload;
    if (!body.empty()) {
      const PooledBuffer buffer = pool_.Acquire(body.size());
      std::memcpy(buffer.bytes().data(), body.data(), body.size());
      payload = buffer.Share(body.size());
    }
    (void)loop_->Send(to, header, std::move(payload));
  }

  void OnMessage(PeerId from, const Header& header, Payload payload) override {
    Header answer;
    switch (header.kind) {
      case MessageKind::kHello: {
        Welcome welcome;
        welcome.num_workers = 1;
        welcome.num_servers = 1;
        welcome.addresses = {{"inproc://s0l0"}};
        Send(from, answer, MessageKind::kWelcome, Serialize(welcome));
        return;
      }
      case MessageKind::kDeclare: {
        const auto declare = ParseDeclare(payload.bytes);
        const PlanOptions options;
        const auto plan =
            ExtendPlan(EmptyPlan(options), declare->tensors, options, BuiltinCompressors());
        answer.round = 1;  // batches that it covers
        Send(from, answer, MessageKind::kPlan, Serialize(*plan));
        return;
      }
      case MessageKind::kPush:
        answer = header;
        answer.nonfinite = false;
        answer.reply = ReplyKind::kNonfinite;
        Send(from, answer, MessageKind::kReply, answer_);
        return;
      default:
        return;
    }
  }

  const std::unique_ptr<Loop> loop_;
  const std::vector<std::byte> answer_;
  BufferPool pool_;
};

TEST_CASE("a damaged reply of a void round ends the job by name", "[integration][nonfinite]") {
  struct Case {
    std::vector<std::uint8_t> reply;
    DType dtype;
    std::string expected;
  };
  const auto each = GENERATE(values<Case>({
      {{1, 0, 0}, DType::kFloat32, "reply of a void round is 3 bytes, expected 4 for each of"},
      {{0, 0, 0, 0, 1, 0, 0, 0}, DType::kFloat32, "is 8 bytes, expected 4 for each of at most 1"},
      {{1, 0, 0, 0}, DType::kFloat32, "has rank 1 at position 0, expected 0 to 0"},
      {{0, 0, 0, 0}, DType::kInt32, "is not finite, which average of int32 cannot be"},
  }));
  const auto network = MakeInprocNetwork();
  const ByteView bytes = std::as_bytes(std::span(each.reply));
  ScriptedRoot root(*network, {bytes.begin(), bytes.end()});
  Config config = TestConfig(1);
  config.endpoint = "inproc://s0l0";
  auto client = Client::Connect(config, 0, network->MakeLoop());
  INFO(client.status().ToString());
  REQUIRE(client.ok());
  const auto ids = (*client)->Declare(std::vector{Tensor("weight", 20000, each.dtype)});
  INFO(ids.status().ToString());
  REQUIRE(ids.ok());
  std::vector<float> values(20000, 1.0F);
  const Status status = PushPull(**client, (*ids)[0], InputOf(values), OutputOf(values));
  INFO(status.ToString());
  REQUIRE(status.code() == StatusCode::kCorruptData);
  REQUIRE(status.message().find("tensor 'weight' (key 0), round 0: ") != std::string::npos);
  REQUIRE(status.message().find(each.expected) != std::string::npos);
}

}  // namespace
}  // namespace gradwire::testing
