// The worker threads behind soa_run_many, tiles and row blocks.
#ifndef SOA_THREADS_H
#define SOA_THREADS_H

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace soa_runner {

// Made when first asked for, kept for the process.
class WorkerPool {
 public:
  static WorkerPool &instance() {
    WorkerPool *pool = pool_;
    if (pool != nullptr) return *pool;
    auto made = std::make_unique<WorkerPool>();
    // Never destroyed: workers may outlive static destruction.
    return pool_.compare_exchange_strong(pool, made.get()) ? *made.release() : *pool;
  }

  // In the child of a fork, which has no workers: the next instance is another one.
  static void forget() { pool_ = nullptr; }

  // Run `work` on up to `helpers` workers and on this thread; returns when all that began are done: each
  // call of `work` must go on until nothing is left to do. Work that is part of such work gets no
  // workers of its own.
  void run(int helpers, const std::function<void()> &work) {
    if (helpers < 1 || at_work_) return work();
    // One job at a time: another caller does its work alone. It may hold the lock of a model for which the
    // first one's workers wait, so it must not wait for them.
    std::unique_lock<std::mutex> turn(turns_, std::try_to_lock);
    if (!turn.owns_lock()) return work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < helpers) {
        workers_.emplace_back([this, id = workers_.size()] { loop(id); });
      }
      work_ = &work;
      wanted_ = helpers;
      ++job_;
      send_elsewhere();
    }
    start_.notify_all();
    at_work_ = true;
    work();
    at_work_ = false;
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // a worker that wakes up only now finds nothing left to do
    done_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  static inline std::atomic<WorkerPool *> pool_{nullptr};
  static inline thread_local bool at_work_ = false;

  // A thread that wakes up may be put on the processor of the one that woke it, though another is idle: in
  // a virtual machine an idle processor counts as taken away. The two would then take turns on one. So the
  // helpers may run where the caller may, except on the processor where it is now.
  void send_elsewhere() {
    cpu_set_t others;
    const int here = sched_getcpu();
    if (here < 0 || sched_getaffinity(0, sizeof others, &others) != 0) return;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (int i = 0; i < wanted_; ++i) pthread_setaffinity_np(workers_[i].native_handle(), sizeof others, &others);
  }

  void loop(size_t id) {
    at_work_ = true;
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (static_cast<int>(id) >= wanted_) continue;
      const std::function<void()> *work = work_;
      ++running_;
      lock.unlock();
      (*work)();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::mutex turns_, mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  const std::function<void()> *work_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t job_ = 0;
};

// Call `work(begin, end)` for pieces of `size` rows of n, on up to `threads` threads, the caller's among them.
// The first thing that is thrown is thrown here, when all have ended.
template <typename Work>
void in_pieces(int64_t n, int64_t size, int threads, const Work &work) {
  std::atomic<int64_t> next{0};
  std::mutex first;
  std::exception_ptr failure;
  const auto some = [&] {
    while (true) {
      const int64_t begin = next.fetch_add(size);
      if (begin >= n) return;
      try {
        work(begin, std::min(begin + size, n));
      } catch (...) {
        std::lock_guard<std::mutex> lock(first);
        if (failure == nullptr) failure = std::current_exception();
        next.store(n);
      }
    }
  };
  const int64_t pieces = (n + size - 1) / size;
  WorkerPool::instance().run(static_cast<int>(std::min<int64_t>(threads, pieces)) - 1, some);
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace soa_runner

#endif
