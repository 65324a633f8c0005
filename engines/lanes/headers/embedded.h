// The definitions that scalars.h, lanes.h, functions.h and kernels.h need, in a header of a network. SOA_FN stands before
// each function that computes a row; define it before you include this file, for example as ALPAKA_FN_ACC.
#if defined(__FAST_MATH__)
#error "-ffast-math changes the numbers of this network: compile this file without it"
#endif
#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC system_header
#endif
// g++ 12 warns of its own header for AVX-512.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__aarch64__) && !defined(__CUDACC__)
#include <arm_neon.h>
#elif defined(__x86_64__) && !defined(__CUDACC__) && !defined(__HIP__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#if defined(__CUDACC__) || defined(__HIP__)
#define SOA_ON_GPU 1
#ifndef SOA_FN
#define SOA_FN __attribute__((device))
#endif
#define IN_MEMORY static __attribute__((device))
#else
#define SOA_ON_GPU 0
#ifndef SOA_FN
#define SOA_FN
#endif
#define IN_MEMORY static
#endif
#if defined(__CUDACC__)
#define THREAD ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((int64_t)gridDim.x * blockDim.x)
#elif defined(__HIP__)
#define THREAD \
  ((int64_t)__builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x())
#define THREADS ((int64_t)__builtin_amdgcn_grid_size_x())
#endif
#define DEVICE SOA_FN
#if SOA_ON_GPU && defined(UNROLLED)
#define LOOP UNROLL
#elif SOA_ON_GPU
#define LOOP _Pragma("unroll 1")
#else
#define LOOP
#endif
// Products and sums are not contracted to an fma, which rounds once where the network rounds twice. Integers wrap
// around: clang's vectors do so always.
#if defined(__clang__)
#pragma float_control(push)
#pragma clang fp contract(off)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "wrapv")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations"  // of more rows than memory can hold
#endif
