// Included before lanes.h or scalars.h, functions.h and kernels.h, which are then included once for each width, each time
// in a separate namespace.
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__clang__) || __GNUC__ != 12
#include <immintrin.h>
#else
// The parts of <immintrin.h> that lanes.h needs. The other parts take g++ half a second, more than most networks; it
// includes a part only where this macro is defined. Tried with g++ 12 alone.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#if defined(__AVX2__)
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#endif
#if defined(__AVX512F__)
#include <avx512fintrin.h>
#endif
#endif
#define HIDDEN __attribute__((visibility("hidden")))
// A network's file is compiled as a whole, or in parts: -DPART=0 and so on.
#ifdef PART
#define HAS_PART(part) (PART == (part))
#define OF_PART __attribute__((noinline))
#else
#define HAS_PART(part) 1
#define OF_PART static __attribute__((noinline))
#endif
// A file with STEPS is timed: it counts the ticks of the processor's clock in each step of a row block.
#ifdef STEPS
extern "C" __attribute__((visibility("default"))) int64_t soa_lanes_ticks[STEPS];
int64_t soa_lanes_ticks[STEPS];
static inline int64_t ticks() {
#if defined(__aarch64__)
  int64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return (int64_t)__builtin_ia32_rdtsc();
#endif
}
#define TOOK(step) (soa_lanes_ticks[step] += ticks() - begun, begun = ticks())
#endif
#define DEVICE
#include "arithmetic.h"
#undef FAR
#define FAR inline
#define LOOP
