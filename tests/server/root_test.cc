// The root alone: who is let in and when the job starts, declarations, plans and barriers. The test
// is the root lane's thread, and time is what it says.

#include "server/root.h"

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

struct Sent {
  PeerId to = 0;
  Header header;
  std::vector<std::byte> body;
};

class Recorder final : public RootOutput {
 public:
  void Send(PeerId to, const Header& header, std::vector<std::byte> body) override {
    sent.push_back({to, header, std::move(body)});
  }
  void OnWelcomed() override { ++welcomed; }
  void InstallLocally(std::shared_ptr<const Plan> plan) override {
    installed.push_back(std::move(plan));
  }
  void Fail(Status status) override { failures.push_back(std::move(status)); }
  void ConnectBack(std::uint32_t server, std::uint32_t lane, const std::string& address) override {
    connected_back.push_back(fmt::format("{}/{} {}", server, lane, address));
  }

  // To whom messages of this kind went since the last call.
  std::vector<PeerId> TakeReceivers(MessageKind kind) {
    std::vector<PeerId> receivers;
    for (const Sent& each : sent) {
      if (each.header.kind == kind) receivers.push_back(each.to);
    }
    std::erase_if(sent, [kind](const Sent& each) { return each.header.kind == kind; });
    return receivers;
  }

  std::vector<Sent> sent;
  int welcomed = 0;
  std::vector<std::shared_ptr<const Plan>> installed;
  std::vector<Status> failures;
  std::vector<std::string> connected_back;
};

// Peers are 100 + rank for workers and 200 + index for servers.
constexpr PeerId kWorkerPeer = 100;
constexpr PeerId kServerPeer = 200;

class Fixture {
 public:
  explicit Fixture(std::uint32_t workers, std::uint32_t servers = 1, std::uint32_t lanes = 1)
      : Fixture(MakeConfig(workers, servers, lanes)) {}
  explicit Fixture(const Config& given)
      : config(given), root(config, BuiltinCompressors(), Lanes(0), output) {}

  static Config MakeConfig(std::uint32_t workers, std::uint32_t servers, std::uint32_t lanes) {
    Config config;
    config.job.workers = workers;
    config.job.servers = servers;
    config.server.lanes = lanes;
    config.timeouts.start_ms = 20000;
    return config;
  }

  std::vector<std::string> Lanes(std::uint32_t server) const {
    std::vector<std::string> lanes;
    for (std::uint32_t lane = 0; lane < config.server.lanes; ++lane) {
      lanes.push_back(fmt::format("inproc://s{}l{}", server, lane));
    }
    return lanes;
  }

  Hello HelloOf(Role role, std::uint32_t rank, std::uint64_t incarnation = 7) const {
    Hello hello;
    hello.job_id = config.job.id;
    hello.protocol_version = kProtocolVersion;
    hello.role = role;
    hello.rank = rank;
    hello.incarnation = incarnation;
    hello.shared_config = SharedConfig(config);
    hello.host = fmt::format("n{}", rank);
    hello.pid = 4000 + rank;
    if (role == Role::kServer) hello.lane_addresses = Lanes(rank);
    return hello;
  }

  Status Worker(std::uint32_t rank, std::uint64_t incarnation = 7) {
    return root.OnHello(kWorkerPeer + rank, HelloOf(Role::kWorker, rank, incarnation), "10.0.0.2");
  }
  Status OtherServer(std::uint32_t index, std::uint64_t incarnation = 7) {
    return root.OnHello(kServerPeer + index, HelloOf(Role::kServer, index, incarnation),
                        "10.0.0.3");
  }

  // Everyone is here and the welcomes are out of the way.
  void Begin() {
    for (std::uint32_t s = 1; s < config.job.servers; ++s) {
      REQUIRE(OtherServer(s).ok());
      for (std::uint32_t lane = 0; lane < config.server.lanes; ++lane) {
        root.OnLaneReached(s, lane, s);
      }
    }
    for (std::uint32_t rank = 0; rank < config.job.workers; ++rank) REQUIRE(Worker(rank).ok());
    REQUIRE(root.everyone_is_here());
    output.sent.clear();
  }

