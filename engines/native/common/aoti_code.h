// Artifacts of AOTInductor: the symbols that they must have, their weights in a separate file, and torch tensors over the
// caller's memory.
#ifndef SOA_TORCH_CODE_H
#define SOA_TORCH_CODE_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "opening.h"
#include "threads.h"

namespace soa_runner {

// Functions of torch's stable C shim and of AOTInductor's container interface, with their documented signatures.
using Tensor = struct AtenTensorOpaque *;
using Container = struct AOTInductorModelContainerOpaque *;
struct ConstantEntry {
  const char *name;
  Tensor tensor;
};
using CreateTensor = int32_t (*)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t,
                                 int32_t, int32_t, Tensor *);
using CreateContainer = int32_t (*)(Container *, size_t, const char *, const char *);
using SetConstants = int32_t (*)(Container, const ConstantEntry *, size_t, bool, bool);
using Count = int32_t (*)(Container, size_t *);
using Constant = int32_t (*)();

// A library made by AOTInductor, with its container.
class TorchCode : public Artifact {
 public:
  // folder: that of the artifact, or null. With 0 instances, `run` uses no events and no queue of instances.
  TorchCode(void *handle, const char *library, const char *device, const char *folder, int32_t instances)
      : Artifact(std::strncmp(device, "cuda", 4) == 0), single(instances == 0) {
    const CreateContainer create = find(handle, "AOTInductorModelContainerCreateWithDevice");
    find_functions(handle);
    const Count count_inputs = find(handle, "AOTInductorModelContainerGetNumInputs");
    const Count count_outputs = find(handle, "AOTInductorModelContainerGetNumOutputs");
    const char *colon = std::strchr(device, ':');
    device_index_ = colon != nullptr ? std::atoi(colon + 1) : 0;
    size_t outputs = 0;
    try {
      if (create(&container, static_cast<size_t>(std::max(instances, 1)), device, folder) != 0 ||
          count_inputs(container, &inputs) != 0 || count_outputs(container, &outputs) != 0) {
        fail(SOA_OPEN_FAILED, "AOTInductor cannot open it on %s (see stderr)", device);
      }
      if (outputs != 0) {
        fail(SOA_OPEN_FAILED, "it returns %zu outputs: not in the calling convention, which writes them in place",
             outputs);
      }
      take_weights(handle, library, folder != nullptr ? folder : "");
    } catch (...) {
      release();
      throw;
    }
  }
  ~TorchCode() override { release(); }

  std::unique_ptr<Bound> bind(const std::vector<Memory> &memory) override;

  int openmp_threads(int threads) const override {
    return threads == 0 && get_threads != nullptr ? get_threads() : threads;
  }

  // A tensor over memory, which it does not own; null if torch cannot make one.
  Tensor tensor(void *data, size_t dtype, size_t ndim, const int64_t *sizes, const int64_t *strides) const {
    Tensor tensor = nullptr;
    const int32_t code = create_tensor_(data, static_cast<int64_t>(ndim), sizes, strides, 0, dtypes_[dtype],
                                        device_type_, device_index_, &tensor);
    return code == 0 ? tensor : nullptr;
  }

  const bool single;
  std::mutex turn;  // held by a run if `single`
  Container container = nullptr;
  int32_t (*run)(Container, Tensor *, size_t, Tensor *, size_t, void *, void *) = nullptr;
  int32_t (*delete_tensor)(Tensor) = nullptr;
  int32_t (*new_handle)(Tensor, Tensor *) = nullptr;  // a second handle of a tensor
  // Optional: torch may be built without OpenMP.
  int (*get_torch_threads)() = nullptr;
  int (*get_threads)() = nullptr;
  void (*set_threads)(int) = nullptr;
  int (*set_mkl_threads)(int) = nullptr;  // only for this thread; returns the former number, 0: it was not set

