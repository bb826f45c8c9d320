#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif
#include <cstdint>

namespace gradwire {

/// While one lives, this thread computes as IEEE 754 says: round to nearest even, denormals kept.
/// Frameworks set "flush denormals to zero" in their threads, and libraries built with -ffast-math
/// do it when they are loaded; the bytes of a payload must not depend on that.
/// Every public method of a codec that computes with floats begins with one.
class ScopedFloatMode {
 public:
  ScopedFloatMode() : saved_(Get()) {
    const Word wanted = (saved_ & ~kControlMask) | kIeee;
    changed_ = wanted != saved_;
    if (changed_) Set(wanted);
  }
  ~ScopedFloatMode() {
    if (changed_) Set(saved_);
  }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  using Word = std::uint32_t;
  // MXCSR: flush to zero (15), rounding (14, 13), denormals are zero (6). Sticky flags and
  // exception masks stay as they are.
  static constexpr Word kControlMask = 0xe040;
  static constexpr Word kIeee = 0;
  static Word Get() { return _mm_getcsr(); }
  static void Set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  // FPCR: default NaN (25), flush to zero (24), rounding (23, 22), flush halves to zero (19).
  static constexpr Word kControlMask = 0x3c80000;
  static constexpr Word kIeee = 0;
  static Word Get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = std::uint32_t;  // no switch known: the mode is what the system gives
  static constexpr Word kControlMask = 0;
  static constexpr Word kIeee = 0;
  static Word Get() { return 0; }
  static void Set(Word) {}
#endif

  Word saved_;
  bool changed_ = false;
};

}  // namespace gradwire
