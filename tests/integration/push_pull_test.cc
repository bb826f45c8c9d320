// What push-pull returns: exact sums and averages, every dtype, fused and cut tensors, broadcast.

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/base/random.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

std::uint16_t HalfBits(float value) {
  std::array<std::byte, 2> bytes{};
  const auto codec = BuiltinCompressors().Create("fp16");
  REQUIRE(codec.ok());
  REQUIRE(EncodeSpan(**codec, std::span(&value, 1), {}, bytes).ok());
  return LoadLe<std::uint16_t>(bytes.data());
}

// Every worker pushes inputs[rank] of one tensor; returns what rank 0 got and checks that the
// others got the same bytes.
template <typename T>
std::vector<T> PushPullOnce(Config config, TransportKind kind, const TensorDeclaration& tensor,
                            const std::vector<std::vector<T>>& inputs) {
  config.job.workers = static_cast<std::uint32_t>(inputs.size());
  Cluster cluster(config, kind);
  std::vector<std::vector<T>> outputs(inputs.size(), std::vector<T>(inputs[0].size()));
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::span(&tensor, 1));
    if (!failures.Ok(ids.status(), "declare")) return;
    failures.Ok(PushPull(client, ids.value()[0], InputOf(inputs[client.rank()]),
                         OutputOf(outputs[client.rank()])),
                "push-pull");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
  for (const auto& output : outputs) {
    REQUIRE(std::memcmp(output.data(), outputs[0].data(), output.size() * sizeof(T)) == 0);
  }
  return outputs[0];
}

TEST_CASE("sum and average of small integers in fp32 are exact", "[integration][exact]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const auto op = GENERATE(ReduceOp::kAverage, ReduceOp::kSum);
  const std::uint32_t workers = GENERATE(1U, 2U, 4U);
  CAPTURE(ToString(kind), workers);
  const std::size_t n = 40001;  // three units, the last one odd
  std::vector<std::vector<float>> inputs(workers, std::vector<float>(n));
  std::vector<float> expected(n, 0.0F);
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    for (std::size_t i = 0; i < n; ++i) {
      inputs[rank][i] = static_cast<float>(static_cast<int>((i * 7 + rank * 13) % 1001) - 500);
      expected[i] += inputs[rank][i];
    }
  }
  if (op == ReduceOp::kAverage) {
    for (float& value : expected) value /= static_cast<float>(workers);
  }
  const auto output =
      PushPullOnce(TestConfig(workers), kind, Tensor("w", n, DType::kFloat32, op), inputs);
  REQUIRE(output == expected);
}

TEST_CASE("fp16 is summed in fp32: no overflow, no lost subnormal, one rounding",
          "[integration][exact]") {
  // As the tensor's own dtype, and as the compressor of an fp32 tensor.
  struct Case {
    ReduceOp op;
    std::vector<float> values;
    float expected;
  };
  const float smallest = std::ldexp(1.0F, -24);
  const std::vector<Case> cases = {
      {ReduceOp::kAverage, {40000, 40000, 40000, 40000}, 40000},
      {ReduceOp::kAverage, {smallest, smallest, smallest, smallest}, smallest},
      {ReduceOp::kSum, {2048, 1, 1, 1}, 2052},  // 2051 is halfway between 2050 and 2052: to even
  };
  for (const Case& test : cases) {
    CAPTURE(test.expected);
    std::vector<std::vector<std::uint16_t>> halves;
    std::vector<std::vector<float>> floats;
    for (const float value : test.values) {
      halves.push_back(std::vector<std::uint16_t>(100, HalfBits(value)));
      floats.push_back(std::vector<float>(100, value));
    }
    const auto from_halves = PushPullOnce(TestConfig(4), TransportKind::kInproc,
                                          Tensor("h", 100, DType::kFloat16, test.op), halves);
    REQUIRE(from_halves == std::vector<std::uint16_t>(100, HalfBits(test.expected)));
    Config config = TestConfig(4);
    SetCompressor(config, "fp16");
    const auto from_floats = PushPullOnce(config, TransportKind::kInproc,
                                          Tensor("f", 100, DType::kFloat32, test.op), floats);
    REQUIRE(from_floats == std::vector<float>(100, test.expected));
  }
}

