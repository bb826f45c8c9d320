#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "worker/client/client.h"

namespace gradwire::trainer {

/// What the fake clients share: declarations, and nothing for what the trainer doesn't use.
class FakeClientBase : public Client {
 public:
  FakeClientBase(std::uint32_t rank, std::uint32_t num_workers)
      : rank_(rank), num_workers_(num_workers) {}

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t num_workers() const override { return num_workers_; }
  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override {
    std::vector<TensorId> ids;
    for (const TensorDeclaration& tensor : batch) {
      ids.push_back({static_cast<std::uint32_t>(plan_.tensors.size())});
      plan_.tensors.push_back(tensor);
    }
    return ids;
  }
  Status Barrier() override { return Status::Ok(); }
  Status Close() override { return Status::Ok(); }
  std::shared_ptr<const Plan> plan() const override { return std::make_shared<const Plan>(plan_); }
  ClientStats stats() const override { return stats_; }
  Result<std::vector<std::byte>> SaveState() override { return std::vector<std::byte>(); }
  Status RestoreState(ByteView saved) override {
    static_cast<void>(saved);
    return Status::Ok();
  }
  std::vector<float> ReadResidual(TensorId tensor) override {
    static_cast<void>(tensor);
    return {};
  }

 protected:
  const std::string& NameOf(TensorId tensor) const { return plan_.tensors[tensor.index].name; }

  const std::uint32_t rank_;
  const std::uint32_t num_workers_;
  Plan plan_;
  ClientStats stats_;
};

/// One worker that gets its own gradients back, but not before Wait: until then the output is NaN.
/// Writes down what happens, and lets a test interfere.
class RecordingClient final : public FakeClientBase {
 public:
  RecordingClient() : FakeClientBase(0, 1) {}

  /// "push dense0.weight", "wait dense0.weight", "end".
  std::vector<std::string> events;
  /// The learning rates that it was told.
  std::vector<double> rates;
  /// Asked at every Wait; an error is returned from it.
  std::function<Status(const std::string& name)> on_wait;
  /// May change what comes back.
  std::function<void(const std::string& name, std::span<float>)> on_result;
  /// Tensors in flight; each test ends with none.
  std::size_t in_flight() const { return flying_.size(); }

  Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) override {
    if (flying_.contains(tensor.index)) return InvalidArgument("already in flight");
    events.push_back("push " + NameOf(tensor));
    Flight flight;
    flight.output = {reinterpret_cast<float*>(output.data()), output.size() / sizeof(float)};
    flight.values.resize(flight.output.size());
    std::memcpy(flight.values.data(), input.data(), input.size());
    std::fill(flight.output.begin(), flight.output.end(), std::numeric_limits<float>::quiet_NaN());
    flying_[tensor.index] = std::move(flight);
    stats_.raw_push_bytes += input.size();
    stats_.raw_pull_bytes += output.size();
    // As if half of it had gone over a wire.
    stats_.traffic.sent_bytes += input.size() / 2;
    stats_.traffic.received_bytes += output.size() / 2;
    return Handle{tensor, ++generation_};
  }

  Status Wait(const Handle& handle) override {
    const std::string& name = NameOf(handle.tensor);
    events.push_back("wait " + name);
    const auto found = flying_.find(handle.tensor.index);
    if (found == flying_.end()) return InvalidArgument("not in flight");
    Flight flight = std::move(found->second);
    flying_.erase(found);
    if (on_wait) GRADWIRE_RETURN_IF_ERROR(on_wait(name));
    std::copy(flight.values.begin(), flight.values.end(), flight.output.begin());
    if (on_result) on_result(name, flight.output);
    return Status::Ok();
  }
  bool Poll(const Handle& handle) override { return !flying_.contains(handle.tensor.index); }
  Status SetLearningRate(std::span<const TensorId> tensors, double rate) override {
    if (tensors.size() != plan_.tensors.size()) return InvalidArgument("not of all tensors");
    if (!flying_.empty()) return InvalidArgument("not before the pushes");
    rates.push_back(rate);
    return Status::Ok();
  }
  Status EndStep() override {
    events.emplace_back("end");
    return Status::Ok();
  }
  Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) override {
    static_cast<void>(name);
    static_cast<void>(root);
    stats_.traffic.sent_bytes += data.size();
    return Status::Ok();
  }

 private:
  struct Flight {
    std::span<float> output;
    std::vector<float> values;
  };
  std::map<std::uint32_t, Flight> flying_;
  std::uint64_t generation_ = 0;
};

