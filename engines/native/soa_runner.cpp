#include "soa_runner.h"

#include "cpu_level.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

struct soa_model_state;

namespace {

// torch's stable C shim and AOTInductor's container interface, by their documented signatures.
using Tensor = struct AtenTensorOpaque *;
using Container = struct AOTInductorModelContainerOpaque *;
using CreateTensor = int32_t (*)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t,
                                 int32_t, int32_t, Tensor *);
using DeleteTensor = int32_t (*)(Tensor);
using NewHandle = int32_t (*)(Tensor, Tensor *);
using Constant = int32_t (*)();
using CreateContainer = int32_t (*)(Container *, size_t, const char *, const char *);
using DeleteContainer = int32_t (*)(Container);
using CountInputs = int32_t (*)(Container, size_t *);
struct ConstantEntry {
  const char *name;
  Tensor tensor;
};
using SetConstants = int32_t (*)(Container, const ConstantEntry *, size_t, bool, bool);
using Run = int32_t (*)(Container, Tensor *, size_t, Tensor *, size_t, void *, void *);

int fail(int code, char *message, size_t size, const char *format, ...) {
  if (message != nullptr && size > 0) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, size, format, arguments);
    va_end(arguments);
  }
  return code;
}

struct Dtype {
  const char *name;
  uint64_t bytes;
};
const Dtype kDtypes[] = {{"bool", 1},    {"int8", 1},    {"int16", 2},    {"int32", 4},
                         {"int64", 8},   {"uint8", 1},   {"uint16", 2},   {"uint32", 4},
                         {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
constexpr size_t kUnknown = std::size(kDtypes);

struct Shim {
  CreateTensor create_tensor = nullptr;
  DeleteTensor delete_tensor = nullptr;
  NewHandle new_handle = nullptr;
  int32_t dtypes[std::size(kDtypes)] = {};
};

// The worker threads behind soa_run_many: made when first asked for, kept for the process.
class Pool {
 public:
  static Pool &instance() {
    Pool *pool = pool_;
    if (pool != nullptr) return *pool;
    auto made = std::make_unique<Pool>();
    // Never destroyed: workers may outlive static destruction.
    return pool_.compare_exchange_strong(pool, made.get()) ? *made.release() : *pool;
  }

  // In the child of a fork, which has no workers: the next instance is another one.
  static void forget() { pool_ = nullptr; }

  // Run `work` on `helpers` workers and on this thread; returns when all are done.
  void run(int helpers, const std::function<void()> &work) {
    std::unique_lock<std::mutex> turn(turns_);  // one job at a time
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < helpers) {
        workers_.emplace_back([this, id = workers_.size()] { loop(id); });
      }
      work_ = &work;
      wanted_ = helpers;
      running_ = helpers;
      ++job_;
    }
    start_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  static inline std::atomic<Pool *> pool_{nullptr};

  void loop(size_t id) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (static_cast<int>(id) >= wanted_) continue;
      const std::function<void()> *work = work_;
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

// Every open model, for the child of a fork. Never destroyed either.
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

// What calls share. The library stays loaded once opened: its code may be on some thread's stack,
// and AOTInductor libraries register state that does not survive unloading.
struct soa_model_state {
  std::shared_mutex guard;  // shared while running, exclusive to close
  std::atomic<int> refusal{SOA_OK};  // SOA_CLOSED, SOA_FORKED: what every call gets
  Shim shim;
  Run run = nullptr;
  bool on_gpu = false;
  bool single = false;  // `run` touches no event and no queue of instances, and so runs one at a time
  std::mutex turn;
  DeleteContainer delete_container = nullptr;
  Container container = nullptr;
  size_t inputs = 0;
  int32_t device_type = 0, device_index = 0;
  // Optional: torch may be built without OpenMP.
  int threads = 0;
  int (*get_torch_threads)() = nullptr;
  int (*get_threads)() = nullptr;
  void (*set_threads)(int) = nullptr;
  int (*set_mkl_threads)(int) = nullptr;  // of this thread alone; returns what it was, 0: not set

  // Weights that lie beside the library: tensors over a read-only mapping that the container borrows.
  void *mapping = nullptr;
  size_t mapped = 0;
  std::vector<Tensor> weights;

  soa_model_state() {
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
    if (refusal == SOA_FORKED) return;  // a thread that is not here was in the middle of it
    if (container != nullptr) delete_container(container);
    for (Tensor tensor : weights) shim.delete_tensor(tensor);
    if (mapping != nullptr) munmap(mapping, mapped);
  }
};

struct soa_model {
  std::shared_ptr<soa_model_state> state;
};

struct soa_call {
  std::shared_ptr<soa_model_state> model;
  std::vector<Tensor> arguments;  // ours, over the caller's memory
  std::vector<Tensor> stolen;     // scratch: the handles a run takes over
  std::atomic<bool> busy{false};

  ~soa_call() {
    for (Tensor tensor : arguments) {
      if (tensor != nullptr) model->shim.delete_tensor(tensor);
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
    if (!idle || model->on_gpu) model->refusal = SOA_FORKED;
  }
  Pool::forget();
  came_through_fork = true;
  opened.mutex.unlock();
}

[[maybe_unused]] const int forks_are_seen = pthread_atfork(before_fork, after_fork, in_child);

int refuse(int refusal, char *message, size_t size) {
  return fail(refusal, message, size,
              refusal == SOA_CLOSED ? "the session is closed"
                                    : "this session was opened before a fork, on a GPU or with a "
                                      "thread inside: open it again in this process");
}

// Whether every byte that the ELF headers name is in the file. The dynamic loader does not look: it
// maps a truncated library, and touching what is missing kills the process.
bool whole_library(const char *path, char *message, size_t size) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    fail(SOA_OPEN_FAILED, message, size, "%s: cannot be read: %s", path, std::strerror(errno));
    return false;
  }
  const auto length = static_cast<uint64_t>(file.tellg());
  Elf64_Ehdr header;
  file.seekg(0);
  bool whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&header), sizeof header)) &&
               std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
               header.e_ident[EI_CLASS] == ELFCLASS64 &&
               header.e_phentsize == sizeof(Elf64_Phdr) &&
               header.e_shoff <= length &&
               static_cast<uint64_t>(header.e_shnum) * header.e_shentsize <= length - header.e_shoff;
  for (int i = 0; whole && i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    file.seekg(static_cast<std::streamoff>(header.e_phoff + static_cast<uint64_t>(i) * sizeof segment));
    whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&segment), sizeof segment)) &&
            segment.p_offset <= length && segment.p_filesz <= length - segment.p_offset;
  }
  if (!whole) fail(SOA_OPEN_FAILED, message, size, "%s: not a whole 64-bit ELF library", path);
  return whole;
}