TEST_CASE("integers are summed exactly and their average floors", "[integration][exact]") {
  const std::int64_t big = std::int64_t{1} << 40;
  const auto sum = PushPullOnce<std::int64_t>(TestConfig(2), TransportKind::kInproc,
                                              Tensor("c", 3, DType::kInt64, ReduceOp::kSum),
                                              {{big, -7, 1}, {big + 1, 4, 1}});
  REQUIRE(sum == std::vector<std::int64_t>{2 * big + 1, -3, 2});
  const auto mean = PushPullOnce<std::int32_t>(TestConfig(2), TransportKind::kInproc,
                                               Tensor("c", 3, DType::kInt32, ReduceOp::kAverage),
                                               {{3, -3, std::numeric_limits<std::int32_t>::max()},
                                                {4, -4, std::numeric_limits<std::int32_t>::max()}});
  REQUIRE(mean == std::vector<std::int32_t>{3, -4, std::numeric_limits<std::int32_t>::max()});
}

TEST_CASE("an integer sum that does not fit its dtype is refused by name",
          "[integration][errors]") {
  Cluster cluster(TestConfig(2), TransportKind::kInproc);
  std::array<Status, 2> outcomes;
  Failures failures;
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank);
      if (!failures.Ok(client.status(), "connect")) return;
      const TensorDeclaration tensor = Tensor("counter", 2, DType::kInt8, ReduceOp::kSum);
      const auto ids = (*client)->Declare(std::span(&tensor, 1));
      if (!failures.Ok(ids.status(), "declare")) return;
      std::vector<std::int8_t> values = {1, 100};
      outcomes[rank] = PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values));
    });
  }
  for (std::thread& worker : workers) worker.join();
  REQUIRE(failures.Take().empty());
  for (const Status& status : outcomes) {
    INFO(status.ToString());
    REQUIRE(status.code() == StatusCode::kInvalidArgument);
    REQUIRE(status.message().find("'counter'") != std::string::npos);
    REQUIRE(status.message().find("element 1") != std::string::npos);
    REQUIRE(status.message().find("int8") != std::string::npos);
  }
}

TEST_CASE("fp64 keeps its precision under none and is converted under a compressor",
          "[integration][exact]") {
  const double fine = 1.0 + std::ldexp(1.0, -50);
  const auto exact = PushPullOnce<double>(TestConfig(2), TransportKind::kInproc,
                                          Tensor("d", 2, DType::kFloat64), {{fine, 4}, {fine, 2}});
  REQUIRE(exact == std::vector<double>{fine, 3});
  Config config = TestConfig(2);
  SetCompressor(config, "bf16");
  const auto coarse = PushPullOnce<double>(config, TransportKind::kInproc,
                                           Tensor("d", 2, DType::kFloat64), {{1.5, 4}, {2.5, 2}});
  REQUIRE(coarse == std::vector<double>{2, 3});
}