  static TensorDeclaration Tensor(const std::string& name, std::uint64_t elements) {
    TensorDeclaration tensor;
    tensor.name = name;
    tensor.shape = {elements};
    return tensor;
  }

  void Declare(std::uint32_t rank, std::uint64_t batch, std::vector<TensorDeclaration> tensors) {
    root.OnDeclare(rank, {batch, std::move(tensors)}, now);
  }

  const Config config;
  Recorder output;
  Root root;
  Root::Clock::time_point now = Root::Clock::now();
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("the root welcomes everyone at once, when all are there and every lane is reached",
          "[server][unit]") {
  Fixture fixture(2, 2, 2);
  const bool worker_is_last = GENERATE(false, true);
  CAPTURE(worker_is_last);
  REQUIRE(fixture.root.DescribeWait() == "waiting for 2 of 2 workers and 1 of 2 servers");
  REQUIRE(fixture.Worker(1).ok());
  REQUIRE(fixture.root.DescribeWait() == "waiting for 1 of 2 workers and 1 of 2 servers");
  REQUIRE(fixture.root.DescribeMissing() == "worker 0, server 1");
  REQUIRE(Has(fixture.root.DescribeHere(), "worker 1 at 10.0.0.2 (host n1, pid 4001)"));
  REQUIRE(Has(fixture.root.DescribeHere(), "server 0"));
  if (!worker_is_last) {
    REQUIRE(fixture.Worker(0).ok());
    REQUIRE(fixture.root.DescribeWait() == "waiting for 1 of 2 servers");
  }
  REQUIRE(fixture.OtherServer(1).ok());
  REQUIRE(fixture.output.connected_back ==
          std::vector<std::string>{"1/0 inproc://s1l0", "1/1 inproc://s1l1"});
  fixture.root.OnLaneReached(1, 1, 1);
  REQUIRE(!fixture.root.everyone_is_here());
  fixture.root.OnLaneReached(1, 0, 1);
  if (worker_is_last) {
    REQUIRE(!fixture.root.everyone_is_here());
    REQUIRE(fixture.output.sent.empty());
    REQUIRE(fixture.Worker(0).ok());
  }
  REQUIRE(fixture.root.everyone_is_here());
  REQUIRE(fixture.output.welcomed == 1);
  REQUIRE(fixture.output.sent.size() == 3);
  for (const Sent& each : fixture.output.sent) {
    const auto welcome = ParseWelcome(each.body);
    REQUIRE(welcome.ok());
    REQUIRE(welcome->num_workers == 2);
    REQUIRE(welcome->addresses ==
            std::vector<std::vector<std::string>>{fixture.Lanes(0), fixture.Lanes(1)});
  }
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kWelcome) ==
          std::vector<PeerId>{kWorkerPeer, kWorkerPeer + 1, kServerPeer + 1});
  REQUIRE(fixture.root.DescribeWait().empty());
  REQUIRE(fixture.root.DescribeMissing().empty());
  REQUIRE(fixture.output.failures.empty());
}

TEST_CASE("a hello that cannot be right is refused by name and changes nothing", "[server][unit]") {
  Fixture fixture(2, 2, 2);
  struct Case {
    Hello hello;
    StatusCode code;
    std::string expected;
  };
  Hello no_incarnation = fixture.HelloOf(Role::kWorker, 0, 0);
  Hello one_lane = fixture.HelloOf(Role::kServer, 1);
  one_lane.lane_addresses.pop_back();
  const std::vector<Case> cases = {
      {fixture.HelloOf(Role::kWorker, 2), StatusCode::kInvalidArgument,
       "worker 2 at 10.0.0.9 (host n2, pid 4002) is out of range: the job has 2 workers"},
      {fixture.HelloOf(Role::kServer, 5), StatusCode::kInvalidArgument,
       "server 5 at 10.0.0.9 (host n5, pid 4005) is out of range: the job has 2 servers"},
      {fixture.HelloOf(Role::kServer, 0), StatusCode::kInvalidArgument,
       "server 0 is the root itself"},
      {no_incarnation, StatusCode::kCorruptData, "has no incarnation"},
      {one_lane, StatusCode::kInvalidArgument,
       "server 1 at 10.0.0.9 (host n1, pid 4001) has 1 lanes, expected 2"},
  };
  for (const Case& test : cases) {
    const Status status = fixture.root.OnHello(900, test.hello, "10.0.0.9");
    INFO(status.ToString());
    REQUIRE(status.code() == test.code);
    REQUIRE(Has(status.message(), test.expected));
  }
  REQUIRE(fixture.output.failures.empty());
  REQUIRE(fixture.output.sent.empty());
  REQUIRE(fixture.output.connected_back.empty());
  REQUIRE(fixture.root.DescribeWait() == "waiting for 2 of 2 workers and 1 of 2 servers");
  fixture.Begin();
}

