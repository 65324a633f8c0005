// Included before threads.h, functions.h and kernels.h: for NVRTC, for clang on AMD's GPUs, and for a CPU that emulates
// a GPU. It includes no header of CUDA or HIP.
#if defined(__CUDACC_RTC__) || defined(__HIP__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MIN (-9223372036854775807l - 1)
#define INT64_MAX 9223372036854775807l
#define DEVICE __attribute__((device))
#define IN_CONSTANT_MEMORY static __attribute__((constant))
#define IN_MEMORY static DEVICE
#define UNROLL _Pragma("unroll")
#define BLOCK_MEMORY static __attribute__((shared))
#define EACH_OF_BLOCK(at, count) for (int at = THREAD_NUMBER; at < count; at += BLOCK_SIZE)
#else
#include <stdint.h>
#define DEVICE
#define IN_CONSTANT_MEMORY static
#define IN_MEMORY static
#define UNROLL _Pragma("GCC unroll 64")
#define KERNEL(threads) static void
#define GIVEN const
#define BLOCK_NUMBER block_number
#define THREAD_NUMBER thread_number
static thread_local uint32_t block_number, thread_number;
#if defined(THREADS_OF_BLOCK)  // each thread of a block is one of the operating system: see tests/engines/lanes/waits.py
#define BLOCK_MEMORY static
#define EACH_OF_BLOCK(at, count) for (int at = thread_number; at < count; at += BLOCK_SIZE)
#define BLOCK_WAITS THREADS_OF_BLOCK()
#else
// The first thread does the work of all threads, the last element first. So an element that needs the result of another
// element gets a wrong result, which tests find.
#define BLOCK_MEMORY
#define EACH_OF_BLOCK(at, count) for (int at = thread_number == 0 ? count : 0; at-- > 0;)
#define BLOCK_WAITS
#endif
#endif

#if defined(__CUDACC_RTC__)
#define ALWAYS_INLINE
#define INLINE static DEVICE __forceinline__
#define INLINE_MEMBER DEVICE __forceinline__
#define HARDWARE(name) ::name
#define ROUNDED_SQRTF __fsqrt_rn
#define ROUNDED_SQRT __dsqrt_rn
#define ROUNDED_FMAF __fmaf_rn
#define ROUNDED_FMA __fma_rn
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define GIVEN const __grid_constant__
#define BLOCK_NUMBER blockIdx.x
#define THREAD_NUMBER threadIdx.x
#define BLOCK_WAITS __syncthreads()
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

#if defined(__HIP__)
#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
#define GIVEN const
#define BLOCK_NUMBER __builtin_amdgcn_workgroup_id_x()
#define THREAD_NUMBER __builtin_amdgcn_workitem_id_x()
#define BLOCK_WAITS                                   \
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
  __builtin_amdgcn_s_barrier();                       \
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
#endif

#if defined(UNROLLED) && (defined(__CUDACC_RTC__) || defined(__HIP__))
#define LOOP UNROLL
#else
#define LOOP
#endif
