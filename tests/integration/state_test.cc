// Checkpoints: a job that is saved, stopped and started anew goes on as if nothing had happened.

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>

#include "common/base/random.h"
#include "tests/integration/cluster.h"
#include "worker/client/job_optimizer.h"

namespace gradwire::testing {
namespace {

constexpr std::uint32_t kWorkers = 2;

using States = std::vector<std::vector<std::byte>>;  // [rank]

// One that is cut into several units, some that are fused, one that travels as it is.
std::vector<TensorDeclaration> Tensors() {
  return {Tensor("big", 5000), Tensor("a", 300), Tensor("b", 200), Tensor("c", 77)};
}

Config JobConfig(const std::string& spec, std::uint32_t servers = 2) {
  Config config = TestConfig(kWorkers, servers);
  config.server.lanes = 2;
  config.partition.bytes = 1024 * sizeof(float);
  config.compression.min_bytes = 0;
  SetCompressor(config, spec);
  config.compression.uplink.feedback = FeedbackMode::kAuto;
  config.compression.downlink.feedback = FeedbackMode::kAuto;
  return config;
}

std::vector<float> Gradient(std::uint32_t rank, std::size_t tensor, int step, std::size_t count) {
  CounterRng rng(HashCombine(HashCombine(rank, tensor), static_cast<std::uint64_t>(step)));
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(rng.NextGaussian());
  return values;
}

struct Run {
  int begin = 0;
  int end = 0;
  const States* restored = nullptr;
  bool restores_first = false;  // before the tensors are declared
  bool saves = false;
};

/// Steps [begin, end) of a job; gives rank 0's averages, [step][tensor].
std::vector<std::vector<std::vector<float>>> Train(const Config& config, TransportKind kind,
                                                   const Run& run, States* saved,
                                                   Failures& failures) {
  std::vector<std::vector<std::vector<float>>> outs;
  const std::vector<TensorDeclaration> tensors = Tensors();
  Cluster cluster(config, kind);
  cluster.Run([&](Client& client) {
    const auto restore = [&] {
      if (run.restored != nullptr) {
        failures.Ok(client.RestoreState((*run.restored)[client.rank()]), "restore");
      }
    };
    if (run.restores_first) restore();
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    if (!run.restores_first) restore();
    for (int step = run.begin; step < run.end; ++step) {
      std::vector<std::vector<float>> in;
      std::vector<std::vector<float>> out;
      std::vector<Handle> handles;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        in.push_back(Gradient(client.rank(), t, step, tensors[t].num_elements()));
        out.emplace_back(in.back().size());
      }
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const auto handle = client.PushPullAsync(ids.value()[t], InputOf(in[t]), OutputOf(out[t]));
        if (!failures.Ok(handle.status(), "push")) return;
        handles.push_back(*handle);
      }
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
      if (client.rank() == 0) outs.push_back(out);
    }
    if (!run.saves) return;
    const auto state = client.SaveState();
    if (failures.Ok(state.status(), "save")) (*saved)[client.rank()] = state.value();
  });
  for (const Status& status : cluster.JoinServers()) failures.Ok(status, "server");
  return outs;
}