TEST_CASE("a rank that is taken is refused with both processes, and with what to do about it",
          "[server][unit]") {
  Fixture fixture(2);
  REQUIRE(fixture.Worker(0).ok());
  const auto refused = [&] {
    Hello second = fixture.HelloOf(Role::kWorker, 0, 8);
    second.host = "n9";
    second.pid = 9999;
    const Status status = fixture.root.OnHello(900, second, "10.0.0.9");
    INFO(status.ToString());
    REQUIRE(status.code() == StatusCode::kInvalidArgument);
    REQUIRE(Has(status.message(), "worker 0 at 10.0.0.9 (host n9, pid 9999) is refused"));
    REQUIRE(
        Has(status.message(), "worker 0 at 10.0.0.2 (host n0, pid 4000) is already in the job"));
    return status.message();
  };
  REQUIRE(Has(refused(), "two processes were started with the same rank"));
  REQUIRE(fixture.root.DescribeWait() == "waiting for 1 of 2 workers");
  REQUIRE(fixture.Worker(1).ok());
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kWelcome) ==
          std::vector<PeerId>{kWorkerPeer, kWorkerPeer + 1});
  REQUIRE(Has(refused(), "a restart inside a running job is not possible"));
  REQUIRE(fixture.output.sent.empty());
  REQUIRE(fixture.output.failures.empty());
}

TEST_CASE("who comes back after a cut is answered at the new connection", "[server][unit]") {
  Fixture fixture(2, 2);
  REQUIRE(fixture.Worker(0).ok());
  // Before the start: the welcome goes where it is now.
  REQUIRE(fixture.root.OnHello(300, fixture.HelloOf(Role::kWorker, 0), "10.0.0.2").ok());
  REQUIRE(fixture.output.sent.empty());
  REQUIRE(fixture.OtherServer(1).ok());
  REQUIRE(fixture.OtherServer(1).ok());
  REQUIRE(fixture.output.connected_back.size() == 1);  // is asked once for a life
  fixture.root.OnLaneReached(1, 0, 1);
  REQUIRE(fixture.Worker(1).ok());
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kWelcome) ==
          std::vector<PeerId>{300, kWorkerPeer + 1, kServerPeer + 1});

  // While servers install the plan, a server gets it again, and a worker must wait for it.
  fixture.Declare(0, 0, {Fixture::Tensor("w", 10)});
  fixture.Declare(1, 0, {Fixture::Tensor("w", 10)});
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == std::vector<PeerId>{kServerPeer + 1});
  REQUIRE(fixture.root.OnHello(301, fixture.HelloOf(Role::kWorker, 0), "10.0.0.2").ok());
  REQUIRE(fixture.root.OnHello(302, fixture.HelloOf(Role::kServer, 1), "10.0.0.3").ok());
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kWelcome) == std::vector<PeerId>{301, 302});
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == std::vector<PeerId>{302});
  fixture.root.OnPlanAck(0, 1);
  fixture.root.OnPlanAck(1, 1);
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) ==
          std::vector<PeerId>{301, kWorkerPeer + 1});
  REQUIRE(fixture.root.OnHello(303, fixture.HelloOf(Role::kWorker, 0), "10.0.0.2").ok());
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == std::vector<PeerId>{303});
  REQUIRE(fixture.output.failures.empty());
}

