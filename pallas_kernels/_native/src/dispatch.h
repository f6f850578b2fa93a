// The instruction set of this machine, and the state of its floating-point unit.

#ifndef DYNAMIQ_DISPATCH_H_
#define DYNAMIQ_DISPATCH_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kernels.h"

namespace dynamiq {

// Returns the kernels of the widest instruction set of this machine, or a null pointer, without
// which `library` registers no calls. All of them have a fused multiply-add, as XLA:CPU uses it
// where the machine has one.
inline const Kernels* kernels_of_this_machine() {
#if defined(__x86_64__)
  static const Kernels* const found = []() -> const Kernels* {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return nullptr;
    const char* const limit = std::getenv("DYNAMIQ_NATIVE_ISA");  // for tests
    const bool is_limited = limit != nullptr && std::strcmp(limit, "avx2") == 0;
    const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return is_wide && !is_limited ? &avx512::kernels() : &avx2::kernels();
  }();
  return found;
#elif defined(__aarch64__)
  return &neon::kernels();
#else
  return nullptr;
#endif
}

// Flushes subnormal numbers to zero while it lives, in inputs and results, as XLA:CPU does in its
// threads.
class FlushedSubnormals {
 public:
#if defined(__x86_64__)
  FlushedSubnormals() : saved_(_mm_getcsr()) {
    constexpr unsigned kFlush = 0x8040, kMaskedExceptions = 0x1f80;  // and rounds to nearest
    _mm_setcsr(kFlush | kMaskedExceptions);
  }
  ~FlushedSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushedSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{1} << 24));
  }
  ~FlushedSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  std::uint64_t saved_;
#else
  FlushedSubnormals() {}
#endif

 public:
  FlushedSubnormals(const FlushedSubnormals&) = delete;
  FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;
};

}  // namespace dynamiq

#endif  // DYNAMIQ_DISPATCH_H_