/// As Cluster::Run for a job that ends with an error.
void RunAndFail(Cluster& cluster, const std::function<void(Client&)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      const auto client = cluster.ConnectWorker(rank);
      if (client.ok()) body(**client);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RequireNone(Failures& failures) {
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

}  // namespace

TEST_CASE("a job that is saved, stopped and started anew goes on bit for bit",
          "[integration][state]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::string spec = GENERATE("none", "fp16", "onebit", "topk(ratio=0.05)");
  const std::uint64_t warmup = GENERATE(std::uint64_t{0}, std::uint64_t{7});
  const bool restores_first = GENERATE(false, true);
  CAPTURE(ToString(kind), spec, warmup, restores_first);
  Config config = JobConfig(spec);
  config.compression.warmup_steps = warmup;
  Failures failures;
  States saved(kWorkers);
  const auto whole = Train(config, kind, {0, 10}, nullptr, failures);
  const auto first = Train(config, kind, {0, 5, nullptr, false, true}, &saved, failures);
  RequireNone(failures);
  const auto second = Train(config, kind, {5, 10, &saved, restores_first}, nullptr, failures);
  RequireNone(failures);
  for (std::size_t step = 0; step < 10; ++step) {
    CAPTURE(step);
    REQUIRE((step < 5 ? first[step] : second[step - 5]) == whole[step]);
  }
}

TEST_CASE("a state that was saved again before anything used it is the same",
          "[integration][state]") {
  const Config config = JobConfig("onebit");
  Failures failures;
  States saved(kWorkers);
  States again(kWorkers);
  const auto whole = Train(config, TransportKind::kInproc, {0, 10}, nullptr, failures);
  Train(config, TransportKind::kInproc, {0, 5, nullptr, false, true}, &saved, failures);
  Cluster cluster(config, TransportKind::kInproc);
  cluster.Run([&](Client& client) {
    failures.Ok(client.RestoreState(saved[client.rank()]), "restore");
    const auto state = client.SaveState();
    if (failures.Ok(state.status(), "save")) again[client.rank()] = state.value();
  });
  const auto second =
      Train(config, TransportKind::kInproc, {5, 10, &again, true}, nullptr, failures);
  RequireNone(failures);
  for (std::size_t step = 5; step < 10; ++step) REQUIRE(second[step - 5] == whole[step]);
}

TEST_CASE("a running job goes back to an earlier state exactly", "[integration][state]") {
  Config config = JobConfig("onebit");
  config.compression.warmup_steps =
      GENERATE(std::uint64_t{0}, std::uint64_t{2});  // saved without residuals, and with
  Failures failures;
  std::vector<std::vector<float>> outs;  // rank 0's of the first tensor
  const std::vector<TensorDeclaration> tensors = Tensors();
  Cluster cluster(config, TransportKind::kInproc);
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    const auto step = [&](int number) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        auto values = Gradient(client.rank(), t, number, tensors[t].num_elements());
        const auto handle = client.PushPullAsync(ids.value()[t], InputOf(values), OutputOf(values));
        if (!failures.Ok(handle.status(), "push")) return;
        if (t > 0) failures.Ok(client.EndStep(), "end of step");
        failures.Ok(client.Wait(*handle), "wait");
        if (t == 0 && client.rank() == 0) outs.push_back(values);
      }
    };
    step(0);
    const auto state = client.SaveState();
    if (!failures.Ok(state.status(), "save")) return;
    for (int number = 1; number < 5; ++number) step(number);
    failures.Ok(client.RestoreState(*state), "restore");
    for (int number = 1; number < 5; ++number) step(number);
  });
  RequireNone(failures);
  REQUIRE(outs.size() == 9);
  for (std::size_t i = 1; i < 5; ++i) REQUIRE(outs[i] == outs[i + 4]);
}

