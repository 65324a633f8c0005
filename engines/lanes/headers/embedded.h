// The definitions that threads.h, lanes.h, functions.h and kernels.h need, in a header of a network. SOA_FN stands before
// each function that computes a row; define it before you include this file, for example as ALPAKA_FN_ACC.
#if defined(__FAST_MATH__)
#error "-ffast-math changes the numbers of this network: compile this file without it"
#endif
#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC system_header
#endif
#if defined(__CUDACC_RTC__)
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
// g++ 12 warns of its own header for AVX-512.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <stdint.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__) && !defined(__CUDACC__) && !defined(__HIP__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
#if defined(__CUDACC__) || defined(__HIP__)
#define SOA_ON_GPU 1
#ifndef SOA_FN
#define SOA_FN __attribute__((device))
#endif
#define IN_MEMORY static __attribute__((device))
#define UNROLL _Pragma("unroll")
#else
#define SOA_ON_GPU 0
#ifndef SOA_FN
#define SOA_FN
#endif
#define IN_MEMORY static
#define UNROLL _Pragma("GCC unroll 64")
#endif
#if defined(__CUDACC__)
#define ALWAYS_INLINE
#define INLINE static SOA_FN __forceinline__
#define INLINE_MEMBER SOA_FN __forceinline__
#define HARDWARE(name) ::name
#define ROUNDED_PRODUCTF __fmul_rn
#define ROUNDED_PRODUCT __dmul_rn
#define ROUNDED_SQRTF __fsqrt_rn
#define ROUNDED_SQRT __dsqrt_rn
#define ROUNDED_FMAF __fmaf_rn
#define ROUNDED_FMA __fma_rn
#define THREAD ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((int64_t)gridDim.x * blockDim.x)
#else
#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE static SOA_FN inline ALWAYS_INLINE
#define INLINE_MEMBER SOA_FN inline ALWAYS_INLINE
#define HARDWARE(name) __builtin_##name
#define ROUNDED_SQRTF __builtin_sqrtf
#define ROUNDED_SQRT __builtin_sqrt
#define ROUNDED_FMAF __builtin_fmaf
#define ROUNDED_FMA __builtin_fma
#define THREAD \
  ((int64_t)__builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x())
#define THREADS ((int64_t)__builtin_amdgcn_grid_size_x())
#endif
#define FAR static SOA_FN __attribute__((noinline))
#if SOA_ON_GPU && defined(UNROLLED)
#define LOOP UNROLL
#elif SOA_ON_GPU
#define LOOP _Pragma("unroll 1")
#else
#define LOOP
#endif
// Products and sums are not contracted to an fma, which rounds once where the network rounds twice.
#if defined(__clang__)
#pragma float_control(push)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations"  // of more rows than memory can hold
#endif
