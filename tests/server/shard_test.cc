// A shard alone: rounds, duplicates, questions after a cut, and what it refuses. Reductions run on
// plain std::threads, which ThreadSanitizer sees whole.

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "common/plan/plan.h"
#include "server/shard.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

// Runs each task on a thread of its own.
class ThreadExecutor final : public Executor {
 public:
  ~ThreadExecutor() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Post(Task task) override { threads_.emplace_back(std::move(task)); }
  int concurrency() const override { return 4; }

 private:
  std::vector<std::thread> threads_;
};

struct Said {
  std::uint32_t rank = 0;
  Header header;
  std::vector<std::byte> payload;
};

class Recorder final : public ShardOutput {
 public:
  void Reply(std::uint32_t rank, const Header& header, const Payload& payload) override {
    said.push_back({rank, header, {payload.bytes.begin(), payload.bytes.end()}});
  }
  void Fail(Status status) override { failures.push_back(std::move(status)); }

  std::vector<Said> said;
  std::vector<Status> failures;
};

// The shard of a job with three workers and one tensor of two units; the test is the lane's thread.
class Fixture {
 public:
  explicit Fixture(const std::string& compressor, std::uint64_t warmup_steps = 0)
      : Fixture(compressor, compressor, warmup_steps) {}

  Fixture(const std::string& uplink, const std::string& downlink, std::uint64_t warmup_steps,
          DType dtype = DType::kFloat32, std::uint32_t interval = 0)
      : codecs_(BuiltinCompressors()),
        shard_(
            {0, 0, kWorkers, 1}, codecs_, residuals_, executor_, pool_,
            [this](std::function<void()> task) { Post(std::move(task)); }, output) {
    PlanOptions& options = options_;
    options.num_workers = kWorkers;
    options.partition_bytes = kBlockElements * sizeof(float);
    options.compression.min_bytes = 0;
    options.compression.warmup_steps = warmup_steps;
    options.compression.uplink.compressor.name = uplink;
    options.compression.downlink.compressor.name = downlink;
    if (interval > 0) {
      options.compression.filter.type = FilterType::kCovap;
      options.compression.filter.interval = interval;
    }
    TensorDeclaration tensor;
    tensor.name = "weight";
    tensor.dtype = dtype;
    tensor.shape = {2 * kBlockElements};
    options.fuse_below = 1;
    auto plan =
        ExtendPlan(EmptyPlan(options), std::span(&tensor, 1), options, BuiltinCompressors());
    REQUIRE(plan.ok());
    plan_ = std::make_shared<const Plan>(std::move(plan).value());
    REQUIRE(plan_->units.size() == 2);
    REQUIRE(shard_.InstallPlan(plan_).ok());
  }

  void ChangeInterval(std::uint32_t interval, std::uint64_t first_step) {
    auto plan =
        gradwire::ChangeInterval(*plan_, interval, first_step, options_, BuiltinCompressors());
    REQUIRE(plan.ok());
    plan_ = std::make_shared<const Plan>(std::move(plan).value());
    REQUIRE(shard_.InstallPlan(plan_).ok());
  }

  Header PushHeader(std::uint64_t key, std::uint64_t round) const {
    Header header;
    header.kind = MessageKind::kPush;
    header.key = key;
    header.round = round;
    header.step = round;
    header.phase = plan_->units[key].PhaseAt(round);
    header.plan_version = plan_->version;
    return header;
  }

  Payload Encode(float value, const std::string& spec) {
    return EncodeAll(std::vector<float>(kBlockElements, value), spec);
  }

  Payload EncodeAll(const std::vector<float>& values, const std::string& spec) {
    const auto codec = codecs_.Get(spec);
    REQUIRE(codec.ok());
    const PooledBuffer buffer = pool_.Acquire((*codec)->MaxEncodedSize(values.size()));
    const auto encoded = EncodeSpan(**codec, values, {}, buffer.bytes());
    REQUIRE(encoded.ok());
    return buffer.Share(encoded->payload_bytes);
  }

