// Integers, and the operations of one thread that are rounded as written, for compilers of GPUs and CPUs. device.h
// includes it, and a network's own header contains it. DEVICE stands before each function.
#if defined(__CUDACC_RTC__)  // it has no headers
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#ifndef INT32_MIN
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MIN (-9223372036854775807l - 1)
#define INT64_MAX 9223372036854775807l
#endif
#else
#include <stdint.h>
#endif
#if defined(__CUDACC__) || defined(__HIP__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif
#if defined(__CUDACC__)
#define ALWAYS_INLINE
#define INLINE static DEVICE __forceinline__
#define INLINE_MEMBER DEVICE __forceinline__
#define HARDWARE(name) ::name
#define ROUNDED_PRODUCTF __fmul_rn
#define ROUNDED_PRODUCT __dmul_rn
#define ROUNDED_SQRTF __fsqrt_rn
#define ROUNDED_SQRT __dsqrt_rn
#define ROUNDED_FMAF __fmaf_rn
#define ROUNDED_FMA __fma_rn
#else
#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE static DEVICE inline ALWAYS_INLINE
#define INLINE_MEMBER DEVICE inline ALWAYS_INLINE
#define HARDWARE(name) __builtin_##name
#define ROUNDED_SQRTF __builtin_sqrtf
#define ROUNDED_SQRT __builtin_sqrt
#define ROUNDED_FMAF __builtin_fmaf
#define ROUNDED_FMA __builtin_fma
#endif
#define FAR static DEVICE __attribute__((noinline))