TEST_CASE("a configuration that differs fails the job with key and both values", "[server][unit]") {
  Fixture fixture(2);
  REQUIRE(fixture.Worker(0).ok());
  Config other = fixture.config;
  other.job.seed = 77;
  Hello hello = fixture.HelloOf(Role::kWorker, 1);
  hello.shared_config = SharedConfig(other);
  const bool is_absent = GENERATE(false, true);
  if (is_absent) hello.shared_config.erase("job.seed");
  const Status status = fixture.root.OnHello(kWorkerPeer + 1, hello, "10.0.0.2");
  REQUIRE(status.message() ==
          fmt::format("configurations differ: job.seed is {} on worker 1 at 10.0.0.2 (host n1, pid "
                      "4001), 1 on the root",
                      is_absent ? "nothing" : "77"));
  REQUIRE(fixture.output.failures.size() == 1);
  REQUIRE(fixture.output.failures[0].message() == status.message());
  REQUIRE(!fixture.root.everyone_is_here());
}

TEST_CASE("an advertised address where another server answers is named", "[server][unit]") {
  Fixture fixture(1, 3);
  REQUIRE(fixture.OtherServer(1).ok());
  fixture.root.OnLaneReached(1, 0, 2);
  REQUIRE(fixture.output.failures.size() == 1);
  const std::string text = fixture.output.failures[0].message();
  INFO(text);
  REQUIRE(Has(text, "server 1 at 10.0.0.3 (host n1, pid 4001) advertises inproc://s1l0"));
  REQUIRE(Has(text, "but server 2 answers there"));
}

TEST_CASE("the start has a deadline, whose error says who is missing and who is here",
          "[server][unit]") {
  Fixture fixture(3);
  REQUIRE(fixture.Worker(1).ok());
  const auto begin = Root::Clock::now();  // not before the root's own
  fixture.root.WatchStart(begin + milliseconds(1000));
  REQUIRE(fixture.output.failures.empty());
  fixture.root.WatchStart(begin + milliseconds(20001));
  REQUIRE(fixture.output.failures.size() == 1);
  const Status& status = fixture.output.failures[0];
  INFO(status.ToString());
  REQUIRE(status.code() == StatusCode::kTimeout);
  REQUIRE(Has(status.message(), "not started within 20.0 s (timeouts.start)"));
  REQUIRE(Has(status.message(), "waiting for 2 of 3 workers: missing worker 0, worker 2; here: "));
  REQUIRE(Has(status.message(), "worker 1 at 10.0.0.2 (host n1, pid 4001)"));

  Fixture complete(1);
  complete.Begin();
  complete.root.WatchStart(begin + milliseconds(1000000));
  REQUIRE(complete.output.failures.empty());
}

TEST_CASE("workers get the plan when every server has installed it", "[server][unit]") {
  Fixture fixture(2, 2);
  fixture.Begin();
  fixture.Declare(1, 0, {Fixture::Tensor("w", 10), Fixture::Tensor("b", 3)});
  REQUIRE(fixture.output.installed.empty());
  fixture.Declare(1, 0, {Fixture::Tensor("w", 10), Fixture::Tensor("b", 3)});  // after a cut
  REQUIRE(fixture.output.installed.empty());
  fixture.Declare(0, 0, {Fixture::Tensor("w", 10), Fixture::Tensor("b", 3)});
  REQUIRE(fixture.output.installed.size() == 1);
  REQUIRE(fixture.output.installed[0]->version == 1);
  REQUIRE(fixture.output.installed[0]->tensors.size() == 2);
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == std::vector<PeerId>{kServerPeer + 1});

  fixture.root.OnPlanAck(0, 1);
  fixture.root.OnPlanAck(0, 1);
  fixture.root.OnPlanAck(1, 2);  // of a plan that is not there
  fixture.root.OnPlanAck(9, 1);  // of a server that is not there
  fixture.Declare(0, 0, {});     // comes again while the plan is not out
  REQUIRE(fixture.output.sent.empty());
  fixture.root.OnPlanAck(1, 1);
  for (const Sent& each : fixture.output.sent) {
    REQUIRE(each.header.plan_version == 1);
    const auto plan = ParsePlan(each.body);
    REQUIRE(plan.ok());
    REQUIRE(plan->tensors.size() == 2);
  }
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) ==
          std::vector<PeerId>{kWorkerPeer, kWorkerPeer + 1});
  // Only the one that asks again, after a cut, gets it again.
  fixture.Declare(1, 0, {});
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == std::vector<PeerId>{kWorkerPeer + 1});
  fixture.root.OnPlanAck(1, 1);
  REQUIRE(fixture.output.sent.empty());
  REQUIRE(fixture.output.failures.empty());

  fixture.Declare(0, 2, {Fixture::Tensor("late", 1)});
  REQUIRE(fixture.output.failures.size() == 1);
  REQUIRE(fixture.output.failures[0].code() == StatusCode::kCorruptData);
  REQUIRE(Has(fixture.output.failures[0].message(),
              "worker 0 at 10.0.0.2 (host n0, pid 4000) declares batch 2, expected 1"));
}

