#include "compressors/methods/optimizer.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "common/base/byte_io.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/methods/kernels.h"

namespace gradwire {
namespace {

constexpr std::string_view kMagic = "GWMETHOD";
constexpr std::uint32_t kVersion = 1;

constexpr std::string_view kDamaged = "the saved method is damaged";

Status Damaged(std::string_view what) { return CorruptData(fmt::format("{}: {}", kDamaged, what)); }

}  // namespace

Result<std::unique_ptr<Optimizer>> Optimizer::Create(std::string_view written_spec,
                                                     const CompressionRules* job) {
  const auto spec = ParseMethodSpec(written_spec);
  if (!spec.ok()) return spec.status();
  auto method = CreateMethod(*spec, job);
  if (!method.ok()) return method.status();
  return std::unique_ptr<Optimizer>(new Optimizer(spec->name, std::move(method).value()));
}

Status Optimizer::CheckNew(std::string_view name) const {
  for (const Tensor& other : tensors_) {
    if (other.name == name) {
      return InvalidArgument(fmt::format("method {}: tensor '{}' is there already, with {} values",
                                         name_, name, other.n));
    }
  }
  return Status::Ok();
}

Result<std::size_t> Optimizer::AddTensor(std::string_view name, std::size_t n, bool decays) {
  GRADWIRE_RETURN_IF_ERROR(CheckNew(name));
  Tensor tensor;
  tensor.name = name;
  tensor.n = n;
  tensor.state.decays = decays;
  tensor.state.arrays.assign(method_->num_arrays(), std::vector<float>(n));
  tensors_.push_back(std::move(tensor));
  return tensors_.size() - 1;
}

Status Optimizer::Check(std::size_t tensor, std::size_t n, std::string_view what) const {
  if (tensor >= tensors_.size()) {
    return InvalidArgument(fmt::format("method {}: there is no tensor {}, expected below {}", name_,
                                       tensor, tensors_.size()));
  }
  if (n != tensors_[tensor].n) {
    return InvalidArgument(fmt::format("method {}: {} of tensor '{}' has {} values, expected {}",
                                       name_, what, tensors_[tensor].name, n, tensors_[tensor].n));
  }
  return Status::Ok();
}

Status Optimizer::Send(std::size_t tensor, std::span<float> gradient) {
  GRADWIRE_RETURN_IF_ERROR(Check(tensor, gradient.size(), "the gradient"));
  Tensor& t = tensors_[tensor];
  if (t.is_sent) {
    return InvalidArgument(
        fmt::format("method {}: tensor '{}' is sent again before its update", name_, t.name));
  }
  const ScopedFloatMode ieee;
  const std::uint64_t freeze_step = method_->traits().freeze_step;
  if (freeze_step > 0 && step_ >= freeze_step && !t.state.is_frozen) {
    if (t.state.updates == 0) {
      return InvalidArgument(fmt::format(
          "method {}: tensor '{}' had no update in the {} steps of the warm-up, so there is "
          "nothing to freeze",
          name_, t.name, freeze_step));
    }
    method_->Freeze(t.state);
    t.state.is_frozen = true;
  }
  method_->Send(t.state, gradient);
  t.is_sent = true;
  return Status::Ok();
}

Result<Optimizer::Outcome> Optimizer::Update(std::size_t tensor, std::span<const float> pulled,
                                             double rate, std::span<float> parameters) {
  GRADWIRE_RETURN_IF_ERROR(Check(tensor, pulled.size(), "what was pulled"));
  GRADWIRE_RETURN_IF_ERROR(Check(tensor, parameters.size(), "the parameters"));
  Tensor& t = tensors_[tensor];
  if (!t.is_sent) {
    return InvalidArgument(
        fmt::format("method {}: tensor '{}' is updated, but was not sent", name_, t.name));
  }
  if (!std::isfinite(rate) || rate < 0) {
    return InvalidArgument(
        fmt::format("method {}: the learning rate of tensor '{}' is {}, "
                    "expected a finite one of 0 or more",
                    name_, t.name, rate));
  }
  const ScopedFloatMode ieee;
  t.is_sent = false;
  if (!std::isfinite(method_kernels::SumSquares(t.n, pulled.data()))) {
    ++t.skipped;
    return Outcome::kSkipped;
  }
  ++t.state.updates;
  method_->Update(t.state, pulled, rate, parameters);
  return Outcome::kUpdated;
}

Status Optimizer::Cancel(std::size_t tensor) {
  GRADWIRE_RETURN_IF_ERROR(
      Check(tensor, tensor < tensors_.size() ? tensors_[tensor].n : 0, "the gradient"));
  tensors_[tensor].is_sent = false;
  return Status::Ok();
}

std::uint64_t Optimizer::updates() const {
  std::uint64_t sum = 0;
  for (const Tensor& t : tensors_) sum += t.state.updates;
  return sum;
}

std::uint64_t Optimizer::skipped() const {
  std::uint64_t sum = 0;
  for (const Tensor& t : tensors_) sum += t.skipped;
  return sum;
}

Result<std::vector<std::byte>> Optimizer::Save() const {
  std::vector<std::byte> bytes;
  AppendBytes(bytes, AsBytes(kMagic));
  AppendLe(bytes, kVersion);
  AppendText(bytes, name_);
  AppendLe(bytes, step_);
  AppendLe(bytes, static_cast<std::uint64_t>(tensors_.size()));
  for (const Tensor& t : tensors_) {
    if (t.is_sent) {
      return InvalidArgument(fmt::format(
          "method {}: tensor '{}' was sent and waits for its update, so nothing can be saved",
          name_, t.name));
    }
    AppendText(bytes, t.name);
    AppendLe(bytes, static_cast<std::uint64_t>(t.n));
    AppendLe(bytes, t.skipped);
    AppendLe(bytes, t.state.updates);
    AppendLe(bytes, static_cast<std::uint8_t>(t.state.is_frozen));
    for (const double number : t.state.numbers) AppendLe(bytes, number);
    for (const std::vector<float>& array : t.state.arrays) {
      AppendBytes(bytes, AsBytes(std::span(array)));
    }
  }
  AppendLe(bytes, Checksum(bytes));
  return bytes;
}

Status Optimizer::Restore(ByteView saved) {
  auto opened = OpenSaved(saved, kMagic, kDamaged);
  if (!opened.ok()) return opened.status();
  ByteReader& reader = *opened;
  std::uint32_t version = 0;
  std::string method;
  std::uint64_t step = 0;
  std::uint64_t count = 0;
  if (!reader.Take(version)) return Damaged("the version is missing");
  if (version != kVersion) {
    return Damaged(fmt::format("version is {}, expected {}", version, kVersion));
  }
  if (!reader.TakeText(method) || !reader.Take(step) || !reader.Take(count)) {
    return Damaged("its head is cut off");
  }
  if (method != name_) {
    return InvalidArgument(
        fmt::format("the saved state is of method {}, expected {}", method, name_));
  }
  if (count != tensors_.size()) {
    return InvalidArgument(fmt::format("method {}: the saved state has {} tensors, expected {}",
                                       name_, count, tensors_.size()));
  }
  std::vector<Tensor> restored = tensors_;
  std::vector<bool> is_restored(restored.size(), false);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string name;
    std::uint64_t n = 0;
    if (!reader.TakeText(name) || !reader.Take(n)) {
      return Damaged(fmt::format("tensor {} of {} is cut off", i, count));
    }
    std::size_t at = 0;
    while (at < restored.size() && restored[at].name != name) ++at;
    if (at == restored.size() || is_restored[at]) {
      return InvalidArgument(
          fmt::format("method {}: the saved state has a tensor '{}' that {}", name_, name,
                      at == restored.size() ? "was not added" : "it has had before"));
    }
    Tensor& t = restored[at];
    if (n != t.n) {
      return InvalidArgument(
          fmt::format("method {}: tensor '{}' has {} values in the saved state, expected {}", name_,
                      name, n, t.n));
    }
    is_restored[at] = true;
    t.is_sent = false;
    std::uint8_t is_frozen = 0;
    bool is_whole =
        reader.Take(t.skipped) && reader.Take(t.state.updates) && reader.Take(is_frozen);
    for (double& number : t.state.numbers) is_whole = is_whole && reader.Take(number);
    for (std::vector<float>& array : t.state.arrays) {
      ByteView floats;
      is_whole = is_whole && reader.Take(n * sizeof(float), floats);
      if (is_whole && n > 0) std::memcpy(array.data(), floats.data(), floats.size());
    }
    if (!is_whole) return Damaged(fmt::format("tensor '{}' is cut off", name));
    t.state.is_frozen = is_frozen != 0;
  }
  if (reader.left() > 0) return Damaged(fmt::format("{} bytes are left over", reader.left()));
  tensors_ = std::move(restored);
  step_ = step;
  return Status::Ok();
}

}  // namespace gradwire