TEST_CASE("residuals move to other cuts, servers and compressors", "[integration][state]") {
  Failures failures;
  States saved(kWorkers);
  Train(JobConfig("onebit"), TransportKind::kInproc, {0, 5, nullptr, false, true}, &saved,
        failures);
  Config other = JobConfig("topk(ratio=0.1)", 1);
  other.server.lanes = 1;
  other.partition.bytes = 700 * sizeof(float);
  other.partition.fuse_below = 0;
  std::map<std::string, std::vector<float>> before;
  std::map<std::string, std::vector<float>> after;
  const std::vector<TensorDeclaration> tensors = Tensors();
  {
    Cluster cluster(JobConfig("onebit"), TransportKind::kInproc);
    cluster.Run([&](Client& client) {
      failures.Ok(client.Declare(tensors).status(), "declare");
      failures.Ok(client.RestoreState(saved[client.rank()]), "restore");
    });
    for (const auto& tensor : tensors) {
      std::vector<float>& sum = before[tensor.name];
      sum.resize(tensor.num_elements());
      for (std::size_t s = 0; s < 2; ++s) {
        const auto part = cluster.server(s).ReadResidual(tensor.name, tensor.num_elements());
        for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
      }
    }
  }
  const bool restores_first = GENERATE(false, true);
  Cluster cluster(other, TransportKind::kZmq);
  cluster.Run([&](Client& client) {
    if (restores_first) failures.Ok(client.RestoreState(saved[client.rank()]), "restore");
    failures.Ok(client.Declare(tensors).status(), "declare");
    if (!restores_first) failures.Ok(client.RestoreState(saved[client.rank()]), "restore");
  });
  RequireNone(failures);
  for (const auto& tensor : tensors) {
    CAPTURE(tensor.name);
    REQUIRE(std::any_of(before[tensor.name].begin(), before[tensor.name].end(),
                        [](float value) { return value != 0; }));
    REQUIRE(cluster.server(0).ReadResidual(tensor.name, tensor.num_elements()) ==
            before[tensor.name]);
  }
}

TEST_CASE("a state that does not belong here is refused, to every rank", "[integration][state]") {
  Failures failures;
  States saved(kWorkers);
  Train(JobConfig("onebit"), TransportKind::kInproc, {0, 3, nullptr, false, true}, &saved,
        failures);
  RequireNone(failures);

  SECTION("of another number of workers, and the job goes on") {
    Config config = JobConfig("onebit");
    config.job.workers = 1;
    Cluster cluster(config, TransportKind::kInproc);
    cluster.Run([&](Client& client) {
      const Status status = client.RestoreState(saved[0]);
      failures.Expect(
          status.code() == StatusCode::kInvalidArgument &&
              status.message().find("of a job of 2 workers, this one has 1") != std::string::npos,
          status.ToString());
      failures.Ok(client.Barrier(), "barrier");
    });
  }
  SECTION("of another rank, damaged anywhere, of another step") {
    const int what = GENERATE(0, 1, 2, 3);
    States later(kWorkers);
    Train(JobConfig("onebit"), TransportKind::kInproc, {0, 4, nullptr, false, true}, &later,
          failures);
    std::mutex mu;
    std::vector<std::string> texts;
    Cluster cluster(JobConfig("onebit"), TransportKind::kInproc);
    RunAndFail(cluster, [&](Client& client) {
      failures.Ok(client.Barrier(), "barrier");  // both are connected
      std::vector<std::byte> mine = saved[client.rank()];
      if (client.rank() == 1) {
        if (what == 0) mine = saved[0];
        if (what == 1) mine[mine.size() / 2] ^= std::byte{16};
        if (what == 2) mine.resize(11);
        if (what == 3) mine = later[1];
      }
      const Status status = client.RestoreState(mine);
      const std::lock_guard lock(mu);
      texts.push_back(status.message());
    });
    const std::vector<std::string> expected = {
        "rank 1 restores the state of rank 0", "the saved state is damaged: checksum",
        "the saved state is damaged: 11 bytes are too few", "state of different steps"};
    REQUIRE(texts.size() == 2);
    for (const std::string& text : texts) {
      CAPTURE(what, text);
      REQUIRE(text.find(expected[static_cast<std::size_t>(what)]) != std::string::npos);
    }
  }
  SECTION("while something is in flight") {
    std::atomic<bool> tried = false;
    Cluster cluster(JobConfig("onebit"), TransportKind::kInproc);
    cluster.Run([&](Client& client) {
      const auto ids = client.Declare(Tensors());
      if (!failures.Ok(ids.status(), "declare")) return;
      if (client.rank() == 1) tried.wait(false);
      std::vector<float> values(5000);
      const auto handle = client.PushPullAsync(ids.value()[0], InputOf(values), OutputOf(values));
      if (!failures.Ok(handle.status(), "push")) return;
      if (client.rank() == 0) {
        for (const Status& status : {client.SaveState().status(), client.RestoreState(saved[0])}) {
          failures.Expect(status.message().find("under way") != std::string::npos,
                          status.ToString());
        }
        tried = true;
        tried.notify_all();
      }
      failures.Ok(client.Wait(*handle), "wait");
    });
  }
  RequireNone(failures);
}

