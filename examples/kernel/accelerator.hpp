// A stand-in for alpaka, because no package registry has it: the little that this example needs. Names and forms are close
// to alpaka's. With nvcc it is only what a kernel needs; main.cu launches it. On a CPU a block is a thread, and the threads
// of a block run one after another.
#ifndef ACCELERATOR_HPP
#define ACCELERATOR_HPP
#include <cstdint>
#include <thread>
#include <vector>
#ifdef __CUDACC__
#define FN_ACC __device__  // stands before a function of a kernel, as ALPAKA_FN_ACC does
#else
#define FN_ACC
#endif
namespace accelerator {
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
template <class T> struct Buffer {  // owns columns of n values
  std::int64_t n;
  std::vector<T> memory;
  Buffer(std::int64_t columns, std::int64_t rows) : n(rows), memory(columns * rows) {}
  T *column(std::int64_t k) { return memory.data() + k * n; }
};
template <class Functor, class... Args> void launch(Queue &queue, int blocks, int threads, Functor run, Args... args) {
  queue.wait();  // launches run in order
  auto block = [=](int first) {
    for (int t = first; t < first + threads; ++t) run(Accelerator{t, blocks * threads}, args...);
  };
  for (int b = 0; b < blocks; ++b) queue.blocks.emplace_back(block, b * threads);
}
#endif
}  // namespace accelerator
#endif
