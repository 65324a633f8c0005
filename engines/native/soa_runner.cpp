#include "include/soa_runner.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "artifact.h"
#include "threads.h"

using soa_runner::Artifact;
using soa_runner::fail;
using soa_runner::kDtypes;
using soa_runner::Memory;
using soa_runner::Tensor;

struct soa_model_state;

namespace {

// Every open model, for the child of a fork. Never destroyed: models may outlive static destruction.
struct Opened {
  std::mutex mutex;
  std::vector<soa_model_state *> models;

  static Opened &instance() {
    static Opened *opened = new Opened;
    return *opened;
  }
};

// Whether this thread is the one that a fork left in its child.
thread_local bool came_through_fork = false;

}  // namespace

// What calls share.
struct soa_model_state {
  std::unique_ptr<Artifact> artifact;
  const int threads;
  std::shared_mutex guard;           // shared while running, exclusive to close
  std::atomic<int> refusal{SOA_OK};  // SOA_CLOSED, SOA_FORKED: what every call gets
  std::mutex turn;                   // of an artifact that runs one at a time

  soa_model_state(std::unique_ptr<Artifact> opened_artifact, int openmp_threads)
      : artifact(std::move(opened_artifact)), threads(openmp_threads) {
    Opened &opened = Opened::instance();
    std::lock_guard<std::mutex> lock(opened.mutex);
    opened.models.push_back(this);
  }

  ~soa_model_state() {
    {
      auto &[mutex, models] = Opened::instance();
      std::lock_guard<std::mutex> lock(mutex);
      models.erase(std::find(models.begin(), models.end(), this));
    }
    // A thread that is not here was in the middle of it: never freed.
    if (refusal == SOA_FORKED) static_cast<void>(artifact.release());
  }

  void require_usable() const {
    if (refusal == SOA_CLOSED) fail(SOA_CLOSED, "the session is closed");
    if (refusal == SOA_FORKED) {
      fail(SOA_FORKED, "this session was opened before a fork, on a GPU or with a thread inside: open it "
                       "again in this process");
    }
  }

  // OpenMP's threads do not come through a fork, and a run of several would wait for them.
  void require_threads() const {
    if (threads == 1 || !came_through_fork) return;
    const int wanted = threads == 0 && artifact->get_threads != nullptr ? artifact->get_threads() : threads;
    if (wanted > 1) {
      fail(SOA_FORKED,
           "OpenMP's threads do not come through a fork, and a run of %d would wait for them: use 1 thread "
           "here, or another way to start processes",
           wanted);
    }
  }
};

struct soa_model {
  std::shared_ptr<soa_model_state> state;
};

struct soa_call {
  std::shared_ptr<soa_model_state> model;
  std::vector<Memory> memory;     // of each argument
  std::vector<Tensor> arguments;  // ours, over the caller's memory
  std::vector<Tensor> stolen;     // scratch: the handles a run takes over
  std::string kinds;  // of the arguments, where it runs in tiles; see soa_call_tile
  int64_t tile = 0;
  int tile_threads = 1;
  std::atomic<bool> busy{false};

  int64_t rows() const {
    const size_t first = kinds.find_first_of("nc");
    return first == std::string::npos ? 0 : memory[first].sizes[0];
  }

  ~soa_call() {
    for (Tensor tensor : arguments) {
      if (tensor != nullptr) model->artifact->delete_tensor(tensor);
    }
  }
};

namespace {

void before_fork() { Opened::instance().mutex.lock(); }

void after_fork() { Opened::instance().mutex.unlock(); }

void in_child() {
  Opened &opened = Opened::instance();
  for (soa_model_state *model : opened.models) {
    // A guard that cannot be had is held by a thread that is not here.
    const bool idle = model->guard.try_lock();
    if (idle) model->guard.unlock();
    if (!idle || model->artifact->on_gpu) model->refusal = SOA_FORKED;
  }
  soa_runner::WorkerPool::forget();
  came_through_fork = true;
  opened.mutex.unlock();
}

[[maybe_unused]] const int forks_are_seen = pthread_atfork(before_fork, after_fork, in_child);

int told(int code, const char *text, char *message, size_t size) {
  if (message != nullptr && size > 0) std::snprintf(message, size, "%s", text);
  return code;
}

// Do the work of an interface function: what it throws becomes a code and a message.
template <typename Work>
int guarded(int otherwise, char *message, size_t size, const Work &work) {
  try {
    work();
    return SOA_OK;
  } catch (const soa_runner::Failure &failure) {
    return told(failure.code, failure.text.c_str(), message, size);
  } catch (const std::exception &error) {
    return told(otherwise, error.what(), message, size);
  }
}

// The one use of a call at a time, a run or a change.
class Use {
 public:
  explicit Use(soa_call &call) : call_(call) {
    bool idle = false;
    if (!call.busy.compare_exchange_strong(idle, true)) {
      fail(SOA_BUSY, "another thread is running this binding");
    }
  }
  ~Use() { call_.busy.store(false); }