  void Push(std::uint32_t rank, const Header& header, Payload payload, double at_seconds = 0) {
    shard_.OnPush(rank, header, std::move(payload), At(at_seconds));
  }
  static Shard::Clock::time_point At(double seconds) {
    return Shard::Clock::time_point(std::chrono::milliseconds(std::llround(seconds * 1000)));
  }

  // Waits until `count` things have been said or failed.
  void RunUntilSaid(std::size_t count) {
    std::unique_lock lock(mu_);
    while (output.said.size() + output.failures.size() < count) {
      REQUIRE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !tasks_.empty(); }));
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  static constexpr std::uint32_t kWorkers = 3;
  Recorder output;

 private:
  void Post(std::function<void()> task) {
    const std::lock_guard lock(mu_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mu_
  CodecCache codecs_;
  ResidualStore residuals_;
  BufferPool pool_;
  PlanOptions options_;
  std::shared_ptr<const Plan> plan_;
  Shard shard_;
  ThreadExecutor executor_;

 public:
  Shard& shard() { return shard_; }
  ResidualStore& residuals() { return residuals_; }
};

float FirstFloat(const Said& said) { return LoadLe<float>(said.payload.data()); }

TEST_CASE("a round is answered to all when all are there, in any order of arrival",
          "[server][unit]") {
  Fixture test("none");
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (const std::uint32_t rank : {2U, 0U, 1U}) {
      for (const std::uint64_t key : {1U, 0U}) {
        test.Push(rank, test.PushHeader(key, round),
                  test.Encode(static_cast<float>(rank + round), "none"));
      }
    }
    test.RunUntilSaid(6);
    REQUIRE(test.output.failures.empty());
    for (const Said& said : test.output.said) {
      REQUIRE(said.header.kind == MessageKind::kReply);
      REQUIRE(said.header.reply == ReplyKind::kResult);
      REQUIRE(said.header.round == round);
      REQUIRE(FirstFloat(said) == static_cast<float>(1 + round));
    }
    test.output.said.clear();
  }
  REQUIRE(test.shard().counters().rounds == 6);
}

TEST_CASE("a duplicate is counted and never added; one of an answered round gets the kept reply",
          "[server][unit]") {
  Fixture test("none");
  test.Push(0, test.PushHeader(0, 0), test.Encode(3, "none"));
  test.Push(0, test.PushHeader(0, 0), test.Encode(300, "none"));
  test.Push(1, test.PushHeader(0, 0), test.Encode(3, "none"));
  test.Push(2, test.PushHeader(0, 0), test.Encode(6, "none"));
  test.RunUntilSaid(3);
  REQUIRE(FirstFloat(test.output.said[0]) == 4.0F);
  test.Push(1, test.PushHeader(0, 0), test.Encode(3, "none"));
  REQUIRE(test.output.said.size() == 4);
  REQUIRE(test.output.said[3].rank == 1);
  REQUIRE(test.output.said[3].payload == test.output.said[0].payload);
  REQUIRE(test.shard().counters().duplicate_pushes == 2);
  REQUIRE(test.output.failures.empty());
}

TEST_CASE("a repull is answered from the kept reply, by silence, or by a wish for the push",
          "[server][unit]") {
  Fixture test("none");
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    test.Push(rank, test.PushHeader(0, 0), test.Encode(1, "none"));
  }
  test.RunUntilSaid(3);
  Header repull = test.PushHeader(0, 0);
  repull.kind = MessageKind::kRepull;
  test.shard().OnRepull(2, repull);
  REQUIRE(test.output.said.size() == 4);
  REQUIRE(test.output.said[3].header.kind == MessageKind::kReply);

  test.Push(1, test.PushHeader(0, 1), test.Encode(1, "none"));
  repull.round = 1;
  test.shard().OnRepull(1, repull);  // its push is here: the answer comes when the round closes
  REQUIRE(test.output.said.size() == 4);
  test.shard().OnRepull(2, repull);  // its push is not
  REQUIRE(test.output.said.size() == 5);
  REQUIRE(test.output.said[4].header.kind == MessageKind::kPushAgain);
  REQUIRE(test.output.said[4].rank == 2);
  REQUIRE(test.output.failures.empty());
}

