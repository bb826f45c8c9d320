#include "worker/trainer/local_client.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>

namespace gradwire::trainer {
namespace {

class LocalClient final : public Client {
 public:
  LocalClient() { plan_.num_workers = 1; }

  std::uint32_t rank() const override { return 0; }
  std::uint32_t num_workers() const override { return 1; }

  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override {
    std::vector<TensorId> ids;
    for (const TensorDeclaration& tensor : batch) {
      ids.push_back({static_cast<std::uint32_t>(plan_.tensors.size())});
      plan_.tensors.push_back(tensor);
    }
    return ids;
  }

  Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) override {
    if (tensor.index >= plan_.tensors.size()) {
      return InvalidArgument(fmt::format("no tensor {} is declared", tensor.index));
    }
    const TensorDeclaration& declared = plan_.tensors[tensor.index];
    const std::uint64_t expected = declared.num_elements() * SizeOf(declared.dtype);
    if (input.size() != expected || output.size() != expected) {
      return InvalidArgument(fmt::format("{}: input of {} and output of {} bytes, expected {}",
                                         declared.name, input.size(), output.size(), expected));
    }
    if (input.data() != output.data()) std::memcpy(output.data(), input.data(), input.size());
    stats_.raw_push_bytes += input.size();
    stats_.raw_pull_bytes += output.size();
    return Handle{tensor, ++generation_};
  }

  Status Wait(const Handle& handle) override {
    static_cast<void>(handle);
    return Status::Ok();
  }
  bool Poll(const Handle& handle) override {
    static_cast<void>(handle);
    return true;
  }
  Status EndStep() override { return Status::Ok(); }
  Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) override {
    static_cast<void>(name);
    static_cast<void>(data);
    if (root != 0) return InvalidArgument(fmt::format("no rank {} to broadcast from", root));
    return Status::Ok();
  }
  Status Barrier() override { return Status::Ok(); }
  Status Close() override { return Status::Ok(); }

  std::shared_ptr<const Plan> plan() const override { return std::make_shared<const Plan>(plan_); }
  ClientStats stats() const override { return stats_; }

  Result<std::vector<std::byte>> SaveState() override { return std::vector<std::byte>(); }
  Status RestoreState(ByteView saved) override {
    if (saved.empty()) return Status::Ok();
    return InvalidArgument("a job without servers has no residuals to restore");
  }
  std::vector<float> ReadResidual(TensorId tensor) override {
    return std::vector<float>(
        tensor.index < plan_.tensors.size() ? plan_.tensors[tensor.index].num_elements() : 0);
  }

 private:
  Plan plan_;
  ClientStats stats_;
  std::uint64_t generation_ = 0;
};

}  // namespace

std::unique_ptr<Client> MakeLocalClient() { return std::make_unique<LocalClient>(); }

}  // namespace gradwire::trainer