 private:
  soa_call &call_;
};

// One run of the artifact on handles that it takes over.
void run_artifact(soa_call &call, std::vector<Tensor> &handles, void *stream) {
  soa_model_state &model = *call.model;
  const Artifact &artifact = *model.artifact;
  const soa_runner::ThreadCount count(artifact, call.tile > 0 ? 1 : model.threads);  // threads share the tiles
  std::unique_lock<std::mutex> turn(model.turn, std::defer_lock);
  if (artifact.single) turn.lock();
  if (artifact.run(artifact.container, handles.data(), handles.size(), nullptr, 0, stream, nullptr) != 0) {
    fail(SOA_RUN_FAILED, "the artifact failed while running (see stderr)");
  }
}

// Fill `handles` by `make(i)`; all of them or, where one fails, none.
template <typename Make>
void make_handles(const Artifact &artifact, std::vector<Tensor> &handles, const Make &make) {
  size_t made = 0;
  try {
    for (; made < handles.size(); ++made) handles[made] = make(made);
  } catch (...) {
    while (made > 0) artifact.delete_tensor(handles[--made]);
    throw;
  }
}

// A run takes its handles over; a second handle of the same tensor costs a reference count.
Tensor second_handle(const soa_call &call, size_t i) {
  Tensor made = nullptr;
  if (call.model->artifact->new_handle(call.arguments[i], &made) != 0) {
    fail(SOA_RUN_FAILED, "argument %zu: no tensor handle", i);
  }
  return made;
}

// All rows, a tile at a time, on up to call.tile_threads threads. The cuts depend on n alone.
void run_tiles(soa_call &call, int64_t n, void *stream) {
  const Artifact &artifact = *call.model->artifact;
  std::atomic<int64_t> next{0};
  std::mutex first;
  std::exception_ptr failure;
  const auto work = [&] {
    std::vector<Tensor> handles(call.arguments.size());
    while (true) {
      const int64_t begin = next.fetch_add(call.tile);
      if (begin >= n) return;
      try {
        make_handles(artifact, handles, [&](size_t i) {
          const char kind = call.kinds[i];
          if (kind == '-') return second_handle(call, i);
          Memory part = call.memory[i];
          if (kind != 'm') part.sizes[0] = std::min(call.tile, n - begin);
          if (kind != 'n') part.data += static_cast<uint64_t>(begin) * kDtypes[part.type].bytes;
          return make_tensor(artifact, part, i);
        });
        run_artifact(call, handles, stream);
      } catch (...) {
        std::lock_guard<std::mutex> lock(first);
        if (failure == nullptr) failure = std::current_exception();
        next.store(n);
      }
    }
  };
  const int64_t tiles = (n + call.tile - 1) / call.tile;
  const auto threads = static_cast<int>(std::min<int64_t>(call.tile_threads, tiles));
  soa_runner::WorkerPool::instance().run(threads - 1, work);
  if (failure != nullptr) std::rethrow_exception(failure);
}

void run_call(soa_call *call, void *stream) {
  if (call == nullptr) fail(SOA_BAD_ARGUMENT, "no call");
  soa_model_state &model = *call->model;
  const Use use(*call);
  model.require_threads();
  // Before the lock: it prefers those who run, and a close would wait as long as they go on.
  model.require_usable();
  std::shared_lock<std::shared_mutex> open(model.guard);
  model.require_usable();
  const int64_t n = call->tile > 0 ? call->rows() : -1;
  if (n >= 2 * call->tile) return run_tiles(*call, n, stream);
  make_handles(*model.artifact, call->stolen, [&](size_t i) { return second_handle(*call, i); });
  run_artifact(*call, call->stolen, stream);
}

}  // namespace