 private:
  // Finds the functions that bindings and runs call, and torch's numbers of dtypes and of the device's type.
  void find_functions(void *handle) {
    delete_container_ = find(handle, "AOTInductorModelContainerDelete");
    run = find(handle, single ? "AOTInductorModelContainerRunSingleThreaded" : "AOTInductorModelContainerRun");
    create_tensor_ = find(handle, "aoti_torch_create_tensor_from_blob");
    delete_tensor = find(handle, "aoti_torch_delete_tensor_object");
    new_handle = find(handle, "aoti_torch_new_tensor_handle");
    const Constant device_type =
        find(handle, on_gpu ? "aoti_torch_device_type_cuda" : "aoti_torch_device_type_cpu");
    device_type_ = device_type();
    for (size_t i = 0; i < kUnknown; ++i) {
      const Constant dtype = find(handle, std::string("aoti_torch_dtype_") + kDtypes[i].name);
      dtypes_[i] = dtype();
    }
    get_torch_threads = Symbol{dlsym(handle, "_ZN2at15get_num_threadsEv")};
    get_threads = Symbol{dlsym(handle, "omp_get_max_threads")};
    set_threads = Symbol{dlsym(handle, "omp_set_num_threads")};
    set_mkl_threads = Symbol{dlsym(handle, "MKL_Set_Num_Threads_Local")};
  }

  // Maps folder/weights.bin read-only and gives its tensors to the container, which does not own them.
  void take_weights(void *handle, const std::string &library, const std::string &folder) {
    std::ifstream index(folder + "/weights.txt");
    if (!index) {
      if (!is_bare(library)) return;
      fail(SOA_OPEN_FAILED, "%s holds no weights, and there is no weights.txt in '%s'", library.c_str(),
           folder.c_str());
    }
    const SetConstants set = find(handle, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs");
    map(folder + "/weights.bin");
    std::string line;
    if (!std::getline(index, line) || line != "soa-weights 1") {
      fail(SOA_OPEN_FAILED, "%s/weights.txt: not an index of weights", folder.c_str());
    }
    std::vector<std::string> names;
    while (std::getline(index, line)) {
      std::string name;
      Tensor tensor = weight(line, &name);
      if (tensor == nullptr) {
        fail(SOA_OPEN_FAILED, "%s/weights.txt does not fit weights.bin: %s", folder.c_str(), line.c_str());
      }
      weights_.push_back(tensor);
      names.push_back(name);
    }
    if (names.empty()) return;  // a model without weights
    std::vector<ConstantEntry> constants;
    for (size_t i = 0; i < names.size(); ++i) constants.push_back({names[i].c_str(), weights_[i]});
    if (set(container, constants.data(), constants.size(), false, true) != 0) {
      fail(SOA_OPEN_FAILED, "%s/weights.txt: not this artifact's weights (see stderr)", folder.c_str());
    }
  }

  // True for a library without its weights, which is recognised by its name: it fails only when it reads a weight.
  static bool is_bare(const std::string &library) {
    const std::string end = ".bare.so";
    return library.size() > end.size() && library.compare(library.size() - end.size(), end.size(), end) == 0;
  }

  // Maps a file, which may be empty, and sets mapping_ and mapped_bytes_.
  void map(const std::string &path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || ::fstat(file, &status) != 0) {
      const int error = errno;
      if (file >= 0) ::close(file);
      fail(SOA_OPEN_FAILED, "%s: %s", path.c_str(), std::strerror(error));
    }
    mapped_bytes_ = static_cast<uint64_t>(status.st_size);
    void *mapping = mapped_bytes_ > 0 ? ::mmap(nullptr, mapped_bytes_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
    ::close(file);
    if (mapping == MAP_FAILED) fail(SOA_OPEN_FAILED, "%s: cannot be mapped", path.c_str());
    mapping_ = mapping;
  }

  // The tensor of a line "NAME DTYPE ITEMSIZE OFFSET NDIM SIZES... STRIDES..."; null if it is not inside the mapping.
  Tensor weight(const std::string &line, std::string *name) const {
    std::istringstream fields(line);
    std::string dtype;
    uint64_t itemsize = 0, offset = 0;
    size_t ndim = 0;
    fields >> *name >> dtype >> itemsize >> offset >> ndim;
    if (fields.fail() || ndim > 16) return nullptr;
    std::vector<int64_t> sizes(ndim), strides(ndim);
    for (int64_t &extent : sizes) fields >> extent;
    for (int64_t &stride : strides) fields >> stride;
    const size_t type = dtype_index(dtype.c_str());
    if (fields.fail() || type == kUnknown || itemsize != kDtypes[type].bytes || offset > mapped_bytes_ ||
        offset % itemsize != 0) {
      return nullptr;
    }
    if (elements_of(sizes, strides) > (mapped_bytes_ - offset) / itemsize) return nullptr;
    return tensor(static_cast<char *>(mapping_) + offset, type, ndim, sizes.data(), strides.data());
  }

  // The number of elements from the first to the last, gaps included. UINT64_MAX for impossible sizes or strides.
  static uint64_t elements_of(const std::vector<int64_t> &sizes, const std::vector<int64_t> &strides) {
    const auto negative = [](int64_t number) { return number < 0; };
    if (std::any_of(sizes.begin(), sizes.end(), negative) || std::any_of(strides.begin(), strides.end(), negative)) {
      return UINT64_MAX;
    }
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
    uint64_t elements = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      uint64_t reach = 0;  // from the first index of this dimension to the last
      if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) ||
          __builtin_add_overflow(elements, reach, &elements)) {
        return UINT64_MAX;
      }
    }
    return elements;
  }

  // Deletes the container and the weights, and ends the mapping.
  void release() {
    if (container != nullptr) delete_container_(container);
    for (Tensor each : weights_) delete_tensor(each);
    if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
  }

  CreateTensor create_tensor_ = nullptr;
  int32_t (*delete_container_)(Container) = nullptr;
  int32_t dtypes_[kUnknown] = {};
  int32_t device_type_ = 0, device_index_ = 0;
  void *mapping_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  std::vector<Tensor> weights_;
};