// Whether this host runs what folder/target.txt says the library was built for. Asked before it is
// loaded: code of a higher CPU level would end the process by SIGILL.
bool runs_here(const std::string &folder, const char *device, char *message, size_t size) {
  std::ifstream file(folder + "/target.txt");
  if (!file) return true;  // an artifact that does not say
  std::string line, target;
  if (!std::getline(file, line) || line != "soa-target 1" || !std::getline(file, target) ||
      target.find('/') == std::string::npos) {
    fail(SOA_OPEN_FAILED, message, size, "%s/target.txt: not a target", folder.c_str());
    return false;
  }
  if ((target.compare(0, 4, "cpu/") == 0) != (std::strncmp(device, "cpu", 3) == 0)) {
    fail(SOA_OPEN_FAILED, message, size, "the artifact was built for %s: it cannot be opened on %s",
         target.c_str(), device);
    return false;
  }
  if (target.compare(0, 4, "cpu/") != 0) return true;
  const std::string lacking = soa_cpu::missing_here(target.substr(4));
  if (lacking.empty()) return true;
  fail(SOA_OPEN_FAILED, message, size, "this host cannot run %s: it lacks %s", target.c_str(),
       lacking.c_str());
  return false;
}

template <typename Function>
bool find(void *library, const char *name, Function *function, char *message, size_t size) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return true;
  fail(SOA_OPEN_FAILED, message, size, "no symbol %s: not an AOTInductor library, or torch is not there",
       name);
  return false;
}

size_t dtype_index(const char *name) {
  size_t i = 0;
  while (i < kUnknown && std::strcmp(kDtypes[i].name, name) != 0) ++i;
  return i;
}

