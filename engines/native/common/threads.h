// The worker threads for soa_run_many, tiles and row blocks.
#ifndef SOA_THREADS_H
#define SOA_THREADS_H

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace soa_runner {

// True in the child of a fork, in the thread that forked.
inline thread_local bool came_through_fork = false;

// The pool of the process. It is made at first use and never destroyed.
class WorkerPool {
 public:
  static WorkerPool &instance() {
    WorkerPool *pool = pool_;
    if (pool != nullptr) return *pool;
    auto new_pool = std::make_unique<WorkerPool>();
    if (!pool_.compare_exchange_strong(pool, new_pool.get())) return *pool;  // another thread was faster
    return *new_pool.release();  // never destroyed: workers may outlive static destruction
  }

  // For the child of a fork, which has no workers: the next call of instance() makes a new pool.
  static void forget() { pool_ = nullptr; }

  // Runs `work` on up to `helpers` workers and on this thread. Returns when every call that began has
  // ended. Each call of `work` must go on until nothing is left to do. If `work` calls run() again, that
  // inner work gets no workers.
  void run(int helpers, const std::function<void()> &work) {
    if (helpers < 1 || at_work_) return work();
    // The pool has one job at a time; a second caller does its work alone. It must not wait for the workers,
    // because it may hold the lock of a model for which they wait.
    std::unique_lock<std::mutex> turn(turns_, std::try_to_lock);
    if (!turn.owns_lock()) return work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      workers_.reserve(helpers);
      while (static_cast<int>(workers_.size()) < helpers) {
        std::thread thread([this, id = workers_.size()] { loop(id); });  // it waits for the mutex
        workers_.push_back({std::move(thread)});
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;  // a worker that wakes up later does not begin
    }
    wait_shortly([this] { return running_ == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  struct Worker {
    std::thread thread;
    bool asleep = true;     // it waits to be woken, or is new
    bool narrowed = false;  // it may not run on the processor of the caller that woke it
  };

  static constexpr std::chrono::microseconds kShortly{50};
  static inline std::atomic<WorkerPool *> pool_{nullptr};
  static inline thread_local bool at_work_ = false;

  // Waits for what another thread is about to do, but not longer than it takes to sleep and to be woken.
  template <typename Condition>
  static void wait_shortly(const Condition &condition) {
    const auto begun = std::chrono::steady_clock::now();
    while (!condition() && std::chrono::steady_clock::now() - begun < kShortly) {
    }
  }

  // Linux may start a thread on the processor of the thread that woke it, although another one is idle (in a
  // virtual machine it may regard an idle processor as not available). Then both threads would share one
  // processor. So helpers that sleep begin on any processor of the caller except its current one. Then they may
  // run on all of them: one that could not move would wait for other programs on its processor.
  void send_elsewhere() {
    const auto wanted = workers_.begin() + wanted_;
    if (std::none_of(workers_.begin(), wanted, [](const Worker &worker) { return worker.asleep; })) return;
    cpu_set_t processors, others;
    const int here = sched_getcpu();
    if (here < 0 || sched_getaffinity(0, sizeof processors, &processors) != 0) return;
    others = processors;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (auto worker = workers_.begin(); worker != wanted; ++worker) {
      if (!worker->asleep) continue;
      pthread_setaffinity_np(worker->thread.native_handle(), sizeof others, &others);
      worker->narrowed = true;
    }
    processors_ = processors;
  }

  // What worker `id` does. Those with an `id` from wanted_ on take no part in a job.
  void loop(size_t id) {
    at_work_ = true;
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (job_ == seen) workers_[id].asleep = true;
      start_.wait(lock, [&] { return job_ != seen; });
      workers_[id].asleep = false;
      seen = job_;
      if (static_cast<int>(id) >= wanted_) continue;
      const std::function<void()> *work = work_;
      const cpu_set_t processors = processors_;
      const bool narrowed = std::exchange(workers_[id].narrowed, false);
      ++running_;
      lock.unlock();
      if (narrowed) pthread_setaffinity_np(pthread_self(), sizeof processors, &processors);
      (*work)();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
      lock.unlock();
      wait_shortly([&] { return job_ != seen; });  // many callers come back at once
      lock.lock();
    }
  }

  std::mutex turns_;  // held by the caller whose job the pool does
  std::mutex mutex_;  // of all below
  std::condition_variable start_, done_;
  std::vector<Worker> workers_;
  const std::function<void()> *work_ = nullptr;
  int wanted_ = 0;          // the helpers that may begin the job
  cpu_set_t processors_{};  // those of the caller that narrowed a worker last
  // These are changed under the mutex, but wait_shortly() reads them without it.
  std::atomic<int> running_{0};   // the helpers that are at the job
  std::atomic<uint64_t> job_{0};  // the number of the job
};

// Calls `work(begin, end)` for pieces of `size` rows of n, on up to `threads` threads including the caller's.
// When all have ended, the first exception is thrown again.
template <typename Work>
void in_pieces(int64_t n, int64_t size, int threads, const Work &work) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;  // of `failure`
  std::exception_ptr failure;
  const auto work_off_pieces = [&] {
    while (true) {
      const int64_t begin = next.fetch_add(size);
      if (begin >= n) return;
      try {
        work(begin, std::min(begin + size, n));
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
        next.store(n);  // no further piece begins
      }
    }
  };
  const int64_t pieces = (n + size - 1) / size;
  WorkerPool::instance().run(static_cast<int>(std::min<int64_t>(threads, pieces)) - 1, work_off_pieces);
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace soa_runner

#endif
