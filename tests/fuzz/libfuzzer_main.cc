#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

#include "tests/fuzz/fuzz_target.h"

// What libFuzzer, which brings main, calls. GRADWIRE_FUZZ_TARGET says which of the program's
// targets.

namespace {

std::string& Target() {
  static std::string target;
  return target;
}

gradwire::ByteView View(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const std::byte*>(data), size};
}

}  // namespace

extern "C" {

std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

int LLVMFuzzerInitialize(int*, char***) {
  const char* const name = std::getenv("GRADWIRE_FUZZ_TARGET");
  Target() = name == nullptr ? "" : name;
  const std::vector<std::string> targets = gradwire::fuzz::Targets();
  if (std::find(targets.begin(), targets.end(), Target()) != targets.end()) return 0;
  std::cerr << "GRADWIRE_FUZZ_TARGET is '" << Target() << "', expected one of";
  for (const std::string& target : targets) std::cerr << ' ' << target;
  std::cerr << std::endl;
  std::exit(2);
}

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradwire::fuzz::Run(Target(), View(data, size));
  return 0;
}

std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                    unsigned int seed) {
  const gradwire::MutableBytes buffer(reinterpret_cast<std::byte*>(data), max_size);
  return gradwire::fuzz::Mutate(Target(), buffer, size, seed, LLVMFuzzerMutate);
}
}