TEST_CASE("small tensors are fused, and a member without a gradient counts as zeros",
          "[integration][fusion]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::string spec = GENERATE("none", "fp16");
  CAPTURE(ToString(kind), spec);
  Config config = TestConfig(2);
  SetCompressor(config, spec);
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    const std::vector<TensorDeclaration> batch = {Tensor("a", 10), Tensor("b", 7), Tensor("c", 0),
                                                  Tensor("d", 30)};
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    failures.Expect(client.plan()->units.size() == 1, "a, b and d are one unit");
    const auto rank = static_cast<float>(client.rank());
    for (int step = 0; step < 4; ++step) {
      std::vector<float> a(10, 1 + rank);
      std::vector<float> b(7, 3);
      std::vector<float> c;
      std::vector<float> d(30, 8);
      // In odd steps rank 1 has no gradient for d, in step 2 nobody has.
      const bool has_d = step == 2 ? false : (step % 2 == 0 || client.rank() == 0);
      std::vector<Handle> handles;
      const auto push = [&](std::size_t tensor, std::vector<float>& values) {
        const auto handle =
            client.PushPullAsync(ids.value()[tensor], InputOf(values), OutputOf(values));
        if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
      };
      if (has_d) push(3, d);
      push(2, c);
      push(0, a);
      push(1, b);
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
      failures.Expect(a == std::vector<float>(10, 1.5), "average of a");
      failures.Expect(b == std::vector<float>(7, 3), "average of b");
      const float expected = step % 2 == 1 ? 4.0F : 8.0F;
      if (has_d) {
        failures.Expect(d == std::vector<float>(30, expected), fmt::format("d in step {}", step));
      }
    }
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("a fast worker's next step waits for the unit that is still under way",
          "[integration][fusion]") {
  // EndStep without Wait: the next step's gradients are handed over while the round is open.
  Cluster cluster(TestConfig(2), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const std::vector<TensorDeclaration> batch = {Tensor("a", 4), Tensor("b", 4)};
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    for (int step = 0; step < 20; ++step) {
      std::vector<float> a(4, static_cast<float>(step));
      std::vector<float> b(4, static_cast<float>(2 * step));
      const auto first = client.PushPullAsync(ids.value()[0], InputOf(a), OutputOf(a));
      failures.Ok(first.status(), "push a");
      failures.Ok(client.EndStep(), "end of step");  // b counts as zeros
      const auto second = client.PushPullAsync(ids.value()[1], InputOf(b), OutputOf(b));
      failures.Ok(second.status(), "push b");
      failures.Ok(client.EndStep(), "end of step");  // a counts as zeros
      failures.Ok(client.Wait(*first), "wait a");
      failures.Ok(client.Wait(*second), "wait b");
      failures.Expect(a == std::vector<float>(4, static_cast<float>(step)), "a");
      failures.Expect(b == std::vector<float>(4, static_cast<float>(2 * step)), "b");
    }
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("broadcast is exact whatever the compression", "[integration][broadcast]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  Config config = TestConfig(3, 2);
  SetCompressor(config, "onebit");
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    for (std::uint32_t root = 0; root < 3; ++root) {
      std::vector<std::uint8_t> data(200001);
      CounterRng rng(root);
      if (client.rank() == root) {
        for (auto& byte : data) byte = static_cast<std::uint8_t>(rng.Next());
      }
      failures.Ok(client.Broadcast("state", OutputOf(data), root), "broadcast");
      CounterRng again(root);
      for (const auto byte : data) {
        if (!failures.Expect(byte == static_cast<std::uint8_t>(again.Next()), "byte")) break;
      }
    }
    std::vector<std::uint8_t> nothing;
    failures.Ok(client.Broadcast("nothing", OutputOf(nothing), 0), "empty broadcast");
    failures.Ok(client.Barrier(), "barrier");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
  for (const Status& status : cluster.JoinServers()) REQUIRE(status.ok());
}

TEST_CASE("tensors declared later join the plan and leave the others alone",
          "[integration][plan]") {
  Cluster cluster(TestConfig(2, 2), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    std::vector<TensorId> ids;
    for (int i = 0; i < 5; ++i) {
      const TensorDeclaration tensor = Tensor(fmt::format("t{}", i), 20000);
      const auto declared = client.Declare(std::span(&tensor, 1));
      if (!failures.Ok(declared.status(), "declare")) return;
      ids.push_back(declared.value()[0]);
      for (std::size_t t = 0; t < ids.size(); ++t) {
        std::vector<float> values(20000, static_cast<float>(t + client.rank()));
        failures.Ok(PushPull(client, ids[t], InputOf(values), OutputOf(values)), "push-pull");
        failures.Expect(values == std::vector<float>(20000, static_cast<float>(t) + 0.5F), "value");
      }
    }
    failures.Expect(client.plan()->version == 5, "five plans");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("what a caller gets wrong is named and harms nobody", "[integration][errors]") {
  Cluster cluster(TestConfig(1), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const TensorDeclaration tensor = Tensor("weight", 20000);
    const auto ids = client.Declare(std::span(&tensor, 1));
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<float> small(10);
    std::vector<float> values(20000, 1.0F);
    const auto wrong_size = client.PushPullAsync(ids.value()[0], InputOf(small), OutputOf(values));
    failures.Expect(
        wrong_size.status().message().find("'weight': input is 40 bytes and output "
                                           "80000, expected 80000") != std::string::npos,
        wrong_size.status().message());
    std::vector<std::byte> odd(80001);
    const auto misaligned =
        client.PushPullAsync(ids.value()[0], ByteView(odd).subspan(1), OutputOf(values));
    failures.Expect(misaligned.status().message().find("aligned") != std::string::npos,
                    misaligned.status().message());
    const auto unknown = client.PushPullAsync({17}, InputOf(values), OutputOf(values));
    failures.Expect(unknown.status().message().find("tensor id 17") != std::string::npos,
                    unknown.status().message());
    failures.Ok(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)), "right one");
    failures.Expect(values == std::vector<float>(20000, 1.0F), "value");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("a tensor that is in flight cannot be pushed again", "[integration][errors]") {
  Cluster cluster(TestConfig(2), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const TensorDeclaration tensor = Tensor("weight", 20000);
    const auto ids = client.Declare(std::span(&tensor, 1));
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<float> values(20000, 1.0F);
    std::vector<float> other(20000, 1.0F);
    if (client.rank() == 0) {
      // Rank 1 pushes after the barrier, so this one is surely in flight.
      const auto handle = client.PushPullAsync(ids.value()[0], InputOf(values), OutputOf(values));
      failures.Ok(handle.status(), "first push");
      const auto again = client.PushPullAsync(ids.value()[0], InputOf(other), OutputOf(other));
      failures.Expect(again.status().message().find("'weight' on rank 0 is already in flight") !=
                          std::string::npos,
                      again.status().message());
      failures.Expect(!client.Poll(*handle), "not done yet");
      failures.Ok(client.Barrier(), "barrier");
      failures.Ok(client.Wait(*handle), "wait");
      failures.Expect(client.Poll(*handle), "done");
    } else {
      failures.Ok(client.Barrier(), "barrier");
      failures.Ok(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)), "push-pull");
    }
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("workers that declare different tensors are told so, all of them",
          "[integration][errors]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  CAPTURE(ToString(kind));
  struct Case {
    std::vector<TensorDeclaration> mine;
    std::vector<TensorDeclaration> theirs;
    std::vector<std::string> expected;  // apart: the rank that came first is named first
  };
  const TensorDeclaration w = Tensor("w", 30);
  const TensorDeclaration b = Tensor("b", 4);
  TensorDeclaration urgent = w;
  urgent.priority = 5;
  const std::vector<Case> cases = {
      {{w}, {Tensor("w", 40)}, {"('w')", "shape is ", "[30] on rank 0", "[40] on rank 1"}},
      {{w},
       {Tensor("w", 30, DType::kFloat16)},
       {"('w')", "dtype is ", "float32 on rank 0", "float16 on rank 1"}},
      {{w},
       {Tensor("w", 30, DType::kFloat32, ReduceOp::kSum)},
       {"('w')", "operation is ", "average on rank 0", "sum on rank 1"}},
      {{w}, {urgent}, {"('w')", "priority is ", "0 on rank 0", "5 on rank 1"}},
      {{w}, {Tensor("v", 30)}, {"position 0", "name is ", "'w' on rank 0", "'v' on rank 1"}},
      {{w, b},
       {b, w},
       {"position 0", "'w' on rank 0", "'b' on rank 1", "both declare both, in another order"}},
      {{w, b}, {w}, {"2 on rank 0", "1 on rank 1", "only rank 0 has 'b'"}},
  };
  for (const Case& test : cases) {
    Cluster cluster(TestConfig(2), kind);
    std::array<Status, 2> outcomes;
    std::vector<std::thread> workers;
    Failures failures;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      workers.emplace_back([&, rank] {
        auto client = cluster.ConnectWorker(rank);
        if (!failures.Ok(client.status(), "connect")) return;
        outcomes[rank] = (*client)->Declare(rank == 0 ? test.mine : test.theirs).status();
      });
    }
    for (std::thread& worker : workers) worker.join();
    REQUIRE(failures.Take().empty());
    const std::vector<Status> servers = cluster.JoinServers();
    for (const Status& status : {outcomes[0], outcomes[1], servers[0]}) {
      REQUIRE(status.code() == StatusCode::kInvalidArgument);
      for (const std::string& text : test.expected) {
        INFO(status.ToString() << "\nlacks " << text);
        REQUIRE(status.message().find(text) != std::string::npos);
      }
    }
  }
}

TEST_CASE("configurations that differ are refused, naming key and both values",
          "[integration][errors]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  CAPTURE(ToString(kind));
  struct Case {
    std::string assignment;  // of rank 1
    std::string key;
    std::string theirs;
    std::string roots;
  };
  const std::vector<Case> cases = {
      {"compression.min_bytes=12345", "compression.min_bytes", "12345", "0"},
      {"partition.bytes=128KiB", "partition.bytes", "128", "64"},
      {"job.seed=77", "job.seed", "77", "1"},
      {"compression.uplink.compressor=onebit", "compression.uplink", "onebit", "none"},
      {"compression.rules=[{match: '*.bias', compressor: none}]", "compression.rules", ".bias",
       "[]"},
  };
  for (const Case& test : cases) {
    CAPTURE(test.assignment);
    Cluster cluster(TestConfig(2), kind);
    Config other = cluster.config();
    REQUIRE(ApplyAssignment(test.assignment, other).ok());
    std::array<Status, 2> outcomes;
    std::thread first([&] { outcomes[0] = cluster.ConnectWorker(0).status(); });
    std::thread second([&] { outcomes[1] = cluster.ConnectWorker(1, other).status(); });
    first.join();
    second.join();
    const std::vector<Status> servers = cluster.JoinServers();
    for (const Status& status : {outcomes[0], outcomes[1], servers[0]}) {
      INFO(status.ToString());
      REQUIRE(status.code() == StatusCode::kInvalidArgument);
      const std::string& text = status.message();
      const std::size_t key = text.find("configurations differ: " + test.key);
      const std::size_t theirs = text.find(test.theirs, key);
      const std::size_t who = text.find(" on worker 1", theirs);
      REQUIRE(key != std::string::npos);
      REQUIRE(theirs != std::string::npos);
      REQUIRE(who != std::string::npos);
      REQUIRE(text.find(test.roots, who) != std::string::npos);
      REQUIRE(text.find(" on the root", who) != std::string::npos);
    }
  }
}

TEST_CASE("a worker of another job is refused by both ids and the job goes on",
          "[integration][errors]") {
  Cluster cluster(TestConfig(1), TransportKind::kZmq);
  Config other = cluster.config();
  other.job.id = "somebody-elses";
  const auto stranger = cluster.ConnectWorker(0, other);
  REQUIRE(!stranger.ok());
  REQUIRE(stranger.status().message().find("'somebody-elses'") != std::string::npos);
  REQUIRE(stranger.status().message().find("'test'") != std::string::npos);
  cluster.Run([&](Client&) {});
}

}  // namespace
}  // namespace gradwire::testing
