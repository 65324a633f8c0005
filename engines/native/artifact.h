// Opening an artifact: what is asked before its library is loaded, the symbols it must have, and the
// weights that lie beside it; and the arguments that it may be given. What is refused is thrown as
// Failure, which stays inside the runner.
#ifndef SOA_ARTIFACT_H
#define SOA_ARTIFACT_H

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cpu_level.h"
#include "include/soa_runner.h"

namespace soa_runner {

struct Failure {
  int code;
  std::string text;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int code, const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Failure{code, text};
}

// torch's stable C shim and AOTInductor's container interface, by their documented signatures.
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

struct Dtype {
  const char *name;
  uint64_t bytes;
};
const Dtype kDtypes[] = {{"bool", 1},    {"int8", 1},    {"int16", 2},    {"int32", 4},
                         {"int64", 8},   {"uint8", 1},   {"uint16", 2},   {"uint32", 4},
                         {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
constexpr size_t kUnknown = std::size(kDtypes);

inline size_t dtype_index(const char *name) {
  size_t i = 0;
  while (i < kUnknown && std::strcmp(kDtypes[i].name, name) != 0) ++i;
  return i;
}

// A function of a library, of whatever type it is assigned to.
struct Symbol {
  void *address;

  template <typename Function>
  operator Function() const {
    return reinterpret_cast<Function>(address);
  }
};

inline Symbol find(void *library, const std::string &name) {
  void *address = dlsym(library, name.c_str());
  if (address == nullptr) {
    fail(SOA_OPEN_FAILED, "no symbol %s: not an AOTInductor library, or torch is not there",
         name.c_str());
  }
  return {address};
}

// Whether every byte that the ELF headers name is in the file. The dynamic loader does not look: it
// maps a truncated library, and touching what is missing kills the process.
inline void require_whole_library(const char *path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(SOA_OPEN_FAILED, "%s: cannot be read: %s", path, std::strerror(errno));
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
  if (!whole) fail(SOA_OPEN_FAILED, "%s: not a whole 64-bit ELF library", path);
}

// The library that stands in for torch: beside this code, else wherever the loader looks. It stays loaded,
// and the artifact finds it by its name.
inline void load_shim(int version) {
  Dl_info here;
  const std::string name = "libsoa_shim.so";
  std::string path = name;
  if (dladdr(reinterpret_cast<void *>(&load_shim), &here) != 0) {
    const std::string code = here.dli_fname, beside = code.substr(0, code.rfind('/') + 1) + name;
    if (::access(beside.c_str(), F_OK) == 0) {
      require_whole_library(beside.c_str());
      path = beside;
    }
  }
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(SOA_OPEN_FAILED, "an artifact that runs without torch needs %s", dlerror());
  const auto found = reinterpret_cast<int32_t (*)()>(dlsym(handle, "soa_shim_version"));
  if (found == nullptr || found() < version) {
    fail(SOA_OPEN_FAILED, "the artifact needs version %d of %s, this one is %d: install a newer soa-pipeline", version,
         name.c_str(), found != nullptr ? found() : 0);
  }
}

// That this host runs what folder/target.txt says the library was built for. Asked before it is
// loaded: code of a higher CPU level would end the process by SIGILL. Returns whether the library runs
// without torch; then the shim has been loaded.
inline bool require_target(const std::string &folder, const char *device) {
  std::ifstream file(folder + "/target.txt");
  if (!file) return false;  // an artifact that does not say
  std::string line, target;
  if (!std::getline(file, line) || line != "soa-target 1" || !std::getline(file, target) ||
      target.find('/') == std::string::npos) {
    fail(SOA_OPEN_FAILED, "%s/target.txt: not a target", folder.c_str());
  }
  const bool for_cpu = target.compare(0, 4, "cpu/") == 0;
  if (for_cpu != (std::strncmp(device, "cpu", 3) == 0)) {
    fail(SOA_OPEN_FAILED, "the artifact was built for %s: it cannot be opened on %s", target.c_str(), device);
  }
  const std::string lacking = for_cpu ? soa_cpu::missing_here(target.substr(4)) : "";
  if (!lacking.empty()) {
    fail(SOA_OPEN_FAILED, "this host cannot run %s: it lacks %s", target.c_str(), lacking.c_str());
  }
  int version = 0;
  if (!std::getline(file, line) || std::sscanf(line.c_str(), "soa-shim %d", &version) != 1) return false;
  load_shim(version);
  return true;
}

// A loaded library with its container. It stays loaded when this is gone: its code may be on some
// thread's stack, and AOTInductor libraries register state that does not survive unloading.
class Artifact {
 public:
  // folder: null, or the artifact's; with 0 instances, `run` touches no event and no queue of them.
  Artifact(const char *library, const char *device, const char *folder, int32_t instances)
      : on_gpu(std::strncmp(device, "cuda", 4) == 0), single(instances == 0) {
    require_whole_library(library);
    int mode = RTLD_NOW | RTLD_LOCAL;
    const bool without_torch = folder != nullptr && require_target(folder, device);
    // Where torch's functions are there for the whole process, the shim's have to be found first.
    if (without_torch && dlsym(RTLD_DEFAULT, "aoti_torch_get_data_ptr") != nullptr) mode |= RTLD_DEEPBIND;
    void *handle = dlopen(library, mode);
    if (handle == nullptr) fail(SOA_OPEN_FAILED, "%s", dlerror());
    const CreateContainer create = find(handle, "AOTInductorModelContainerCreateWithDevice");
    delete_container_ = find(handle, "AOTInductorModelContainerDelete");
    run = find(handle, single ? "AOTInductorModelContainerRunSingleThreaded" : "AOTInductorModelContainerRun");
    const Count count_inputs = find(handle, "AOTInductorModelContainerGetNumInputs");
    const Count count_outputs = find(handle, "AOTInductorModelContainerGetNumOutputs");
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
  Artifact(const Artifact &) = delete;
  Artifact &operator=(const Artifact &) = delete;
  ~Artifact() { release(); }

  // A tensor over memory that stays its owner's; null if torch makes none.
  Tensor tensor(void *data, size_t dtype, size_t ndim, const int64_t *sizes, const int64_t *strides) const {
    Tensor made = nullptr;
    const int32_t code = create_tensor_(data, static_cast<int64_t>(ndim), sizes, strides, 0, dtypes_[dtype],
                                        device_type_, device_index_, &made);
    return code == 0 ? made : nullptr;
  }

  const bool on_gpu, single;
  Container container = nullptr;
  size_t inputs = 0;
  int32_t (*run)(Container, Tensor *, size_t, Tensor *, size_t, void *, void *) = nullptr;
  int32_t (*delete_tensor)(Tensor) = nullptr;
  int32_t (*new_handle)(Tensor, Tensor *) = nullptr;
  // Optional: torch may be built without OpenMP.
  int (*get_torch_threads)() = nullptr;
  int (*get_threads)() = nullptr;
  void (*set_threads)(int) = nullptr;
  int (*set_mkl_threads)(int) = nullptr;  // of this thread alone; returns what it was, 0: not set

 private:
  // Map folder/weights.bin, read-only, and hand its tensors to the container, which borrows them.
  void take_weights(void *handle, const std::string &library, const std::string &folder) {
    std::ifstream index(folder + "/weights.txt");
    if (!index) {
      // By its name, since a library without weights runs until it reads one.
      const std::string bare = ".bare.so";
      if (library.size() <= bare.size() ||
          library.compare(library.size() - bare.size(), bare.size(), bare) != 0) {
        return;
      }
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
      Tensor made = weight(line, &name);
      if (made == nullptr) {
        fail(SOA_OPEN_FAILED, "%s/weights.txt does not fit weights.bin: %s", folder.c_str(), line.c_str());
      }
      weights_.push_back(made);
      names.push_back(name);
    }
    if (names.empty()) return;  // a model without weights
    std::vector<ConstantEntry> constants;
    for (size_t i = 0; i < names.size(); ++i) constants.push_back({names[i].c_str(), weights_[i]});
    if (set(container, constants.data(), constants.size(), false, true) != 0) {
      fail(SOA_OPEN_FAILED, "%s/weights.txt: not this artifact's weights (see stderr)", folder.c_str());
    }
  }

  void map(const std::string &path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (file < 0 || ::fstat(file, &found) != 0) {
      const int why = errno;
      if (file >= 0) ::close(file);
      fail(SOA_OPEN_FAILED, "%s: %s", path.c_str(), std::strerror(why));
    }
    mapped_ = static_cast<uint64_t>(found.st_size);
    void *mapping = mapped_ > 0 ? ::mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
    ::close(file);
    if (mapping == MAP_FAILED) fail(SOA_OPEN_FAILED, "%s: cannot be mapped", path.c_str());
    mapping_ = mapping;
  }

  // NAME DTYPE ITEMSIZE OFFSET NDIM SIZES... STRIDES...; null where that does not lie in the mapping.
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
    if (fields.fail() || type == kUnknown || itemsize != kDtypes[type].bytes || offset > mapped_ ||
        offset % itemsize != 0) {
      return nullptr;
    }
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    uint64_t elements = empty ? 0 : 1;  // from the first to the last, gaps included
    for (size_t i = 0; i < ndim; ++i) {
      uint64_t reach = 0;
      if (sizes[i] < 0 || strides[i] < 0) return nullptr;
      if (!empty && (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) ||
                     __builtin_add_overflow(elements, reach, &elements))) {
        return nullptr;
      }
    }
    if (elements > (mapped_ - offset) / itemsize) return nullptr;
    return tensor(static_cast<char *>(mapping_) + offset, type, ndim, sizes.data(), strides.data());
  }

  void release() {
    if (container != nullptr) delete_container_(container);
    for (Tensor each : weights_) delete_tensor(each);
    if (mapping_ != nullptr) munmap(mapping_, mapped_);
  }

  CreateTensor create_tensor_ = nullptr;
  int32_t (*delete_container_)(Container) = nullptr;
  int32_t dtypes_[kUnknown] = {};
  int32_t device_type_ = 0, device_index_ = 0;
  void *mapping_ = nullptr;
  uint64_t mapped_ = 0;
  std::vector<Tensor> weights_;
};

// An argument as it was given, for the parts of it that tiles run on.
struct Memory {
  char *data;
  size_t type, ndim;
  int64_t sizes[2];
};

inline Memory checked(const soa_tensor &given, size_t index) {
  if (given.dtype == nullptr || given.ndim < 1 || given.ndim > 2) {
    fail(SOA_BAD_ARGUMENT, "argument %zu: needs a dtype and 1 or 2 sizes", index);
  }
  const size_t type = dtype_index(given.dtype);
  if (type == kUnknown) fail(SOA_BAD_ARGUMENT, "argument %zu: unknown dtype %s", index, given.dtype);
  uint64_t bytes = kDtypes[type].bytes;
  bool countable = true;
  for (int i = 0; i < given.ndim; ++i) {
    if (given.sizes[i] < 0) {
      fail(SOA_BAD_ARGUMENT, "argument %zu: size %lld is negative", index, static_cast<long long>(given.sizes[i]));
    }
    countable = countable && !__builtin_mul_overflow(bytes, given.sizes[i], &bytes);
  }
  const auto address = reinterpret_cast<uintptr_t>(given.data);
  if (address == 0 && bytes > 0) {
    fail(SOA_BAD_ARGUMENT, "argument %zu: null pointer for %llu bytes", index,
         static_cast<unsigned long long>(bytes));
  }
  if (address % kDtypes[type].bytes != 0) {
    fail(SOA_BAD_ARGUMENT, "argument %zu: address %p is not a multiple of %s's %llu bytes", index, given.data,
         given.dtype, static_cast<unsigned long long>(kDtypes[type].bytes));
  }
  if (!countable || bytes > PTRDIFF_MAX || address > UINTPTR_MAX - bytes) {
    fail(SOA_BAD_ARGUMENT, "argument %zu: its sizes pass the end of memory", index);
  }
  const auto ndim = static_cast<size_t>(given.ndim);
  return {static_cast<char *>(given.data), type, ndim, {given.sizes[0], ndim == 2 ? given.sizes[1] : 0}};
}

inline Tensor make_tensor(const Artifact &artifact, const Memory &memory, size_t index) {
  const int64_t strides[2] = {memory.ndim == 2 ? std::max<int64_t>(memory.sizes[1], 1) : 1, 1};
  Tensor made = artifact.tensor(memory.data, memory.type, memory.ndim, memory.sizes, strides);
  if (made == nullptr) fail(SOA_BAD_ARGUMENT, "argument %zu: torch makes no tensor of it", index);
  return made;
}

}  // namespace soa_runner

#endif