TEST_CASE("what is not the expected push is refused, naming tensor, rank and both values",
          "[server][unit]") {
  struct Case {
    std::function<void(Fixture&)> act;
    std::vector<std::string> expected;
  };
  const auto push = [](Fixture& test, std::uint32_t rank, Header header, Payload payload) {
    test.Push(rank, header, std::move(payload));
  };
  const std::vector<Case> cases = {
      {[&](Fixture& t) { push(t, 1, t.PushHeader(0, 4), t.Encode(1, "none")); },
       {"rank 1", "'weight'[0:4096]", "round 4", "expected 0"}},
      {[&](Fixture& t) { push(t, 1, t.PushHeader(0, 0), {}); }, {"rank 1", "0 bytes", "16384"}},
      {[&](Fixture& t) {
         Header header = t.PushHeader(0, 0);
         header.plan_version = 9;
         push(t, 2, header, t.Encode(1, "none"));
       },
       {"rank 2", "plan version 9", "has 1"}},
      {[&](Fixture& t) {
         Header header = t.PushHeader(0, 0);
         header.phase = 1;
         push(t, 0, header, t.Encode(1, "none"));
       },
       {"rank 0", "phase 1", "expected 0"}},
      {[&](Fixture& t) {
         push(t, 0, t.PushHeader(0, 0), t.Encode(1, "none"));
         Header header = t.PushHeader(0, 0);
         header.step = 7;
         push(t, 1, header, t.Encode(1, "none"));
       },
       {"rank 1", "step 7", "step 0"}},
      {[&](Fixture& t) {
         Header header = t.PushHeader(1, 0);
         header.key = 17;
         push(t, 0, header, t.Encode(1, "none"));
       },
       {"rank 0", "key 17"}},
  };
  for (const Case& each : cases) {
    Fixture test("none");
    each.act(test);
    REQUIRE(test.output.failures.size() == 1);
    for (const std::string& part : each.expected) {
      CAPTURE(test.output.failures[0].message(), part);
      REQUIRE(test.output.failures[0].message().find(part) != std::string::npos);
    }
  }
}

TEST_CASE("a non-finite contribution voids the round for all and leaves the residual alone",
          "[server][unit]") {
  Fixture test("onebit");
  const auto round = [&](std::uint64_t number, bool is_void) {
    test.output.said.clear();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      Header header = test.PushHeader(0, number);
      header.nonfinite = is_void && rank == 2;
      test.Push(rank, header, header.nonfinite ? Payload{} : test.Encode(2.5F, "onebit"));
    }
    test.RunUntilSaid(3);
  };
  round(0, false);
  const auto before = test.residuals().Read("weight", 2 * kBlockElements);
  round(1, true);
  for (const Said& said : test.output.said) {
    REQUIRE(said.header.reply == ReplyKind::kNonfinite);
    REQUIRE(said.payload.size() == 4);
    REQUIRE(LoadLe<std::uint32_t>(said.payload.data()) == 2);
  }
  REQUIRE(test.residuals().Read("weight", 2 * kBlockElements) == before);
  round(2, false);
  REQUIRE(test.output.said[0].header.reply == ReplyKind::kResult);
  REQUIRE(test.shard().counters().nonfinite_rounds == 1);
  REQUIRE(test.output.failures.empty());
}

TEST_CASE(
    "a NaN that nobody has looked at voids the round and leaves the residual alone, bit for bit",
    "[server][unit]") {
  // `none` on the way up has no encode pass; the server finds it before its own encode pass begins.
  Fixture test("none", "onebit", 0);
  const auto round = [&](std::uint64_t number, float first) {
    test.output.said.clear();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      std::vector<float> values(kBlockElements, 1e4F + static_cast<float>(rank));
      values[17] = 3;
      if (rank == 1) values[100] = first;
      test.Push(rank, test.PushHeader(0, number), test.EncodeAll(values, "none"));
    }
    test.RunUntilSaid(3);
  };
  round(0, 5.0F);
  const auto before = test.residuals().Read("weight", 2 * kBlockElements);
  REQUIRE(before[17] != 0.0F);
  round(1, std::numeric_limits<float>::quiet_NaN());
  REQUIRE(test.output.said[0].header.reply == ReplyKind::kNonfinite);
  REQUIRE(LoadLe<std::uint32_t>(test.output.said[0].payload.data()) == 1);
  REQUIRE(test.residuals().Read("weight", 2 * kBlockElements) == before);
  REQUIRE(test.output.failures.empty());
}