TEST_CASE("declarations that differ fail the job with tensor, ranks and both values",
          "[server][unit]") {
  const TensorDeclaration w = Fixture::Tensor("w", 30);
  const TensorDeclaration b = Fixture::Tensor("b", 4);
  const auto with = [&](auto change) {
    TensorDeclaration changed = w;
    change(changed);
    return changed;
  };
  struct Case {
    std::vector<TensorDeclaration> theirs;
    std::string expected;
  };
  const std::vector<Case> cases = {
      {{with([](auto& t) { t.shape = {31}; }), b},
       "('w'): shape is [30] on rank 0, [31] on rank 2"},
      {{with([](auto& t) {
          t.shape = {5, 6};
        }),
        b},
       "('w'): shape is [30] on rank 0, [5, 6] on rank 2"},
      {{with([](auto& t) { t.dtype = DType::kFloat16; }), b},
       "('w'): dtype is float32 on rank 0, float16 on rank 2"},
      {{with([](auto& t) { t.op = ReduceOp::kSum; }), b},
       "('w'): operation is average on rank 0, sum on rank 2"},
      {{with([](auto& t) { t.priority = -3; }), b}, "('w'): priority is 0 on rank 0, -3 on rank 2"},
      {{with([](auto& t) { t.name = "v"; }), b},
       "position 0: name is 'w' on rank 0, 'v' on rank 2"},
      {{b, w}, "both declare both, in another order"},
      {{w}, "2 on rank 0, 1 on rank 2; only rank 0 has 'b'"},
      {{w, b, Fixture::Tensor("c", 1)}, "2 on rank 0, 3 on rank 2; only rank 2 has 'c'"},
  };
  for (const Case& test : cases) {
    Fixture fixture(3);
    fixture.Begin();
    fixture.Declare(0, 0, {w, b});
    fixture.Declare(2, 0, test.theirs);
    REQUIRE(fixture.output.failures.size() == 1);
    const Status& status = fixture.output.failures[0];
    INFO(test.expected << "\n" << status.ToString());
    REQUIRE(status.code() == StatusCode::kInvalidArgument);
    REQUIRE(Has(status.message(), "workers declare different tensors, batch 0"));
    REQUIRE(Has(status.message(), test.expected));
    REQUIRE(fixture.output.installed.empty());
  }
}

TEST_CASE("a barrier opens when all have come, and a late question is answered", "[server][unit]") {
  Fixture fixture(3);
  fixture.Begin();
  for (std::uint64_t number = 0; number < 2; ++number) {
    fixture.root.OnBarrier(2, number, 0, fixture.now);
    fixture.root.OnBarrier(2, number, 0, fixture.now);  // again, after a cut
    fixture.root.OnBarrier(0, number, 0, fixture.now);
    REQUIRE(fixture.output.sent.empty());
    fixture.root.OnBarrier(1, number, 0, fixture.now);
    for (const Sent& each : fixture.output.sent) REQUIRE(each.header.round == number);
    REQUIRE(fixture.output.TakeReceivers(MessageKind::kBarrierDone) ==
            std::vector<PeerId>{kWorkerPeer, kWorkerPeer + 1, kWorkerPeer + 2});
  }
  fixture.root.OnBarrier(1, 0, 0, fixture.now);
  REQUIRE(fixture.output.sent.size() == 1);
  REQUIRE(fixture.output.sent[0].header.round == 0);
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kBarrierDone) ==
          std::vector<PeerId>{kWorkerPeer + 1});
  REQUIRE(fixture.output.failures.empty());
  fixture.root.OnBarrier(1, 5, 0, fixture.now);
  REQUIRE(fixture.output.failures.size() == 1);
  REQUIRE(Has(fixture.output.failures[0].message(),
              "worker 1 at 10.0.0.2 (host n1, pid 4001) is at barrier 5, expected 2"));
}

