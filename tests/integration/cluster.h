#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/config/config.h"
#include "common/transport/inproc_loop.h"
#include "server/server.h"
#include "tests/catch.h"
#include "worker/client/client.h"

namespace gradwire::testing {

enum class TransportKind { kInproc, kZmq };

inline std::string ToString(TransportKind kind) {
  return kind == TransportKind::kInproc ? "inproc" : "zmq";
}

/// Servers and workers of one job inside this process, each server on threads of its own.
class Cluster {
 public:
  Cluster(Config config, TransportKind kind);
  ~Cluster();

  Config& config() { return config_; }
  InprocNetwork& network() { return *network_; }
  Server& server(std::size_t index) { return *servers_[index]; }
  std::string RootAddress() const { return root_address_; }

  /// Connects one worker; `config` lets one worker differ.
  Result<std::unique_ptr<Client>> ConnectWorker(std::uint32_t rank, const Config& config);
  Result<std::unique_ptr<Client>> ConnectWorker(std::uint32_t rank) {
    return ConnectWorker(rank, config_);
  }

  /// Connects all workers, runs `body` on a thread for each, closes them. Fails the test if a
  /// worker cannot connect.
  void Run(const std::function<void(Client&)>& body);

  /// What Server::Run of each server returned; call once all workers are gone.
  std::vector<Status> JoinServers();

 private:
  Config config_;
  const TransportKind kind_;
  std::unique_ptr<InprocNetwork> network_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<Status> outcomes_;
  std::vector<std::thread> threads_;
  std::string root_address_;
};

/// A configuration for tests: short deadlines, small units.
Config TestConfig(std::uint32_t workers, std::uint32_t servers = 1);

/// The same compressor both ways.
void SetCompressor(Config& config, const std::string& written_spec);

/// Threads may not use Catch2's macros: they note failures here and the test checks at the end.
class Failures {
 public:
  void Add(const std::string& text);
  bool Expect(bool condition, const std::string& text) {
    if (!condition) Add(text);
    return condition;
  }
  bool Ok(const Status& status, const std::string& what) {
    return Expect(status.ok(), what + ": " + status.ToString());
  }
  std::string Take();

 private:
  std::mutex mu_;
  std::string text_;
};

TensorDeclaration Tensor(const std::string& name, std::uint64_t elements,
                         DType dtype = DType::kFloat32, ReduceOp op = ReduceOp::kAverage);

template <typename T>
ByteView InputOf(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <typename T>
MutableBytes OutputOf(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// Push-pulls one tensor and waits.
Status PushPull(Client& client, TensorId tensor, ByteView input, MutableBytes output);

/// Push-pulls all tensors in place as one step, and waits for them.
std::vector<Handle> PushAll(Client& client, const std::vector<TensorId>& ids,
                            std::vector<std::vector<float>>& values, Failures& failures);

/// Sums over ranks and steps, [tensor][element].
using Doubles = std::vector<std::vector<double>>;

/// Adds what this client holds back of each tensor.
void AddResiduals(Client& client, const std::vector<TensorId>& ids, Doubles& residuals);

/// Fails the test unless delivered + residuals == handed_over, element by element, or if nothing
/// was held back: then there was nothing to conserve.
void RequireConserved(std::span<const TensorDeclaration> tensors, const Doubles& delivered,
                      const Doubles& residuals, const Doubles& handed_over);

/// The seed of this run: GRADWIRE_TEST_SEED, else a fixed one; printed once.
std::uint64_t TestSeed();

}  // namespace gradwire::testing