// A dense tensor over the memory of argument `index`. A matrix without columns has strides as if it had one.
inline Tensor make_tensor(const TorchCode &artifact, const Memory &memory, size_t index) {
  const int64_t strides[2] = {memory.ndim == 2 ? std::max<int64_t>(memory.sizes[1], 1) : 1, 1};
  Tensor tensor = artifact.tensor(memory.data, memory.type, memory.ndim, memory.sizes, strides);
  if (tensor == nullptr) fail(SOA_BAD_ARGUMENT, "argument %zu: torch makes no tensor of it", index);
  return tensor;
}

// torch's kernels use the thread counts that OpenMP and MKL have for the calling thread, and the last bits of
// their results depend on them. This sets both for one run and restores them.
class ThreadCount {
 public:
  // threads: 0 changes nothing.
  ThreadCount(const TorchCode &artifact, int threads) : artifact_(artifact), threads_(threads) {
    if (threads_ == 0 || artifact_.get_threads == nullptr || artifact_.set_threads == nullptr) return;
    static thread_local bool settled = false;
    if (!settled && artifact_.get_torch_threads != nullptr) {
      artifact_.get_torch_threads();  // the first query in a new thread makes torch set its count: do this now
      settled = true;
    }
    before_ = artifact_.get_threads();
    if (before_ != threads_) artifact_.set_threads(threads_);
    if (artifact_.set_mkl_threads != nullptr) mkl_before_ = artifact_.set_mkl_threads(threads_);
  }
  ~ThreadCount() {
    if (before_ == 0) return;
    if (before_ != threads_) artifact_.set_threads(before_);
    if (artifact_.set_mkl_threads != nullptr) artifact_.set_mkl_threads(mkl_before_);
  }

 private:
  const TorchCode &artifact_;
  const int threads_;
  int before_ = 0, mkl_before_ = 0;  // the former counts; before_ is 0 if nothing was changed
};

// Sets all `handles` to make(i). If one throws, the handles made so far are deleted.
template <typename Make>
void make_handles(const TorchCode &artifact, std::vector<Tensor> &handles, const Make &make) {
  size_t count = 0;
  try {
    for (; count < handles.size(); ++count) handles[count] = make(count);
  } catch (...) {
    while (count > 0) artifact.delete_tensor(handles[--count]);
    throw;
  }
}