TEST_CASE("integers cannot be marked non-finite", "[server][unit]") {
  Fixture test("none", "none", 0, DType::kInt8);
  Header header = test.PushHeader(0, 0);
  header.nonfinite = true;
  test.Push(2, header, {});
  REQUIRE(test.output.failures.size() == 1);
  REQUIRE(test.output.failures[0].message().find("marked non-finite") != std::string::npos);
  REQUIRE(test.output.failures[0].message().find("int8") != std::string::npos);
}

TEST_CASE("warm-up steps go uncompressed and then the phase changes", "[server][unit]") {
  Fixture test("onebit", /*warmup_steps=*/2);
  for (std::uint64_t round = 0; round < 4; ++round) {
    test.output.said.clear();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      test.Push(rank, test.PushHeader(0, round), test.Encode(1.5F, round < 2 ? "none" : "onebit"));
    }
    test.RunUntilSaid(3);
    REQUIRE(test.output.failures.empty());
    const std::size_t expected = round < 2 ? kBlockElements * 4 : 4 + kBlockElements / 8;
    REQUIRE(test.output.said[0].payload.size() == expected);
    REQUIRE(test.output.said[0].header.phase == (round < 2 ? 0U : 1U));
  }
}

TEST_CASE("old rounds are found by the age of their first push, with who is here and missing",
          "[server][unit]") {
  Fixture test("none");
  REQUIRE(test.shard().FindOldRounds(Fixture::At(1000)).count == 0);
  test.Push(1, test.PushHeader(1, 0), test.Encode(1, "none"), 20);
  test.Push(1, test.PushHeader(0, 0), test.Encode(1, "none"), 10);
  test.Push(2, test.PushHeader(0, 0), test.Encode(1, "none"), 30);  // no new age

  REQUIRE(test.shard().FindOldRounds(Fixture::At(10)).count == 0);
  auto old = test.shard().FindOldRounds(Fixture::At(10.5));
  REQUIRE(old.count == 1);
  REQUIRE(Describe(old.oldest[0], Fixture::At(22.5)) ==
          "tensor 'weight'[0:4096] (key 0), step 0, round 0: open for 12.5 s, ranks 1,2 are here, "
          "0 missing");
  old = test.shard().FindOldRounds(Fixture::At(25));
  REQUIRE(old.count == 2);
  REQUIRE(old.oldest[0].since == Fixture::At(10));
  REQUIRE(old.oldest[1].since == Fixture::At(20));

  // A round that closes is old no more, and the next one has an age of its own.
  test.Push(0, test.PushHeader(0, 0), test.Encode(1, "none"), 40);
  test.RunUntilSaid(3);
  test.Push(0, test.PushHeader(0, 1), test.Encode(1, "none"), 50);
  old = test.shard().FindOldRounds(Fixture::At(45));
  REQUIRE(old.count == 1);
  REQUIRE(old.oldest[0].what == "tensor 'weight'[4096:8192] (key 1), step 0, round 0");
  old = test.shard().FindOldRounds(Fixture::At(60));
  REQUIRE(old.count == 2);
  REQUIRE(old.oldest[1].since == Fixture::At(50));
  REQUIRE(old.oldest[1].what == "tensor 'weight'[0:4096] (key 0), step 1, round 1");
}