// Map folder/weights.bin and hand its tensors to the container. Lines of weights.txt, after the first:
// NAME DTYPE ITEMSIZE OFFSET NDIM SIZES... STRIDES...
int map_weights(soa_model_state &model, void *library, const std::string &path_of_library,
                const std::string &folder, char *message, size_t size) {
  std::ifstream index(folder + "/weights.txt");
  if (!index) {
    // By its name, since a library without weights runs until it reads one.
    const std::string bare = ".bare.so";
    const bool needed = path_of_library.size() > bare.size() &&
                        path_of_library.compare(path_of_library.size() - bare.size(), bare.size(),
                                                bare) == 0;
    if (!needed) return SOA_OK;
    return fail(SOA_OPEN_FAILED, message, size,
                "%s holds no weights, and there is no weights.txt in '%s'", path_of_library.c_str(),
                folder.c_str());
  }
  SetConstants set = nullptr;
  if (!find(library, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", &set, message,
            size)) {
    return SOA_OPEN_FAILED;
  }
  const std::string path = folder + "/weights.bin";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found;
  if (file < 0 || ::fstat(file, &found) != 0) {
    const int why = errno;
    if (file >= 0) ::close(file);
    return fail(SOA_OPEN_FAILED, message, size, "%s: %s", path.c_str(), std::strerror(why));
  }
  const auto length = static_cast<uint64_t>(found.st_size);
  if (length > 0) {
    void *mapping = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file, 0);
    if (mapping != MAP_FAILED) {
      model.mapping = mapping;
      model.mapped = length;
    }
  }
  ::close(file);
  if (length > 0 && model.mapping == nullptr) {
    return fail(SOA_OPEN_FAILED, message, size, "%s: cannot be mapped", path.c_str());
  }
  std::string line;
  if (!std::getline(index, line) || line != "soa-weights 1") {
    return fail(SOA_OPEN_FAILED, message, size, "%s/weights.txt: not an index of weights", folder.c_str());
  }
  std::vector<std::string> names;
  while (std::getline(index, line)) {
    std::istringstream fields(line);
    std::string name, dtype;
    uint64_t itemsize = 0, offset = 0;
    size_t ndim = 0;
    fields >> name >> dtype >> itemsize >> offset >> ndim;
    bool fits = !fields.fail() && ndim <= 16;
    std::vector<int64_t> sizes(fits ? ndim : 0), strides(fits ? ndim : 0);
    for (int64_t &extent : sizes) fields >> extent;
    for (int64_t &stride : strides) fields >> stride;
    const size_t type = dtype_index(dtype.c_str());
    fits = fits && !fields.fail() && type != kUnknown && itemsize == kDtypes[type].bytes &&
           offset <= length && offset % itemsize == 0;
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    uint64_t elements = empty ? 0 : 1;  // from the first to the last, gaps included
    for (size_t i = 0; i < sizes.size(); ++i) {
      uint64_t reach = 0;
      fits = fits && sizes[i] >= 0 && strides[i] >= 0 &&
             (empty || (!__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) &&
                        !__builtin_add_overflow(elements, reach, &elements)));
    }
    fits = fits && elements <= (length - offset) / itemsize;
    Tensor tensor = nullptr;
    if (!fits || model.shim.create_tensor(
                     static_cast<char *>(model.mapping) + offset, static_cast<int64_t>(ndim),
                     sizes.data(), strides.data(), 0, model.shim.dtypes[type],
                     model.device_type, model.device_index, &tensor) != 0) {
      return fail(SOA_OPEN_FAILED, message, size, "%s/weights.txt does not fit weights.bin: %s",
                  folder.c_str(), line.c_str());
    }
    names.push_back(name);
    model.weights.push_back(tensor);
  }
  if (names.empty()) return SOA_OK;  // a model without weights
  std::vector<ConstantEntry> constants;
  for (size_t i = 0; i < names.size(); ++i) constants.push_back({names[i].c_str(), model.weights[i]});
  if (set(model.container, constants.data(), constants.size(), false, true) != 0) {
    return fail(SOA_OPEN_FAILED, message, size, "%s/weights.txt: not this artifact's weights (see stderr)",
                folder.c_str());
  }
  return SOA_OK;
}

