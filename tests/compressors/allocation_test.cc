// Sanitizers have an operator new of their own, which this would get in the way of.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define GRADWIRE_SANITIZED
#endif
#endif
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(GRADWIRE_SANITIZED)

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace {
// All allocations of this program through operator new.
std::atomic<std::size_t> allocations{0};
}  // namespace

// NOLINTBEGIN
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
// NOLINTEND

namespace gradwire::testing {
namespace {

TEST_CASE("in steady state codecs allocate nothing", "[compressors][conformance]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    constexpr std::size_t n = 65537;
    std::vector<float> values(n, 0.0F);
    Residual residual{values, {}};
    std::vector<std::byte> output(codec->MaxEncodedSize(n));
    std::vector<float> sum(n, 0.0F);
    std::vector<std::vector<float>> gradients;
    for (std::uint64_t i = 0; i < 4; ++i) gradients.push_back(Gradient(n, i));
    std::size_t before = 0;
    bool ok = true;
    for (std::size_t round = 0; round < 20; ++round) {
      if (round == 4) before = allocations.load();
      std::vector<float>& g = gradients[round % gradients.size()];
      const Result<Encoded> plain = EncodeSpan(*codec, g, {}, output);
      const Result<Encoded> encoded = EncodeSpan(*codec, g, {}, residual, output);
      ok = ok && plain.ok() && encoded.ok();
      const ByteView payload(output.data(), encoded->payload_bytes);
      ok = ok && codec->DecodeAdd(payload, {}, sum).ok() && codec->Decode(payload, {}, sum).ok();
      if (round % 3 == 0) codec->Undo(payload, {}, residual);
    }
    const std::size_t after = allocations.load();
    CHECK(ok);
    CHECK(after == before);
  }
}

}  // namespace
}  // namespace gradwire::testing

#endif