TEST_CASE("a key's progress does not hide another one that waits", "[server][unit]") {
  Fixture test("none");
  test.Push(0, test.PushHeader(1, 0), test.Encode(1, "none"), 5);
  for (std::uint64_t round = 0; round < 10; ++round) {
    test.output.said.clear();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      test.Push(rank, test.PushHeader(0, round), test.Encode(1, "none"),
                10 + static_cast<double>(round));
    }
    test.RunUntilSaid(3);
  }
  const auto old = test.shard().FindOldRounds(Fixture::At(19));
  REQUIRE(old.count == 1);
  REQUIRE(old.oldest[0].since == Fixture::At(5));
  REQUIRE(old.oldest[0].missing == std::vector<std::uint32_t>{1, 2});
}

TEST_CASE("a push with another learning rate or loss scale is refused, naming both ranks",
          "[server][unit]") {
  const bool by_rate = GENERATE(true, false);
  Fixture test("onebit");
  Header header = test.PushHeader(0, 0);
  header.learning_rate = 0.1;
  header.loss_scale = 1024;
  test.Push(2, header, test.Encode(1, "onebit"));
  test.Push(0, header, test.Encode(1, "onebit"));
  REQUIRE(test.output.failures.empty());
  (by_rate ? header.learning_rate : header.loss_scale) = 0.25;
  test.Push(1, header, test.Encode(1, "onebit"));
  REQUIRE(test.output.failures.size() == 1);
  const Status& status = test.output.failures[0];
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CAPTURE(status.message());
  const std::string expected =
      by_rate ? "rank 1 pushes it with learning rate 0.25, rank 2 with 0.1 (step 0, round 0)"
              : "rank 1 pushes it with loss scale 0.25, rank 2 with 1024 (step 0, round 0)";
  CHECK(status.message().find(expected) != std::string::npos);
}

TEST_CASE("worker 0 reads and writes a key's residual and round when no round is open",
          "[server][unit]") {
  const auto question = [](MessageKind kind, std::uint64_t key, std::uint64_t round) {
    Header header;
    header.kind = kind;
    header.key = key;
    header.round = round;
    header.step = 77;  // its number
    return header;
  };
  const auto payload_of = [](const std::vector<std::byte>& bytes) {
    static BufferPool pool;
    const PooledBuffer buffer = pool.Acquire(bytes.size());
    std::copy(bytes.begin(), bytes.end(), buffer.bytes().begin());
    return buffer.Share(bytes.size());
  };
  // An average of signs leaves a residual on the server.
  Fixture test("onebit");
  std::vector<float> values(kBlockElements, 1.0F);
  values[0] = 5;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    values[1] = static_cast<float>(rank) - 1.5F;
    test.Push(rank, test.PushHeader(0, 0), test.EncodeAll(values, "onebit"));
  }
  test.RunUntilSaid(3);
  REQUIRE(test.output.failures.empty());
  test.output.said.clear();
  test.shard().OnReadState(0, question(MessageKind::kReadState, 0, 0));
  test.shard().OnReadState(0, question(MessageKind::kReadState, 1, 0));
  REQUIRE(test.output.said.size() == 2);
  const Said saved = test.output.said[0];
  REQUIRE(saved.header.kind == MessageKind::kState);
  REQUIRE(saved.header.step == 77);
  REQUIRE(saved.header.round == 1);
  REQUIRE(saved.payload == test.residuals().SaveUnit(0));
  REQUIRE(test.output.said[1].header.round == 0);
  REQUIRE(test.output.said[1].payload.empty());  // it has no residual yet

  SECTION("into another shard, which goes on at that round") {
    Fixture other("onebit");
    other.shard().OnWriteState(0, question(MessageKind::kWriteState, 0, 1),
                               payload_of(saved.payload));
    REQUIRE(other.output.failures.empty());
    REQUIRE(other.output.said.at(0).header.kind == MessageKind::kStateWritten);
    REQUIRE(other.output.said[0].header.step == 77);
    REQUIRE(other.residuals().SaveUnit(0) == saved.payload);
    other.Push(0, other.PushHeader(0, 1), other.Encode(1, "onebit"));
    REQUIRE(other.output.failures.empty());
    // Nothing clears it.
    Fixture third("onebit");
    third.shard().OnWriteState(0, question(MessageKind::kWriteState, 0, 1),
                               payload_of(saved.payload));
    third.shard().OnWriteState(0, question(MessageKind::kWriteState, 0, 1), {});
    REQUIRE(third.residuals().Read("weight", kBlockElements) == std::vector<float>(kBlockElements));
    REQUIRE(third.output.failures.empty());
  }
  SECTION("anything else ends the job by name") {
    const int what = GENERATE(0, 1, 2, 3, 4);
    std::string expected;
    Header header = question(MessageKind::kWriteState, 0, 1);
    std::vector<std::byte> bytes = saved.payload;
    Fixture plain("onebit", "none", 0);
    Fixture& shard = what == 4 ? plain : test;
    std::uint32_t rank = 0;
    if (what == 0) {
      expected = "while tensor 'weight'[0:4096] (key 0), step 1, round 1 is open";
      test.Push(1, test.PushHeader(0, 1), test.Encode(1, "onebit"));
    } else if (what == 1) {
      expected = "WriteState of rank 2 for key 0: worker 0 alone";
      rank = 2;
    } else if (what == 2) {
      expected = "WriteState of rank 0 for key 9, which server 0 lane 0 does not own";
      header.key = 9;
    } else if (what == 3) {
      expected = "state of rank 0 for tensor 'weight'[0:4096] (key 0): saved residuals are damaged";
      bytes[bytes.size() / 2] ^= std::byte{1};
    } else {
      expected = "and the way down has no feedback";
    }
    shard.shard().OnWriteState(rank, header, payload_of(bytes));
    REQUIRE(shard.output.failures.size() == 1);
    CAPTURE(what, shard.output.failures[0].message());
    REQUIRE(shard.output.failures[0].message().find(expected) != std::string::npos);
  }
}