int make_tensor(const soa_model_state &model, const soa_tensor *given, size_t index, Tensor *made,
                char *message, size_t size) {
  if (given == nullptr || given->dtype == nullptr || given->ndim < 1 || given->ndim > 2) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: needs a dtype and 1 or 2 sizes", index);
  }
  const size_t type = dtype_index(given->dtype);
  if (type == kUnknown) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: unknown dtype %s", index, given->dtype);
  }
  uint64_t bytes = kDtypes[type].bytes;
  bool countable = true;
  for (int i = 0; i < given->ndim; ++i) {
    if (given->sizes[i] < 0) {
      return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: size %lld is negative", index,
                  static_cast<long long>(given->sizes[i]));
    }
    countable = countable && !__builtin_mul_overflow(bytes, given->sizes[i], &bytes);
  }
  const auto address = reinterpret_cast<uintptr_t>(given->data);
  if (address == 0 && bytes > 0) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: null pointer for %llu bytes", index,
                static_cast<unsigned long long>(bytes));
  }
  if (address % kDtypes[type].bytes != 0) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: address %p is not a multiple of %s's %llu bytes",
                index, given->data, given->dtype, static_cast<unsigned long long>(kDtypes[type].bytes));
  }
  if (!countable || bytes > PTRDIFF_MAX || address > UINTPTR_MAX - bytes) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: its sizes pass the end of memory", index);
  }
  const int64_t strides[2] = {given->ndim == 2 ? std::max<int64_t>(given->sizes[1], 1) : 1, 1};
  if (model.shim.create_tensor(given->data, given->ndim, given->sizes, strides, 0,
                               model.shim.dtypes[type], model.device_type, model.device_index, made) != 0) {
    return fail(SOA_BAD_ARGUMENT, message, size, "argument %zu: torch makes no tensor of it", index);
  }
  return SOA_OK;
}

// torch's kernels take the thread counts of the calling thread, OpenMP's and MKL's own, and their
// last bits depend on them. This sets both for one run and puts them back.
class ThreadCount {
 public:
  explicit ThreadCount(const soa_model_state &model) : model_(model) {
    if (model.threads == 0 || model.get_threads == nullptr || model.set_threads == nullptr) return;
    static thread_local bool settled = false;
    if (!settled && model.get_torch_threads != nullptr) {
      model.get_torch_threads();  // torch sets a new thread's count when first asked: let it, now
      settled = true;
    }
    before_ = model.get_threads();
    if (before_ != model.threads) model.set_threads(model.threads);
    if (model.set_mkl_threads != nullptr) mkl_before_ = model.set_mkl_threads(model.threads);
  }
  ~ThreadCount() {
    if (before_ == 0) return;
    if (before_ != model_.threads) model_.set_threads(before_);
    if (model_.set_mkl_threads != nullptr) model_.set_mkl_threads(mkl_before_);
  }

 private:
  const soa_model_state &model_;
  int before_ = 0, mkl_before_ = 0;
};

int run_call(soa_call *call, void *stream, char *message, size_t size) {
  soa_model_state &model = *call->model;
  bool idle = false;
  if (!call->busy.compare_exchange_strong(idle, true)) {
    return fail(SOA_BUSY, message, size, "another thread is running this binding");
  }
  struct Release {
    std::atomic<bool> &busy;
    ~Release() { busy.store(false); }
  } release{call->busy};
  if (model.threads != 1 && came_through_fork) {
    const bool own = model.threads == 0 && model.get_threads != nullptr;
    const int threads = own ? model.get_threads() : model.threads;
    if (threads > 1) {
      return fail(SOA_FORKED, message, size,
                  "OpenMP's threads do not come through a fork, and a run of %d would wait for them: "
                  "use 1 thread here, or another way to start processes",
                  threads);
    }
  }
  // Before the lock: it prefers those who run, and a close would wait as long as they go on.
  if (const int why = model.refusal) return refuse(why, message, size);
  std::shared_lock<std::shared_mutex> open(model.guard);
  if (const int why = model.refusal) return refuse(why, message, size);
  for (size_t i = 0; i < call->arguments.size(); ++i) {
    // A run takes its handles over; a second handle of the same tensor costs a reference count.
    if (model.shim.new_handle(call->arguments[i], &call->stolen[i]) != 0) {
      for (size_t k = 0; k < i; ++k) model.shim.delete_tensor(call->stolen[k]);
      return fail(SOA_RUN_FAILED, message, size, "argument %zu: no tensor handle", i);
    }
  }
  const ThreadCount count(model);
  std::unique_lock<std::mutex> turn(model.turn, std::defer_lock);
  if (model.single) turn.lock();
  if (model.run(model.container, call->stolen.data(), call->stolen.size(), nullptr, 0, stream,
                nullptr) != 0) {
    return fail(SOA_RUN_FAILED, message, size, "the artifact failed while running (see stderr)");
  }
  return SOA_OK;
}

}  // namespace

