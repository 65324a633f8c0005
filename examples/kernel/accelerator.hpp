// A stand-in for alpaka, because no package registry has it: the little that this example needs, on a CPU. Names and
// forms are close to alpaka's. A block is a thread of the CPU; the threads of a block run one after another.
#ifndef ACCELERATOR_HPP
#define ACCELERATOR_HPP
#include <cstdint>
#include <thread>
#include <vector>
#define FN_ACC  // stands before a function of a kernel, as ALPAKA_FN_ACC does
namespace accelerator {
struct Accelerator {
  std::int64_t thread, threads;  // the index of a thread, and the number of all threads
};
struct Elements {  // every `step`-th one
  struct Iterator {
    std::int64_t at, step;
    std::int64_t operator*() const { return at; }
    void operator++() { at += step; }
    bool operator!=(const Iterator &end) const { return at < end.at; }
  };
  std::int64_t first, step, n;
  Iterator begin() const { return {first, step}; }
  Iterator end() const { return {n, step}; }
};
inline Elements uniformElements(const Accelerator &acc, std::int64_t n) { return {acc.thread, acc.threads, n}; }
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
}  // namespace accelerator
#endif
