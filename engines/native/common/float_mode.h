// How this thread computes with floating-point numbers: rounding, and whether denormal numbers become 0. A library that
// was linked with -ffast-math changes it for the thread that loads it.
#ifndef SOA_FLOAT_MODE_H
#define SOA_FLOAT_MODE_H

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace soa_runner {

// The settings of MXCSR or FPCR, without the flags that tell of past operations.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fu;
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}

inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode) | (_mm_getcsr() & 0x3fu));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#else
  (void)mode;
#endif
}

}  // namespace soa_runner

#endif
