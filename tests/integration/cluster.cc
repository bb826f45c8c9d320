#include "tests/integration/cluster.h"

#include <fmt/format.h>

#include <cstdlib>
#include <iostream>
#include <mutex>

namespace gradwire::testing {

Cluster::Cluster(Config config, TransportKind kind)
    : config_(std::move(config)), kind_(kind), network_(MakeInprocNetwork()) {
  config_.endpoint = kind == TransportKind::kInproc ? "inproc://s0l0" : "tcp://127.0.0.1:0";
  outcomes_.resize(config_.job.servers);
  servers_.reserve(config_.job.servers);
  for (std::uint32_t s = 0; s < config_.job.servers; ++s) {
    auto server = [&] {
      if (kind == TransportKind::kZmq) return Server::Start(config_, s);
      std::vector<std::unique_ptr<Loop>> loops;
      std::vector<std::string> addresses;
      for (std::uint32_t l = 0; l < config_.server.lanes; ++l) {
        loops.push_back(network_->MakeLoop());
        addresses.push_back(fmt::format("inproc://s{}l{}", s, l));
      }
      return Server::Start(config_, s, std::move(loops), std::move(addresses));
    }();
    INFO(server.status().ToString());
    REQUIRE(server.ok());
    servers_.push_back(std::move(server).value());
    if (s == 0) {
      root_address_ = servers_[0]->address();
      config_.endpoint = root_address_;
    }
    Server* const running = servers_.back().get();
    threads_.emplace_back([this, s, running] { outcomes_[s] = running->Run(); });
  }
}

Cluster::~Cluster() {
  for (auto& server : servers_) server->Stop();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

Result<std::unique_ptr<Client>> Cluster::ConnectWorker(std::uint32_t rank, const Config& config) {
  if (kind_ == TransportKind::kZmq) return Client::Connect(config, rank);
  return Client::Connect(config, rank, network_->MakeLoop());
}

void Cluster::Run(const std::function<void(Client&)>& body) {
  std::vector<std::thread> workers;
  Failures failures;
  for (std::uint32_t rank = 0; rank < config_.job.workers; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = ConnectWorker(rank);
      if (!failures.Ok(client.status(), fmt::format("worker {} connects", rank))) return;
      body(**client);
      failures.Ok((*client)->Close(), fmt::format("worker {} closes", rank));
    });
  }
  for (std::thread& worker : workers) worker.join();
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

std::vector<Status> Cluster::JoinServers() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return outcomes_;
}

Config TestConfig(std::uint32_t workers, std::uint32_t servers) {
  Config config;
  config.job.id = "test";
  config.job.workers = workers;
  config.job.servers = servers;
  config.timeouts.start_ms = 20000;
  config.timeouts.stall_warn_ms = 10000;
  config.timeouts.stall_stop_ms = 30000;
  config.timeouts.dead_after_ms = 10000;
  config.partition.bytes = 64 * 1024;
  config.partition.fuse_below = 4096;
  config.partition.credit = 256 * 1024;
  config.compression.min_bytes = 0;
  return config;
}

void SetCompressor(Config& config, const std::string& written_spec) {
  const auto spec = ParseCompressorSpec(written_spec);
  REQUIRE(spec.ok());
  config.compression.uplink.compressor = *spec;
  config.compression.downlink.compressor = *spec;
}

void Failures::Add(const std::string& text) {
  const std::lock_guard lock(mu_);
  if (text_.size() < 4000) text_ += text + "\n";
}

std::string Failures::Take() {
  const std::lock_guard lock(mu_);
  return std::exchange(text_, {});
}

TensorDeclaration Tensor(const std::string& name, std::uint64_t elements, DType dtype,
                         ReduceOp op) {
  TensorDeclaration declaration;
  declaration.name = name;
  declaration.dtype = dtype;
  declaration.shape = {elements};
  declaration.op = op;
  return declaration;
}

Status PushPull(Client& client, TensorId tensor, ByteView input, MutableBytes output) {
  const auto handle = client.PushPullAsync(tensor, input, output);
  if (!handle.ok()) return handle.status();
  return client.Wait(*handle);
}

std::vector<Handle> PushAll(Client& client, const std::vector<TensorId>& ids,
                            std::vector<std::vector<float>>& values, Failures& failures) {
  std::vector<Handle> handles;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    const auto handle = client.PushPullAsync(ids[t], InputOf(values[t]), OutputOf(values[t]));
    if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
  }
  failures.Ok(client.EndStep(), "end of step");
  for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
  return handles;
}

void AddResiduals(Client& client, const std::vector<TensorId>& ids, Doubles& residuals) {
  for (std::size_t t = 0; t < ids.size(); ++t) {
    const std::vector<float> residual = client.ReadResidual(ids[t]);
    for (std::size_t i = 0; i < residual.size(); ++i) residuals[t].at(i) += residual[i];
  }
}

void RequireConserved(std::span<const TensorDeclaration> tensors, const Doubles& delivered,
                      const Doubles& residuals, const Doubles& handed_over) {
  double held = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    CAPTURE(tensors[t].name);
    for (std::size_t i = 0; i < delivered[t].size(); ++i) {
      held += residuals[t][i];
      if (delivered[t][i] + residuals[t][i] == handed_over[t][i]) continue;
      CAPTURE(i, delivered[t][i], residuals[t][i], handed_over[t][i]);
      FAIL("an element is not conserved");
    }
  }
  REQUIRE(held > 0);
}

std::uint64_t TestSeed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("GRADWIRE_TEST_SEED");
    const std::uint64_t value = text != nullptr ? std::strtoull(text, nullptr, 10) : 20240611;
    std::cout << "GRADWIRE_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

}  // namespace gradwire::testing