/// Where the AveragingClients of one job meet. Every wait ends after a minute.
class Meeting {
 public:
  explicit Meeting(std::uint32_t num_workers) : num_workers_(num_workers) {}
  std::uint32_t num_workers() const { return num_workers_; }

  void Contribute(const std::string& what, std::uint32_t rank, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mu_);
    auto& parts = parts_[what];
    parts[rank].assign(bytes.begin(), bytes.end());
    arrived_.notify_all();
  }

  /// All contributions in rank order once `needed` ranks have given theirs, empty after a minute.
  std::vector<std::vector<std::byte>> Collect(const std::string& what, std::size_t needed) {
    std::unique_lock lock(mu_);
    if (!arrived_.wait_for(lock, std::chrono::minutes(1),
                           [&] { return parts_[what].size() >= needed; })) {
      return {};
    }
    std::vector<std::vector<std::byte>> all;
    for (const auto& [rank, bytes] : parts_[what]) all.push_back(bytes);
    return all;
  }

 private:
  const std::uint32_t num_workers_;
  std::mutex mu_;
  std::condition_variable arrived_;
  std::map<std::string, std::map<std::uint32_t, std::vector<std::byte>>> parts_;
};

/// One of several workers in threads of one process; gradients are averaged in rank order.
class AveragingClient final : public FakeClientBase {
 public:
  AveragingClient(Meeting& meeting, std::uint32_t rank)
      : FakeClientBase(rank, meeting.num_workers()), meeting_(meeting) {}

  /// May spoil what a broadcast delivers.
  std::function<void(const std::string& name, MutableBytes)> on_broadcast;

  Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) override {
    const std::uint64_t round = ++rounds_[tensor.index];
    meeting_.Contribute(RoundName(tensor, round), rank_, input);
    outputs_[tensor.index] = output;
    return Handle{tensor, round};
  }
  Status Wait(const Handle& handle) override {
    const auto parts = meeting_.Collect(RoundName(handle.tensor, handle.generation), num_workers_);
    if (parts.empty()) return Timeout("a worker is missing");
    const MutableBytes output = outputs_[handle.tensor.index];
    for (std::size_t at = 0; at < output.size(); at += sizeof(float)) {
      float sum = 0.0F;
      for (const auto& part : parts) sum += LoadLe<float>(part.data() + at);
      StoreLe(output.data() + at, sum / static_cast<float>(num_workers_));
    }
    complete_[handle.tensor.index] = handle.generation;
    return Status::Ok();
  }
  bool Poll(const Handle& handle) override {
    return complete_[handle.tensor.index] == handle.generation;
  }
  Status EndStep() override { return Status::Ok(); }
  Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) override {
    if (rank_ == root) {
      meeting_.Contribute(name, root, data);
    } else {
      const auto parts = meeting_.Collect(name, 1);
      if (parts.empty()) return Timeout("the root is missing");
      if (parts[0].size() != data.size()) return InvalidArgument("sizes differ");
      std::copy(parts[0].begin(), parts[0].end(), data.begin());
    }
    if (on_broadcast) on_broadcast(name, data);
    return Status::Ok();
  }

 private:
  std::string RoundName(TensorId tensor, std::uint64_t round) const {
    return NameOf(tensor) + "#" + std::to_string(round);
  }

  Meeting& meeting_;
  std::map<std::uint32_t, std::uint64_t> rounds_;
  std::map<std::uint32_t, std::uint64_t> complete_;  // the rounds that were waited for
  std::map<std::uint32_t, MutableBytes> outputs_;
};

}  // namespace gradwire::trainer