TEST_CASE("barriers around the state of different steps name both ranks and steps",
          "[server][unit]") {
  Fixture fixture(3);
  fixture.Begin();
  fixture.root.OnBarrier(2, 0, 5, fixture.now);
  fixture.root.OnBarrier(0, 0, 5, fixture.now);
  REQUIRE(fixture.output.failures.empty());
  fixture.root.OnBarrier(1, 0, 10, fixture.now);
  REQUIRE(fixture.output.failures.size() == 1);
  REQUIRE(
      Has(fixture.output.failures[0].message(),
          "state of different steps: worker 1 at 10.0.0.2 (host n1, pid 4001) saves or restores "
          "step 10, worker 0 at"));
}

TEST_CASE("an interval begins where no worker is, once all have said where they are",
          "[server][unit][covap]") {
  Config config = Fixture::MakeConfig(2, 2, 1);
  config.compression.filter.type = FilterType::kCovap;
  config.partition.fuse_below = 0;
  Fixture fixture(config);
  fixture.Begin();
  std::vector<TensorDeclaration> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(Fixture::Tensor(fmt::format("w{}", i), 10));
  const auto asked = [&] { return fixture.output.TakeReceivers(MessageKind::kAskStep); };
  const std::vector<PeerId> both = {kWorkerPeer, kWorkerPeer + 1};

  // Before there are units there is nothing to change; the wish waits.
  fixture.root.OnAskInterval(0, 4);
  fixture.Declare(0, 0, tensors);
  fixture.Declare(1, 0, tensors);
  REQUIRE(asked().empty());
  // And while a plan is on its way.
  fixture.root.OnPlanAck(0, 1);
  REQUIRE(asked().empty());
  fixture.root.OnPlanAck(1, 1);
  const Header question = fixture.output.sent.back().header;
  REQUIRE(asked() == both);
  CHECK(question.round == 1);
  CHECK(question.step == 8);  // two intervals of the longer one

  // Of several wishes meanwhile the last one comes next.
  fixture.root.OnAskInterval(0, 3);
  fixture.root.OnAskInterval(0, 50);
  REQUIRE(asked().empty());
  fixture.root.OnStep(1, 1, 42);
  fixture.root.OnStep(0, 7, 99);  // no answer to this question
  REQUIRE(fixture.output.installed.size() == 1);
  const std::vector<OpenCall> calls = fixture.root.OpenCalls();
  REQUIRE(calls.size() == 1);
  CHECK(calls[0].what == "change of the interval to 4");
  CHECK(calls[0].here == std::vector<std::uint32_t>{1});
  CHECK(calls[0].missing == std::vector<std::uint32_t>{0});
  // Who comes back is asked again if its answer is missing.
  REQUIRE(fixture.Worker(1).ok());
  REQUIRE(asked().empty());
  REQUIRE(fixture.Worker(0).ok());
  REQUIRE(asked() == std::vector<PeerId>{kWorkerPeer});
  fixture.output.sent.clear();
  fixture.root.OnStep(0, 1, 40);
  REQUIRE(fixture.output.installed.size() == 2);
  const FilterStage stage = fixture.output.installed[1]->filter.stages.back();
  CHECK(stage.interval == 4);
  CHECK(stage.first_step == 50);
  CHECK(fixture.root.OpenCalls().empty());

  // A declaration that closes before the servers have it takes it along.
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    fixture.Declare(rank, 1, {Fixture::Tensor("late", 10)});
  }
  REQUIRE(fixture.output.installed.size() == 3);
  CHECK(fixture.output.installed[2]->version == 3);
  CHECK(fixture.output.installed[2]->filter.stages.size() == 2);
  fixture.output.TakeReceivers(MessageKind::kPlan);
  for (std::uint32_t server = 0; server < 2; ++server) fixture.root.OnPlanAck(server, 2);
  REQUIRE(fixture.output.sent.empty());
  for (std::uint32_t server = 0; server < 2; ++server) fixture.root.OnPlanAck(server, 3);
  REQUIRE(fixture.output.TakeReceivers(MessageKind::kPlan) == both);
  // The wish that waited: no more than there are units, and after the stage before.
  CHECK(fixture.output.sent.back().header.step == 14);
  REQUIRE(asked() == both);
  fixture.root.OnStep(0, 2, 20);
  fixture.root.OnLeft(1);
  REQUIRE(fixture.output.installed.size() == 4);
  CHECK(fixture.output.installed[3]->filter.stages.back().interval == 7);
  CHECK(fixture.output.installed[3]->filter.stages.back().first_step == 51);
  for (std::uint32_t server = 0; server < 2; ++server) fixture.root.OnPlanAck(server, 4);
  // What it is already costs nothing; who has left is not asked.
  fixture.root.OnAskInterval(0, 7);
  REQUIRE(asked().empty());
  fixture.root.OnAskInterval(0, 1);
  REQUIRE(asked() == std::vector<PeerId>{kWorkerPeer});
  REQUIRE(fixture.output.failures.empty());

  fixture.root.OnAskInterval(1, 4);
  fixture.root.OnAskInterval(0, 257);
  REQUIRE(fixture.output.failures.size() == 2);
  CHECK(fixture.output.failures[0].message() ==
        "worker 1 at 10.0.0.2 (host n1, pid 4001) asks for the interval 4, expected worker 0 and 1 "
        "to 256, with a filter whose interval is auto");
  Fixture fixed(1);
  fixed.Begin();
  fixed.root.OnAskInterval(0, 4);
  REQUIRE(fixed.output.failures.size() == 1);
}

