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

#include "common/float_mode.h"
#include "common/kernel_program.h"
#include "common/opening.h"
#include "common/row_program.h"
#include "common/threads.h"
#include "common/aoti_code.h"

using soa_runner::Artifact;
using soa_runner::Bound;
using soa_runner::fail;
using soa_runner::Memory;
using soa_runner::Tiling;

struct soa_model_state;

namespace {

// All open models, which the child of a fork must know. Never destroyed, because models may outlive static destruction.
struct Opened {
  std::mutex mutex;
  std::vector<soa_model_state *> models;

  static Opened &instance() {
    static Opened *opened = new Opened;
    return *opened;
  }
};

}  // namespace

// The state that all calls of a model share.
struct soa_model_state {
  std::unique_ptr<Artifact> artifact;
  const int threads;
  std::shared_mutex guard;           // held shared by runs, exclusively to close
  std::atomic<int> refusal{SOA_OK};  // SOA_CLOSED or SOA_FORKED: the error of every call

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
    // Never freed, because a thread that exists only in the parent was using it.
    if (refusal == SOA_FORKED) static_cast<void>(artifact.release());
  }

  // Fails if the model is closed, or cannot be used in this child of a fork.
  void require_usable() const {
    if (refusal == SOA_CLOSED) fail(SOA_CLOSED, "the session is closed");
    if (refusal == SOA_FORKED) {
      fail(SOA_FORKED, "this session was opened before a fork, on a GPU or with a thread inside: open it "
                       "again in this process");
    }
  }

  // A fork does not copy OpenMP's threads, and a run with several threads would wait for them.
  void require_threads() const {
    if (threads == 1 || !soa_runner::came_through_fork) return;
    const int wanted = artifact->openmp_threads(threads);
    if (wanted > 1) {
      fail(SOA_FORKED,
           "OpenMP's threads do not come through a fork, and a run of %d would wait for them: use 1 thread "
           "here, or another way to start processes",
           wanted);
    }
  }
};

// Calls keep the state alive, also when the model is closed.
struct soa_model {
  std::shared_ptr<soa_model_state> state;
};

struct soa_call {
  std::shared_ptr<soa_model_state> model;
  std::vector<Memory> memory;  // of each argument
  std::unique_ptr<Bound> bound;
  Tiling tiling;
  std::atomic<bool> busy{false};  // true while a thread runs or changes the call
};

namespace {

// No thread opens or frees a model while another one forks.
void before_fork() { Opened::instance().mutex.lock(); }

void after_fork() { Opened::instance().mutex.unlock(); }

// Marks the models that the child of a fork cannot use.
void in_child() {
  Opened &opened = Opened::instance();
  for (soa_model_state *model : opened.models) {
    // If the guard is locked, a thread holds it that exists only in the parent.
    const bool idle = model->guard.try_lock();
    if (idle) model->guard.unlock();
    if (!idle || model->artifact->on_gpu) model->refusal = SOA_FORKED;
  }
  soa_runner::WorkerPool::forget();
  soa_runner::came_through_fork = true;
  opened.mutex.unlock();
}

[[maybe_unused]] const int forks_are_seen = pthread_atfork(before_fork, after_fork, in_child);

// Does the work of an interface function, and returns its code. An exception becomes a code and a message;
// `other_error` is the code of one that is not ours.
template <typename Work>
int guarded(int other_error, char *message, size_t size, const Work &work) {
  try {
    work();
    return SOA_OK;
  } catch (const soa::Error &error) {
    return soa_runner::told(error.refusal(), error.message(), message, size);
  } catch (const std::exception &error) {
    return soa_runner::told(soa_runner::Refused(other_error), error.what(), message, size);
  }
}

// The use of a call by one thread, for a run or a change. A second use at the same time fails.
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

// The floating-point mode of this thread before a library was loaded. It is restored in any case.
class KeptFloatMode {
 public:
  explicit KeptFloatMode(const char *library) : library_(library) {}
  ~KeptFloatMode() { soa_runner::set_float_mode(before_); }

  // Fails if the mode has changed.
  void require_unchanged() const {
    if (soa_runner::float_mode() == before_) return;
    fail(SOA_OPEN_FAILED, "%s: it changes how this thread computes with floating-point numbers (as -ffast-math does, which "
                          "takes denormal numbers for 0): build it again without such options", library_);
  }