extern "C" {

int soa_model_open(const char *library, const char *device, const char *folder, int32_t instances,
                   int32_t threads, soa_model **model, char *message, size_t size) {
  return guarded(SOA_OPEN_FAILED, message, size, [&] {
    if (library == nullptr || device == nullptr || model == nullptr || instances < 0 || threads < 0) {
      fail(SOA_BAD_ARGUMENT, "a library, a device and a count of instances are needed");
    }
    auto artifact = std::make_unique<Artifact>(library, device, folder, instances);
    *model = new soa_model{std::make_shared<soa_model_state>(std::move(artifact), threads)};
  });
}

void soa_model_close(soa_model *model) {
  if (model == nullptr) return;
  soa_model_state &state = *model->state;
  if (state.refusal != SOA_FORKED) {
    state.refusal = SOA_CLOSED;
    std::unique_lock<std::shared_mutex> running_calls_have_ended(state.guard);
  }
  delete model;
}

size_t soa_model_arguments(const soa_model *model) {
  return model == nullptr ? 0 : model->state->artifact->inputs;
}

int soa_call_create(soa_model *model, const soa_tensor *arguments, size_t count, soa_call **call,
                    char *message, size_t size) {
  return guarded(SOA_BAD_ARGUMENT, message, size, [&] {
    if (model == nullptr || call == nullptr || (arguments == nullptr && count > 0)) {
      fail(SOA_BAD_ARGUMENT, "a model and arguments are needed");
    }
    model->state->require_usable();
    const Artifact &artifact = *model->state->artifact;
    if (count != artifact.inputs) {
      fail(SOA_BAD_ARGUMENT, "%zu arguments, the artifact takes %zu", count, artifact.inputs);
    }
    auto made = std::make_unique<soa_call>();
    made->model = model->state;
    made->arguments.assign(count, nullptr);
    made->stolen.assign(count, nullptr);
    for (size_t i = 0; i < count; ++i) {
      made->memory.push_back(soa_runner::checked(arguments[i], i));
      made->arguments[i] = make_tensor(artifact, made->memory[i], i);
    }
    *call = made.release();
  });
}

int soa_call_set(soa_call *call, size_t index, const soa_tensor *argument, char *message, size_t size) {
  return soa_call_update(call, &index, argument, 1, message, size);
}

int soa_call_update(soa_call *call, const size_t *indices, const soa_tensor *arguments, size_t count,
                    char *message, size_t size) {
  return guarded(SOA_BAD_ARGUMENT, message, size, [&] {
    if (call == nullptr || ((indices == nullptr || arguments == nullptr) && count > 0)) {
      fail(SOA_BAD_ARGUMENT, "a call, indices and arguments are needed");
    }
    const size_t taken = call->arguments.size();
    if (count > taken) fail(SOA_BAD_ARGUMENT, "%zu changes, the artifact takes %zu arguments", count, taken);
    for (size_t k = 0; k < count; ++k) {
      if (indices[k] >= taken) fail(SOA_BAD_ARGUMENT, "no argument %zu", indices[k]);
    }
    const Use use(*call);
    const Artifact &artifact = *call->model->artifact;
    // All are made before any is put in place: a run never sees half of a change.
    std::vector<Memory> memory;
    for (size_t k = 0; k < count; ++k) memory.push_back(soa_runner::checked(arguments[k], indices[k]));
    std::vector<Tensor> made(count);
    make_handles(artifact, made, [&](size_t k) { return make_tensor(artifact, memory[k], indices[k]); });
    for (size_t k = 0; k < count; ++k) {
      std::swap(call->arguments[indices[k]], made[k]);
      call->memory[indices[k]] = memory[k];
      artifact.delete_tensor(made[k]);
    }
  });
}

int soa_call_tile(soa_call *call, const char *kinds, int64_t rows, int32_t threads, char *message,
                  size_t size) {
  return guarded(SOA_BAD_ARGUMENT, message, size, [&] {
    const size_t taken = call == nullptr || kinds == nullptr ? 0 : call->memory.size();
    if (taken == 0 || std::strlen(kinds) != taken || rows < 0 || threads < 1) {
      fail(SOA_BAD_ARGUMENT, "a call, the kind of each argument, rows and threads are needed");
    }
    for (size_t i = 0; i < taken; ++i) {
      const size_t ndim = kinds[i] == 'c' ? 1 : 2;
      if (std::strchr("-ncm", kinds[i]) == nullptr || (kinds[i] != '-' && call->memory[i].ndim != ndim)) {
        fail(SOA_BAD_ARGUMENT, "argument %zu: it is not of kind %c", i, kinds[i]);
      }
    }
    const Use use(*call);
    call->kinds = kinds;
    call->tile = rows;
    call->tile_threads = threads;
  });
}

int soa_call_run(soa_call *call, void *stream, char *message, size_t size) {
  return guarded(SOA_RUN_FAILED, message, size, [&] { run_call(call, stream); });
}

int soa_run_many(soa_call *const *calls, size_t count, int32_t threads, void *stream, size_t *failed,
                 char *message, size_t size) {
  std::atomic<size_t> next{0};
  std::mutex first;
  size_t worst = count;
  soa_runner::Failure failure{SOA_OK, ""};
  const int code = guarded(SOA_RUN_FAILED, message, size, [&] {
    if ((calls == nullptr && count > 0) || threads < 1) {
      fail(SOA_BAD_ARGUMENT, "calls and at least 1 thread are needed");
    }
    // Small groups keep the counter cheap for tiny events and the threads evenly loaded.
    const size_t workers = std::min<size_t>(static_cast<size_t>(threads), count);
    const size_t group = std::max<size_t>(1, std::min<size_t>(16, workers > 0 ? count / (8 * workers) : 0));
    const auto work = [&] {
      char why[256] = "";
      while (true) {
        const size_t begin = next.fetch_add(group);
        if (begin >= count) return;
        for (size_t i = begin; i < std::min(begin + group, count); ++i) {
          const int found = soa_call_run(calls[i], stream, why, sizeof why);
          if (found == SOA_OK) continue;
          std::lock_guard<std::mutex> lock(first);
          if (i < worst) {
            worst = i;
            failure = {found, "call " + std::to_string(i) + ": " + why};
          }
          next.store(count);
          return;
        }
      }
    };
    soa_runner::WorkerPool::instance().run(static_cast<int>(workers) - 1, work);
    if (failure.code != SOA_OK) throw failure;
  });
  if (failed != nullptr && (code == SOA_OK || failure.code != SOA_OK)) *failed = worst;
  return code;
}

void soa_call_delete(soa_call *call) { delete call; }

}  // extern "C"