TEST_CASE("a push of a step in which the filter does not send the unit is refused by name",
          "[server][unit][covap]") {
  Fixture test("none", "none", 0, DType::kFloat32, 2);
  // Unit 0 is of class 0, unit 1 of class 1: in step 0 class 0 is sent, in step 1 class 1.
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    test.Push(rank, test.PushHeader(0, 0), test.Encode(1, "none"));
  }
  test.RunUntilSaid(3);
  REQUIRE(test.output.failures.empty());
  Header late = test.PushHeader(0, 1);
  late.step = 2;
  test.Push(1, late, test.Encode(1, "none"));
  REQUIRE(test.output.failures.empty());
  late.step = 3;
  test.Push(2, late, test.Encode(1, "none"));
  REQUIRE(test.output.failures.size() == 1);
  CHECK(test.output.failures[0].code() == StatusCode::kCorruptData);
  CHECK(test.output.failures[0].message() ==
        "push of rank 2 for tensor 'weight'[0:4096] (key 0) in step 3 with plan version 1: the "
        "filter sends class 1 of 2 in that step, the unit is of class 0 (plan version 1 of the "
        "server)");
}

TEST_CASE("a push of a step with another interval than its plan version knows is refused by name",
          "[server][unit][covap]") {
  Fixture test("none", "none", 0, DType::kFloat32, 1);
  test.ChangeInterval(2, 1);  // version 2: from step 1 on unit 0 is of class 0, unit 1 of class 1
  // Of a step before that the old version says the same.
  Header push = test.PushHeader(0, 0);
  push.plan_version = 1;
  for (std::uint32_t rank = 0; rank < 3; ++rank) test.Push(rank, push, test.Encode(1, "none"));
  test.RunUntilSaid(3);
  REQUIRE(test.output.failures.empty());
  CHECK(test.output.said.at(0).header.plan_version == 2);

  Header old = test.PushHeader(0, 1);
  old.step = 2;
  test.Push(0, old, test.Encode(1, "none"));
  REQUIRE(test.output.failures.empty());
  old.plan_version = 1;
  test.Push(1, old, test.Encode(1, "none"));
  REQUIRE(test.output.failures.size() == 1);
  CHECK(test.output.failures[0].message() ==
        "push of rank 1 for tensor 'weight'[0:4096] (key 0) in step 2 has plan version 1, expected "
        "at least 2 from step 1 on: it has not heard of the interval 2 that begins there");
}

}  // namespace
}  // namespace gradwire