extern "C" {

int soa_model_open(const char *library, const char *device, const char *folder, int32_t instances,
                   int32_t threads, soa_model **model, char *message, size_t size) {
  if (library == nullptr || device == nullptr || model == nullptr || instances < 0 || threads < 0) {
    return fail(SOA_BAD_ARGUMENT, message, size, "a library, a device and a count of instances are needed");
  }
  try {
    if (!whole_library(library, message, size)) return SOA_OPEN_FAILED;
    if (folder != nullptr && !runs_here(folder, device, message, size)) return SOA_OPEN_FAILED;
    auto state = std::make_shared<soa_model_state>();
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return fail(SOA_OPEN_FAILED, message, size, "%s", dlerror());
    CreateContainer create = nullptr;
    CountInputs count_inputs = nullptr, count_outputs = nullptr;
    Constant device_type = nullptr;
    state->single = instances == 0;
    const bool gpu = state->on_gpu = std::strncmp(device, "cuda", 4) == 0;
    if (!find(handle, "AOTInductorModelContainerCreateWithDevice", &create, message, size) ||
        !find(handle, "AOTInductorModelContainerDelete", &state->delete_container, message, size) ||
        !find(handle,
              state->single ? "AOTInductorModelContainerRunSingleThreaded"
                            : "AOTInductorModelContainerRun",
              &state->run, message, size) ||
        !find(handle, "AOTInductorModelContainerGetNumInputs", &count_inputs, message, size) ||
        !find(handle, "AOTInductorModelContainerGetNumOutputs", &count_outputs, message, size) ||
        !find(handle, "aoti_torch_create_tensor_from_blob", &state->shim.create_tensor, message, size) ||
        !find(handle, "aoti_torch_delete_tensor_object", &state->shim.delete_tensor, message, size) ||
        !find(handle, "aoti_torch_new_tensor_handle", &state->shim.new_handle, message, size) ||
        !find(handle, gpu ? "aoti_torch_device_type_cuda" : "aoti_torch_device_type_cpu", &device_type,
              message, size)) {
      return SOA_OPEN_FAILED;
    }
    for (size_t i = 0; i < std::size(kDtypes); ++i) {
      Constant dtype = nullptr;
      const std::string name = std::string("aoti_torch_dtype_") + kDtypes[i].name;
      if (!find(handle, name.c_str(), &dtype, message, size)) return SOA_OPEN_FAILED;
      state->shim.dtypes[i] = dtype();
    }
    state->device_type = device_type();
    state->threads = threads;
    state->get_torch_threads = reinterpret_cast<int (*)()>(dlsym(handle, "_ZN2at15get_num_threadsEv"));
    state->get_threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_max_threads"));
    state->set_threads = reinterpret_cast<void (*)(int)>(dlsym(handle, "omp_set_num_threads"));
    state->set_mkl_threads = reinterpret_cast<int (*)(int)>(dlsym(handle, "MKL_Set_Num_Threads_Local"));
    const char *colon = std::strchr(device, ':');
    state->device_index = colon != nullptr ? std::atoi(colon + 1) : 0;
    size_t outputs = 0;
    if (create(&state->container, static_cast<size_t>(std::max(instances, 1)), device, folder) != 0 ||
        count_inputs(state->container, &state->inputs) != 0 ||
        count_outputs(state->container, &outputs) != 0) {
      return fail(SOA_OPEN_FAILED, message, size, "AOTInductor cannot open it on %s (see stderr)", device);
    }
    if (outputs != 0) {
      return fail(SOA_OPEN_FAILED, message, size,
                  "it returns %zu outputs: not in the calling convention, which writes them in place",
                  outputs);
    }
    const int code =
        map_weights(*state, handle, library, folder != nullptr ? folder : "", message, size);
    if (code != SOA_OK) return code;
    *model = new soa_model{std::move(state)};
    return SOA_OK;
  } catch (const std::exception &error) {
    return fail(SOA_OPEN_FAILED, message, size, "%s", error.what());
  }
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
  return model == nullptr ? 0 : model->state->inputs;
}

int soa_call_create(soa_model *model, const soa_tensor *arguments, size_t count, soa_call **call,
                    char *message, size_t size) {
  if (model == nullptr || call == nullptr || (arguments == nullptr && count > 0)) {
    return fail(SOA_BAD_ARGUMENT, message, size, "a model and arguments are needed");
  }
  if (const int why = model->state->refusal) return refuse(why, message, size);
  if (count != model->state->inputs) {
    return fail(SOA_BAD_ARGUMENT, message, size, "%zu arguments, the artifact takes %zu", count,
                model->state->inputs);
  }
  try {
    auto made = std::make_unique<soa_call>();
    made->model = model->state;
    made->arguments.assign(count, nullptr);
    made->stolen.assign(count, nullptr);
    for (size_t i = 0; i < count; ++i) {
      const int code =
          make_tensor(*made->model, arguments + i, i, &made->arguments[i], message, size);
      if (code != SOA_OK) return code;
    }
    *call = made.release();
    return SOA_OK;
  } catch (const std::exception &error) {
    return fail(SOA_BAD_ARGUMENT, message, size, "%s", error.what());
  }
}

int soa_call_set(soa_call *call, size_t index, const soa_tensor *argument, char *message, size_t size) {
  return soa_call_update(call, &index, argument, 1, message, size);
}

int soa_call_update(soa_call *call, const size_t *indices, const soa_tensor *arguments, size_t count,
                    char *message, size_t size) {
  if (call == nullptr || ((indices == nullptr || arguments == nullptr) && count > 0)) {
    return fail(SOA_BAD_ARGUMENT, message, size, "a call, indices and arguments are needed");
  }
  if (count > call->arguments.size()) {
    return fail(SOA_BAD_ARGUMENT, message, size, "%zu changes, the artifact takes %zu arguments", count,
                call->arguments.size());
  }
  for (size_t k = 0; k < count; ++k) {
    if (indices[k] >= call->arguments.size()) {
      return fail(SOA_BAD_ARGUMENT, message, size, "no argument %zu", indices[k]);
    }
  }
  bool idle = false;
  if (!call->busy.compare_exchange_strong(idle, true)) {
    return fail(SOA_BUSY, message, size, "another thread is running this binding");
  }
  // All are made before any is put in place: a run never sees half of a change.
  int code = SOA_OK;
  size_t made = 0;
  for (; made < count && code == SOA_OK; ++made) {
    call->stolen[made] = nullptr;
    code = make_tensor(*call->model, arguments + made, indices[made], &call->stolen[made], message,
                       size);
  }
  for (size_t k = 0; k < made; ++k) {
    if (code == SOA_OK) std::swap(call->arguments[indices[k]], call->stolen[k]);
    if (call->stolen[k] != nullptr) call->model->shim.delete_tensor(call->stolen[k]);
    call->stolen[k] = nullptr;
  }
  call->busy.store(false);
  return code;
}

int soa_call_run(soa_call *call, void *stream, char *message, size_t size) {
  if (call == nullptr) return fail(SOA_BAD_ARGUMENT, message, size, "no call");
  return run_call(call, stream, message, size);
}

int soa_run_many(soa_call *const *calls, size_t count, int32_t threads, void *stream, size_t *failed,
                 char *message, size_t size) {
  if ((calls == nullptr && count > 0) || threads < 1) {
    return fail(SOA_BAD_ARGUMENT, message, size, "calls and at least 1 thread are needed");
  }
  std::atomic<size_t> next{0};
  std::mutex first;
  size_t worst = count;
  int code = SOA_OK;
  // Small groups keep the counter cheap for tiny events and the threads evenly loaded.
  const size_t workers = std::min<size_t>(static_cast<size_t>(threads), count);
  const size_t group = std::max<size_t>(1, std::min<size_t>(16, workers > 0 ? count / (8 * workers) : 0));
  const auto work = [&] {
    char why[256] = "";
    while (true) {
      const size_t begin = next.fetch_add(group);
      if (begin >= count) return;
      for (size_t i = begin; i < std::min(begin + group, count); ++i) {
        const int found = calls[i] == nullptr
                              ? fail(SOA_BAD_ARGUMENT, why, sizeof why, "no call")
                              : run_call(calls[i], stream, why, sizeof why);
        if (found == SOA_OK) continue;
        std::lock_guard<std::mutex> lock(first);
        if (i < worst) {
          worst = i;
          code = found;
          fail(found, message, size, "call %zu: %s", i, why);
        }
        next.store(count);
        return;
      }
    }
  };
  try {
    const int helpers = static_cast<int>(workers) - 1;
    if (helpers > 0) {
      Pool::instance().run(helpers, work);
    } else {
      work();
    }
  } catch (const std::exception &error) {
    return fail(SOA_RUN_FAILED, message, size, "%s", error.what());
  }
  if (failed != nullptr) *failed = worst;
  return code;
}

void soa_call_delete(soa_call *call) { delete call; }

}  // extern "C"