 private:
  const char *library_;
  const uint64_t before_ = soa_runner::float_mode();
};

// The artifact in a file: a kernel, a library of `lanes`, or one of AOTInductor.
std::unique_ptr<Artifact> open_artifact(const char *file, const char *device, const char *folder, int32_t instances) {
  if (soa_runner::KernelProgram::is(file)) return std::make_unique<soa_runner::KernelProgram>(file, device);
  void *handle = soa_runner::open_library(file, device, folder);
  if (auto program = soa_runner::RowProgram::of(handle, device)) return program;
  return std::make_unique<soa_runner::TorchCode>(handle, file, device, folder, instances);
}

void run_call(soa_call *call, void *stream) {
  if (call == nullptr) fail(SOA_BAD_ARGUMENT, "no call");
  soa_model_state &model = *call->model;
  const Use use(*call);
  model.require_threads();
  // Also checked before the lock: the lock prefers runs, and a close would wait as long as new runs begin.
  model.require_usable();
  std::shared_lock<std::shared_mutex> open(model.guard);
  model.require_usable();
  call->bound->run(call->tiling, model.threads, stream);
}

// The error of one of several calls.
struct FailedCall : soa::Error {
  FailedCall(size_t number, const soa::Error &error)
      : soa::Error("call " + std::to_string(number) + ": " + error.message(), error.refusal()), index(number) {}

  size_t index;
};

// As run_call; throws only FailedCall. number: the index of the call.
void run_one_of_many(soa_call *call, size_t number, void *stream) {
  try {
    run_call(call, stream);
  } catch (const soa::Error &error) {
    throw FailedCall(number, error);
  } catch (const std::exception &error) {
    throw FailedCall(number, soa::Error(error.what(), soa_runner::Refused(SOA_RUN_FAILED)));
  }
}

}  // namespace

extern "C" {

const char *soa_refusal(void) { return soa_runner::last_refusal; }

int soa_model_open(const char *library, const char *device, const char *folder, int32_t instances,
                   int32_t threads, soa_model **model, char *message, size_t size) {
  return guarded(SOA_OPEN_FAILED, message, size, [&] {
    if (library == nullptr || device == nullptr || model == nullptr || instances < 0 || threads < 0) {
      fail(SOA_BAD_ARGUMENT, "a library, a device and a count of instances are needed");
    }
    const KeptFloatMode mode(library);
    std::unique_ptr<Artifact> artifact = open_artifact(library, device, folder, instances);
    mode.require_unchanged();
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
    Artifact &artifact = *model->state->artifact;
    if (count != artifact.inputs) {
      fail(SOA_BAD_ARGUMENT, "%zu arguments, the artifact takes %zu", count, artifact.inputs);
    }
    auto created = std::make_unique<soa_call>();
    created->model = model->state;
    for (size_t i = 0; i < count; ++i) created->memory.push_back(soa_runner::checked(arguments[i], i));
    created->bound = artifact.bind(created->memory);
    *call = created.release();
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
    const size_t taken = call->memory.size();
    if (count > taken) fail(SOA_BAD_ARGUMENT, "%zu changes, the artifact takes %zu arguments", count, taken);
    for (size_t k = 0; k < count; ++k) {
      if (indices[k] >= taken) fail(SOA_BAD_ARGUMENT, "no argument %zu", indices[k]);
    }
    const Use use(*call);
    std::vector<Memory> memory;
    for (size_t k = 0; k < count; ++k) memory.push_back(soa_runner::checked(arguments[k], indices[k]));
    call->bound->replace({indices, indices + count}, memory);
    for (size_t k = 0; k < count; ++k) call->memory[indices[k]] = memory[k];
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
    call->tiling = {kinds, rows, threads};
  });
}

int soa_call_run(soa_call *call, void *stream, char *message, size_t size) {
  return guarded(SOA_RUN_FAILED, message, size, [&] { run_call(call, stream); });
}

int soa_run_many(soa_call *const *calls, size_t count, int32_t threads, void *stream, size_t *failed,
                 char *message, size_t size) {
  size_t unused;
  size_t &first_failed = failed != nullptr ? *failed : unused;
  return guarded(SOA_RUN_FAILED, message, size, [&] {
    if ((calls == nullptr && count > 0) || threads < 1) {
      fail(SOA_BAD_ARGUMENT, "calls and at least 1 thread are needed");
    }
    first_failed = count;
    // Groups of calls make the counter cheap for tiny events; small groups keep the threads evenly loaded.
    const auto calls_of_a_thread = static_cast<int64_t>(count) / threads;
    const int64_t group = std::clamp<int64_t>(calls_of_a_thread / 8, 1, 16);
    std::mutex guard;
    std::unique_ptr<FailedCall> lowest;  // of the calls that failed; a later one may have failed before it
    const auto run_some = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        try {
          run_one_of_many(calls[i], static_cast<size_t>(i), stream);
        } catch (const FailedCall &error) {
          const std::lock_guard<std::mutex> lock(guard);
          if (lowest == nullptr || error.index < lowest->index) lowest = std::make_unique<FailedCall>(error);
          throw;
        }
      }
    };
    try {
      soa_runner::in_pieces(static_cast<int64_t>(count), group, threads, run_some);
    } catch (const FailedCall &) {
      first_failed = lowest->index;
      throw *lowest;
    }
  });
}

void soa_call_delete(soa_call *call) { delete call; }

}  // extern "C"