TEST_CASE("a method that freezes is not run without its state where the job's warm-up is over",
          "[integration][state][method]") {
  const std::string spec = GENERATE("onebit", "none");
  CAPTURE(spec);
  Config config = JobConfig(spec);
  config.compression.warmup_steps = 3;
  constexpr std::size_t kElements = 5000;
  const std::vector<TensorDeclaration> tensors = {Tensor("w", kElements)};
  States job_states(kWorkers);
  States method_states(kWorkers);
  Failures failures;
  // What a program does, up to `steps`; the error of the first Send that is refused.
  const auto train = [&](Client& client, JobOptimizer& optimizer, TensorId id, int steps) {
    std::vector<float> x(kElements, 1.0F);
    for (int step = 0; step < steps; ++step) {
      std::vector<float> g(kElements);
      for (std::size_t i = 0; i < kElements; ++i) g[i] = static_cast<float>(i % 7) - 2.5F;
      GRADWIRE_RETURN_IF_ERROR(optimizer.Send(id, g));
      const auto handle = client.PushPullAsync(id, InputOf(g), OutputOf(g));
      GRADWIRE_RETURN_IF_ERROR(handle.status());
      GRADWIRE_RETURN_IF_ERROR(client.Wait(*handle));
      GRADWIRE_RETURN_IF_ERROR(optimizer.Update(*handle, g, 0.01, x).status());
      GRADWIRE_RETURN_IF_ERROR(client.EndStep());
      optimizer.EndStep();
    }
    return Status::Ok();
  };
  const auto run = [&](const std::function<void(Client&, JobOptimizer&, TensorId)>& body) {
    Cluster cluster(config, TransportKind::kInproc);
    cluster.Run([&](Client& client) {
      const auto ids = client.Declare(tensors);
      if (!failures.Ok(ids.status(), "declare")) return;
      const auto optimizer = JobOptimizer::Create(
          client, spec == "none" ? "onebit_adam(freeze_step=3)" : "onebit_adam",
          config.compression);
      if (!failures.Ok(optimizer.status(), "create")) return;
      failures.Ok((*optimizer)->AddTensor(ids->front(), "w", kElements, true), "add");
      body(client, **optimizer, ids->front());
    });
    RequireNone(failures);
  };
  run([&](Client& client, JobOptimizer& optimizer, TensorId id) {
    failures.Ok(train(client, optimizer, id, 5), "train");
    const auto job = client.SaveState();
    const auto method = optimizer.state().Save();
    if (!failures.Ok(job.status(), "save") || !failures.Ok(method.status(), "save")) return;
    job_states[client.rank()] = *job;
    method_states[client.rank()] = *method;
  });
  run([&](Client& client, JobOptimizer& optimizer, TensorId id) {
    failures.Ok(client.RestoreState(job_states[client.rank()]), "restore");
    failures.Expect(client.step() == 5, "the job's step");
    const Status alone = train(client, optimizer, id, 1);
    if (spec == "none") {
      failures.Ok(alone, "nothing is compressed, so that nothing is wrong");
      return;
    }
    failures.Expect(
        alone.message() ==
            "method onebit_adam is in step 0 of its warm-up of 3, and the job in step 5, in which "
            "it compresses: was the job's state restored without that of the method, or are steps "
            "of the job ended that are none of the method?",
        alone.ToString());
    failures.Ok(optimizer.Restore(method_states[client.rank()]), "restore the method");
    failures.Ok(train(client, optimizer, id, 2), "train");
  });
}

}  // namespace gradwire::testing
