// What the example needs of alpaka: alpaka itself if WITH_ALPAKA is defined, otherwise a stand-in with its names, because no
// package registry has alpaka. With nvcc the stand-in is only what a kernel needs; main.cu launches it. On a CPU its block is
// a thread, and the threads of a block run one after another.
#ifndef ACCELERATOR_HPP
#define ACCELERATOR_HPP
#include <cstdint>
#include <thread>
#include <vector>
#ifdef WITH_ALPAKA
#define ALPAKA_ACC_CPU_B_SEQ_T_THREADS_ENABLED
#include <alpaka/alpaka.hpp>
#define FN_ACC ALPAKA_FN_ACC
#elif defined(__CUDACC__)
#define FN_ACC __device__  // stands before a function of a kernel, as ALPAKA_FN_ACC does
#else
#define FN_ACC
#endif
namespace accelerator {
#ifdef WITH_ALPAKA
using Index = std::int64_t;
using Line = alpaka::DimInt<1>;
using Accelerator = alpaka::AccCpuThreads<Line, Index>;
struct Queue {
  alpaka::Queue<Accelerator, alpaka::NonBlocking> queue{alpaka::getDevByIdx(alpaka::Platform<Accelerator>{}, 0)};
  void wait() { alpaka::wait(queue); }
};
template <class Functor, class... Args> void launch(Queue &queue, Index blocks, Index threads, Functor run, Args... args) {
  alpaka::exec<Accelerator>(queue.queue, alpaka::WorkDivMembers<Line, Index>(blocks, threads, Index{1}), run, args...);
}
#else
struct Accelerator {
  std::int64_t thread, threads;  // the index of a thread, and the number of all threads
};
struct Elements {  // every `step`-th one
  struct Iterator {
    std::int64_t at, step;
    FN_ACC std::int64_t operator*() const { return at; }
    FN_ACC void operator++() { at += step; }
    FN_ACC bool operator!=(const Iterator &end) const { return at < end.at; }
  };
  std::int64_t first, step, n;
  FN_ACC Iterator begin() const { return {first, step}; }
  FN_ACC Iterator end() const { return {n, step}; }
};
FN_ACC inline Elements uniformElements(const Accelerator &acc, std::int64_t n) { return {acc.thread, acc.threads, n}; }
#ifdef __CUDACC__
template <class T> FN_ACC T atomicAdd(const Accelerator &, T *to, T value) { return ::atomicAdd(to, value); }
#else
template <class T> T atomicAdd(const Accelerator &, T *to, T value) { return __sync_fetch_and_add(to, value); }
struct Queue {
  std::vector<std::thread> blocks;
  void wait() { for (; !blocks.empty(); blocks.pop_back()) blocks.back().join(); }
  ~Queue() { wait(); }
};
template <class Functor, class... Args> void launch(Queue &queue, int blocks, int threads, Functor run, Args... args) {
  queue.wait();  // launches run in order
  auto block = [=](int first) {
    for (int t = first; t < first + threads; ++t) run(Accelerator{t, blocks * threads}, args...);
  };
  for (int b = 0; b < blocks; ++b) queue.blocks.emplace_back(block, b * threads);
}
#endif
#endif
#ifndef __CUDACC__
template <class T> struct Buffer {  // owns columns of n values
  std::int64_t n;
  std::vector<T> memory;
  Buffer(std::int64_t columns, std::int64_t rows) : n(rows), memory(columns * rows) {}
  T *column(std::int64_t k) { return memory.data() + k * n; }
};
#endif
}  // namespace accelerator
#endif
