#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/bytes.h"

// What a fuzz program is made of: one source that defines the functions below, and one of two
// mains: libfuzzer_main.cc searches for inputs that break a rule, replay_main.cc runs those that
// are known.

namespace gradwire::fuzz {

/// The program's name, which is its folder under tests/fuzz/corpus: "decoder".
std::string_view Program();

/// What it can fuzz, one at a time: "onebit", "topk".
std::vector<std::string> Targets();

/// Inputs to begin with. At least one for each target, the same every time.
std::vector<std::vector<std::byte>> Seeds(const std::string& target);

/// Runs one input of whatever bytes. Where a rule is broken, calls Fail.
void Run(const std::string& target, ByteView input);

/// Changes data[0 .. size) in place to at most max_size bytes and returns the new size.
using ByteMutator = std::size_t (*)(std::uint8_t* data, std::size_t size, std::size_t max_size);

/// Changes an input in a way that a target is likely to look into: `buffer` holds it in its first
/// `size` bytes and has room for the new one, of which it returns the size.
std::size_t Mutate(const std::string& target, MutableBytes buffer, std::size_t size,
                   std::uint64_t seed, ByteMutator mutate_bytes);

/// Ends the process with a message on stderr, in a way that a fuzzer takes for a finding.
[[noreturn]] void Fail(std::string_view what);

}  // namespace gradwire::fuzz
