// replay SPEC INPUT OUTPUT SAVE_AT: runs a method over gradients and pulled values from a file.
//
// INPUT: u32 tensors, u32 steps; for each tensor u64 n, u64 decays; f64 rates[steps]; f32
// parameters of each tensor; then for each step and tensor f32 gradient[n], f32 pulled[n].
// OUTPUT: for each step and tensor f32 sent[n], f32 parameters[n].
// Before step SAVE_AT the optimizer is saved, and goes on in a new one (from 1; 0: never).
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "common/base/byte_io.h"
#include "compressors/methods/optimizer.h"

namespace gradwire {
namespace {

Status Run(const std::string& spec, ByteView input, std::uint64_t save_at,
           std::vector<std::byte>& output) {
  ByteReader reader(input);
  const auto take = [&](auto& value) {
    if (!reader.Take(value)) {
      std::fputs("the input is cut off\n", stderr);
      std::exit(2);
    }
  };
  const auto take_floats = [&](std::vector<float>& values) {
    for (float& value : values) take(value);
  };
  std::uint32_t tensors = 0;
  std::uint32_t steps = 0;
  take(tensors);
  take(steps);
  std::vector<std::vector<float>> parameters(tensors);
  std::vector<bool> decays(tensors);
  for (std::size_t i = 0; i < tensors; ++i) {
    std::uint64_t n = 0;
    std::uint64_t decay = 0;
    take(n);
    take(decay);
    parameters[i].resize(n);
    decays[i] = decay != 0;
  }
  std::vector<double> rates(steps);
  for (double& rate : rates) take(rate);
  for (auto& x : parameters) take_floats(x);

  const auto make = [&]() -> Result<std::unique_ptr<Optimizer>> {
    auto made = Optimizer::Create(spec, nullptr);
    if (!made.ok()) return made;
    for (std::size_t i = 0; i < tensors; ++i) {
      const auto added =
          made.value()->AddTensor(fmt::format("t{}", i), parameters[i].size(), decays[i]);
      if (!added.ok()) return added.status();
    }
    return made;
  };
  auto optimizer = make();
  GRADWIRE_RETURN_IF_ERROR(optimizer.status());
  for (std::size_t step = 0; step < steps; ++step) {
    if (save_at > 0 && step == save_at) {
      const auto saved = optimizer.value()->Save();
      GRADWIRE_RETURN_IF_ERROR(saved.status());
      optimizer = make();
      GRADWIRE_RETURN_IF_ERROR(optimizer.status());
      GRADWIRE_RETURN_IF_ERROR(optimizer.value()->Restore(*saved));
    }
    for (std::size_t i = 0; i < tensors; ++i) {
      std::vector<float> gradient(parameters[i].size());
      std::vector<float> pulled(parameters[i].size());
      take_floats(gradient);
      take_floats(pulled);
      GRADWIRE_RETURN_IF_ERROR(optimizer.value()->Send(i, gradient));
      const auto updated = optimizer.value()->Update(i, pulled, rates[step], parameters[i]);
      GRADWIRE_RETURN_IF_ERROR(updated.status());
      AppendBytes(output, AsBytes(std::span(gradient)));
      AppendBytes(output, AsBytes(std::span(parameters[i])));
    }
    optimizer.value()->EndStep();
  }
  return Status::Ok();
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: replay SPEC INPUT OUTPUT SAVE_AT\n", stderr);
    return 2;
  }
  std::ifstream in(argv[2], std::ios::binary);
  const std::vector<char> input{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::byte> output;
  const gradwire::Status status =
      gradwire::Run(argv[1], std::as_bytes(std::span(input)), std::stoull(argv[4]), output);
  if (!status.ok()) {
    std::fputs((status.ToString() + "\n").c_str(), stderr);
    return 1;
  }
  std::ofstream out(argv[3], std::ios::binary);
  out.write(reinterpret_cast<const char*>(output.data()),
            static_cast<std::streamsize>(output.size()));
  return out ? 0 : 2;
}
