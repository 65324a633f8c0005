// Included before scalars.h, functions.h and kernels.h: for NVRTC, for clang on AMD's GPUs, and for a CPU that emulates
// a GPU. It includes no header of CUDA or HIP.
#if defined(__CUDACC_RTC__) || defined(__HIP__)
#define DEVICE __attribute__((device))
#define IN_CONSTANT_MEMORY static __attribute__((constant))
#define IN_MEMORY static DEVICE
#define BLOCK_MEMORY static __attribute__((shared))
#define EACH_OF_BLOCK(at, count) for (int at = THREAD_NUMBER; at < count; at += BLOCK_SIZE)
#else
#define DEVICE
#define IN_CONSTANT_MEMORY static
#define IN_MEMORY static
#define KERNEL(threads) static void
#define GIVEN const
#define BLOCK_NUMBER block_number
#define THREAD_NUMBER thread_number
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

#include "arithmetic.h"

#if defined(__CUDACC_RTC__)
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define GIVEN const __grid_constant__
#define BLOCK_NUMBER blockIdx.x
#define THREAD_NUMBER threadIdx.x
#define BLOCK_WAITS __syncthreads()
#elif defined(__HIP__)
#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
#define GIVEN const
#define BLOCK_NUMBER __builtin_amdgcn_workgroup_id_x()
#define THREAD_NUMBER __builtin_amdgcn_workitem_id_x()
#define BLOCK_WAITS                                   \
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
  __builtin_amdgcn_s_barrier();                       \
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
#else
static thread_local uint32_t block_number, thread_number;
#endif

#if defined(UNROLLED) && (defined(__CUDACC_RTC__) || defined(__HIP__))
#define LOOP UNROLL
#else
#define LOOP
#endif