// Tensor handles over the caller's memory.
class TorchArguments : public Bound {
 public:
  TorchArguments(TorchCode &artifact, const std::vector<Memory> &memory)
      : artifact_(artifact), memory_(memory), arguments_(memory.size()), stolen_(memory.size()) {
    make_handles(artifact_, arguments_, [&](size_t i) { return make_tensor(artifact_, memory_[i], i); });
  }

  ~TorchArguments() override {
    for (Tensor tensor : arguments_) artifact_.delete_tensor(tensor);
  }

  void replace(const std::vector<size_t> &indices, const std::vector<Memory> &memory) override {
    // All tensors are made before any is replaced, so that a run never sees half of a change.
    std::vector<Tensor> tensors(indices.size());
    make_handles(artifact_, tensors, [&](size_t k) { return make_tensor(artifact_, memory[k], indices[k]); });
    for (size_t k = 0; k < indices.size(); ++k) {
      std::swap(arguments_[indices[k]], tensors[k]);
      memory_[indices[k]] = memory[k];
      artifact_.delete_tensor(tensors[k]);  // the former one
    }
  }

  // In tiles if there are rows for at least two; a run that could have tiles, and has not, uses one thread as they do.
  void run(const Tiling &tiling, int threads, void *stream) override {
    const int64_t n = tiling.rows > 0 ? rows(tiling.kinds) : -1;
    if (n >= 2 * tiling.rows) return run_tiles(tiling, n, stream);
    make_handles(artifact_, stolen_, [&](size_t i) { return second_handle(i); });
    run_once(stolen_, tiling.rows > 0 ? 1 : threads, stream);
  }

 private:
  // The number of rows: that of the first argument that has them; 0 if there is none.
  int64_t rows(const std::string &kinds) const {
    const size_t first = kinds.find_first_of("nc");
    return first == std::string::npos ? 0 : memory_[first].sizes[0];
  }

  // A run takes ownership of its handles. A second handle of the same tensor only counts a reference.
  Tensor second_handle(size_t i) const {
    Tensor handle = nullptr;
    if (artifact_.new_handle(arguments_[i], &handle) != 0) {
      fail(SOA_RUN_FAILED, "argument %zu: no tensor handle", i);
    }
    return handle;
  }

  // Runs the artifact once on handles, of which it takes ownership.
  void run_once(std::vector<Tensor> &handles, int threads, void *stream) {
    const ThreadCount count(artifact_, threads);
    std::unique_lock<std::mutex> turn(artifact_.turn, std::defer_lock);
    if (artifact_.single) turn.lock();
    if (artifact_.run(artifact_.container, handles.data(), handles.size(), nullptr, 0, stream, nullptr) != 0) {
      fail(SOA_RUN_FAILED, "the artifact failed while running (see stderr)");
    }
  }

  // Runs all rows, one tile at a time, on up to tiling.threads threads. The tiles do not depend on the threads.
  void run_tiles(const Tiling &tiling, int64_t n, void *stream) {
    in_pieces(n, tiling.rows, tiling.threads, [&](int64_t begin, int64_t end) {
      std::vector<Tensor> handles(arguments_.size());
      make_handles(artifact_, handles, [&](size_t i) {
        const char kind = tiling.kinds[i];
        if (kind == '-') return second_handle(i);
        Memory part = memory_[i];
        if (kind != 'm') part.sizes[0] = end - begin;
        if (kind != 'n') part.data += static_cast<uint64_t>(begin) * kDtypes[part.type].bytes;
        return make_tensor(artifact_, part, i);
      });
      run_once(handles, 1, stream);  // threads share the tiles
    });
  }

  TorchCode &artifact_;
  std::vector<Memory> memory_;     // of each argument
  std::vector<Tensor> arguments_;  // our handles, over the caller's memory
  std::vector<Tensor> stolen_;     // scratch: the handles that a run takes over
};

inline std::unique_ptr<Bound> TorchCode::bind(const std::vector<Memory> &memory) {
  return std::make_unique<TorchArguments>(*this, memory);
}

}  // namespace soa_runner

#endif