TEST_CASE("open calls have the age of the first who came, and who is here and missing",
          "[server][unit]") {
  Fixture fixture(3);
  fixture.Begin();
  REQUIRE(fixture.root.OpenCalls().empty());
  const auto t0 = fixture.now;
  fixture.root.OnBarrier(0, 0, 0, t0 + milliseconds(500));
  fixture.Declare(1, 0, {Fixture::Tensor("w", 10)});
  fixture.now = t0 + milliseconds(3000);
  fixture.Declare(2, 0, {Fixture::Tensor("w", 10)});  // a later one makes it no younger
  const std::vector<OpenCall> calls = fixture.root.OpenCalls();
  REQUIRE(calls.size() == 2);
  REQUIRE(calls[0].what == "declaration of tensors, batch 0");
  REQUIRE(calls[0].since == t0);
  REQUIRE(calls[0].here == std::vector<std::uint32_t>{1, 2});
  REQUIRE(calls[0].missing == std::vector<std::uint32_t>{0});
  REQUIRE(calls[1].what == "barrier 0");
  REQUIRE(calls[1].since == t0 + milliseconds(500));
  REQUIRE(calls[1].here == std::vector<std::uint32_t>{0});
  REQUIRE(calls[1].missing == std::vector<std::uint32_t>{1, 2});
  // Were one of them gone, the others would wait for it.
  REQUIRE(fixture.root.DescribeCallThatWaitsFor(0) == "a declaration of tensors");
  REQUIRE(fixture.root.DescribeCallThatWaitsFor(1) == "a barrier");

  fixture.Declare(0, 0, {Fixture::Tensor("w", 10)});
  fixture.root.OnPlanAck(0, 1);
  REQUIRE(fixture.root.OpenCalls().size() == 1);
  REQUIRE(fixture.root.DescribeCallThatWaitsFor(0).empty());
  fixture.root.OnBarrier(1, 0, 0, fixture.now);
  fixture.root.OnBarrier(2, 0, 0, fixture.now);
  REQUIRE(fixture.root.OpenCalls().empty());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    REQUIRE(fixture.root.DescribeCallThatWaitsFor(rank).empty());
  }
  // The next ones have an age of their own.
  fixture.root.OnBarrier(1, 1, 0, t0 + milliseconds(9000));
  fixture.root.OnBarrier(2, 1, 0, t0 + milliseconds(9500));
  REQUIRE(fixture.root.OpenCalls().at(0).what == "barrier 1");
  REQUIRE(fixture.root.OpenCalls().at(0).since == t0 + milliseconds(9000));
  REQUIRE(fixture.output.failures.empty());
}

}  // namespace
}  // namespace gradwire
