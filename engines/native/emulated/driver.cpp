// A driver that emulates a GPU on the CPU: the functions of libcuda.so.1 and libamdhip64.so that device_driver.h calls. It
// tests the whole path of a kernel except the GPU itself. It checks the order, handles and arguments of calls. Device memory can be
// accessed only while the device works, and ends at a page without access. Work on a stream waits until a call synchronises
// it, so that code which relies on earlier execution fails.
//
// Environment variables, with their defaults in brackets:
// SOA_EMULATED: a folder with `image`, the code that may be loaded, and `kernel.so`, the same source compiled for this CPU.
// SOA_EMULATED_ARCH: the architecture (90; it is 100 for 10.0). SOA_EMULATED_DEVICES: the number of devices (1).
// SOA_EMULATED_VENDOR: the vendor whose names are used ("cuda"). SOA_EMULATED_FAULT="FUNCTION CODE AFTER": calls of the
// function, given by its CUDA name, return CODE after AFTER calls that worked.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using Address = std::uintptr_t;
using Kernel = void (*)(const void *argument, std::uint32_t blocks, std::uint32_t threads);

enum Code { kOk = 0, kInvalid = 1, kNoMemory = 2, kNotStarted = 3, kNoDevice = 101, kBadImage = 200, kNoContext = 201,
            kNotFound = 500, kBadHandle = 400 };

// Attributes of a device: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, and those of hipDeviceAttribute_t.
enum Attribute { kCudaMajor = 75, kCudaMinor = 76, kHipMajor = 23, kHipMinor = 61 };
constexpr int kPointerDevice = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, and HIP's

struct Context {
  int device;
};
struct Stream {
  Context *context;
  std::vector<std::function<void()>> work;  // that waits
};
struct Module {
  Context *context;
  Kernel kernel;
  std::size_t argument_bytes;  // of the kernel's one argument
};
// Memory of a device: `size` bytes, at the end of `mapped` bytes that begin at `pages`.
struct Block {
  Address pages;
  std::size_t mapped, size;
  int device;
};

std::recursive_mutex mutex;  // of all below
bool started = false;
std::map<int, Context> contexts;
std::set<Stream *> streams;
std::set<Module *> modules;
std::map<Address, Block> memory;
thread_local std::vector<Context *> current;

// An environment variable, or `otherwise` if it is not set.
std::string setting(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

int devices() { return std::atoi(setting("SOA_EMULATED_DEVICES", "1").c_str()); }

// The first check of every call: a fault that is asked for, the start, and a context if the call needs one.
int checked(const char *function, bool needs_context = true) {
  static std::map<std::string, int> calls;
  char name[64] = "";
  int code = 0, after = 0;
  const bool fault = std::sscanf(setting("SOA_EMULATED_FAULT", "").c_str(), "%63s %d %d", name, &code, &after) >= 2;
  if (fault && std::strcmp(name, function) == 0 && calls[function]++ >= after) return code;
  if (!started) return kNotStarted;
  return needs_context && current.empty() ? kNoContext : kOk;
}

// Sets the access to all memory of a device, by the flags of mprotect.
void protect_memory(int device, int access) {
  for (const auto &[address, block] : memory) {
    if (block.device == device) ::mprotect(reinterpret_cast<void *>(block.pages), block.mapped, access);
  }
}

// Executes the waiting work of a stream, in order. All other streams keep waiting.
void work_off(Stream *stream) {
  protect_memory(stream->context->device, PROT_READ | PROT_WRITE);
  for (const auto &job : stream->work) job();
  stream->work.clear();
  protect_memory(stream->context->device, PROT_NONE);
}

// The stream of a handle, which may be null: the default stream of the current context. Null for an unknown handle.
Stream *stream_of(void *handle) {
  static std::map<Context *, Stream> defaults;
  if (handle == nullptr) return &defaults.try_emplace(current.back(), Stream{current.back(), {}}).first->second;
  auto *stream = static_cast<Stream *>(handle);
  return streams.count(stream) > 0 ? stream : nullptr;
}

// The block that has all of these bytes; null if there is none.
const Block *block_of(Address address, std::size_t size) {
  auto behind = memory.upper_bound(address);
  if (behind == memory.begin()) return nullptr;
  const auto &[begin, block] = *std::prev(behind);
  return address + size <= begin + block.size ? &block : nullptr;
}

// Puts work on a stream of the current context; returns the code of the call.
int queue(const char *function, void *handle, std::function<void()> work) {
  if (const int code = checked(function)) return code;
  Stream *stream = stream_of(handle);
  if (stream == nullptr || stream->context != current.back()) return kBadHandle;
  stream->work.push_back(std::move(work));
  return kOk;
}

}  // namespace

// A function of both drivers: ENTRY(name in CUDA, name in HIP, (parameters), (their names)) { body }.
#define ENTRY(cuda, hip, parameters, names)                                       \
  static int do_##cuda parameters;                                                \
  extern "C" __attribute__((visibility("default"))) int cuda parameters {         \
    const std::lock_guard<std::recursive_mutex> lock(mutex);                      \
    return do_##cuda names;                                                       \
  }                                                                               \
  extern "C" __attribute__((visibility("default"))) int hip parameters { return cuda names; } \
  static int do_##cuda parameters

ENTRY(cuInit, hipInit, (unsigned flags), (flags)) {
  if (flags != 0) return kInvalid;
  started = true;
  return checked("cuInit", false);
}
ENTRY(cuDeviceGetCount, hipGetDeviceCount, (int *count), (count)) {
  *count = devices();
  return checked("cuDeviceGetCount", false);
}
ENTRY(cuDeviceGet, hipDeviceGet, (int *device, int number), (device, number)) {
  if (number < 0 || number >= devices()) return kNoDevice;
  *device = number;
  return checked("cuDeviceGet", false);
}
ENTRY(cuDeviceGetAttribute, hipDeviceGetAttribute, (int *value, int attribute, int device), (value, attribute, device)) {
  const int arch = std::atoi(setting("SOA_EMULATED_ARCH", "90").c_str());
  if (device < 0 || device >= devices()) return kNoDevice;
  const bool major = attribute == kCudaMajor || attribute == kHipMajor;
  const bool minor = attribute == kCudaMinor || attribute == kHipMinor;
  if (!major && !minor) return kInvalid;
  *value = major ? arch / 10 : arch % 10;
  return checked("cuDeviceGetAttribute", false);
}
ENTRY(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain, (void **context, int device), (context, device)) {
  if (device < 0 || device >= devices()) return kNoDevice;
  *context = &contexts.try_emplace(device, Context{device}).first->second;
  return checked("cuDevicePrimaryCtxRetain", false);
}
ENTRY(cuDevicePrimaryCtxRelease_v2, hipDevicePrimaryCtxRelease, (int device), (device)) {
  return contexts.count(device) > 0 ? checked("cuDevicePrimaryCtxRelease_v2", false) : kNoContext;
}
ENTRY(cuCtxPushCurrent_v2, hipCtxPushCurrent, (void *context), (context)) {
  const auto is_this_context = [&](const auto &entry) { return &entry.second == context; };
  if (std::none_of(contexts.begin(), contexts.end(), is_this_context)) return kNoContext;
  current.push_back(static_cast<Context *>(context));
  return checked("cuCtxPushCurrent_v2");
}
ENTRY(cuCtxPopCurrent_v2, hipCtxPopCurrent, (void **context), (context)) {
  if (current.empty()) return kNoContext;
  *context = current.back();
  current.pop_back();
  return checked("cuCtxPopCurrent_v2", false);
}
ENTRY(cuModuleLoadData, hipModuleLoadData, (void **module, const void *image), (module, image)) {
  if (const int code = checked("cuModuleLoadData")) return code;
  const std::string folder = setting("SOA_EMULATED", ".");
  std::ifstream file(folder + "/image", std::ios::binary);
  const std::string allowed{std::istreambuf_iterator<char>(file), {}};
  if (allowed.empty() || std::memcmp(allowed.data(), image, allowed.size()) != 0) return kBadImage;
  void *library = dlopen((folder + "/kernel.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return kBadImage;
  const auto kernel = reinterpret_cast<Kernel>(dlsym(library, "soa_rows_on_cpu"));
  const auto *argument_bytes = static_cast<const std::uint64_t *>(dlsym(library, "soa_rows_given"));
  if (kernel == nullptr || argument_bytes == nullptr) return kBadImage;
  *module = *modules.insert(new Module{current.back(), kernel, *argument_bytes}).first;
  return kOk;
}
ENTRY(cuModuleUnload, hipModuleUnload, (void *module), (module)) {
  return modules.erase(static_cast<Module *>(module)) == 1 ? kOk : kBadHandle;
}
ENTRY(cuModuleGetFunction, hipModuleGetFunction, (void **function, void *module, const char *name), (function, module, name)) {
  if (const int code = checked("cuModuleGetFunction")) return code;
  if (modules.count(static_cast<Module *>(module)) == 0) return kBadHandle;
  if (std::strcmp(name, "soa_rows") != 0) return kNotFound;
  *function = module;
  return kOk;
}
ENTRY(cuLaunchKernel, hipModuleLaunchKernel,
      (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
       void **arguments, void **extra),
      (function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra)) {
  auto *module = static_cast<Module *>(function);
  if (modules.count(module) == 0) return kBadHandle;
  if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 || bz != 1 || shared != 0 || extra != nullptr) return kInvalid;
  if (!current.empty() && module->context != current.back()) return kNoContext;
  std::vector<std::uint64_t> copy((module->argument_bytes + 7) / 8);  // a launch copies its arguments
  std::memcpy(copy.data(), arguments[0], module->argument_bytes);
  return queue("cuLaunchKernel", stream, [=] { module->kernel(copy.data(), gx, bx); });
}
ENTRY(cuStreamGetCtx, hipStreamGetDevice, (void *handle, void *owner), (handle, owner)) {
  if (const int code = checked("cuStreamGetCtx")) return code;
  Stream *stream = stream_of(handle);
  if (stream == nullptr) return kBadHandle;
  const bool hip = setting("SOA_EMULATED_VENDOR", "cuda") == "rocm";
  if (hip) *static_cast<int *>(owner) = stream->context->device;
  if (!hip) *static_cast<void **>(owner) = stream->context;
  return kOk;
}
ENTRY(cuPointerGetAttribute, hipPointerGetAttribute, (void *value, int attribute, Address address), (value, attribute, address)) {
  if (const int code = checked("cuPointerGetAttribute", false)) return code;
  const Block *block = block_of(address, 1);
  if (block == nullptr || attribute != kPointerDevice) return kInvalid;
  *static_cast<int *>(value) = block->device;
  return kOk;
}
ENTRY(cuMemAlloc_v2, hipMalloc, (Address *address, std::size_t size), (address, size)) {
  if (const int code = checked("cuMemAlloc_v2")) return code;
  if (size == 0) return kInvalid;
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), room = (size + 255) / 256 * 256;
  const std::size_t mapped = (room + page - 1) / page * page;
  void *pages = ::mmap(nullptr, mapped + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return kNoMemory;
  *address = reinterpret_cast<Address>(pages) + mapped - room;  // it ends where the page without access begins
  memory[*address] = {reinterpret_cast<Address>(pages), mapped, size, current.back()->device};
  return kOk;
}
ENTRY(cuMemFree_v2, hipFree, (Address address), (address)) {
  const auto found = memory.find(address);
  if (found == memory.end()) return kInvalid;
  for (Stream *stream : streams) work_off(stream);  // freeing waits for the device
  ::munmap(reinterpret_cast<void *>(found->second.pages), found->second.mapped);
  memory.erase(found);
  return checked("cuMemFree_v2", false);
}
ENTRY(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (Address to, const void *from, std::size_t size, void *stream), (to, from, size, stream)) {
  if (block_of(to, size) == nullptr) return kInvalid;
  const std::string copy(static_cast<const char *>(from), size);
  return queue("cuMemcpyHtoDAsync_v2", stream, [=] { std::memcpy(reinterpret_cast<void *>(to), copy.data(), size); });
}
ENTRY(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (void *to, Address from, std::size_t size, void *stream), (to, from, size, stream)) {
  if (block_of(from, size) == nullptr) return kInvalid;
  return queue("cuMemcpyDtoHAsync_v2", stream, [=] { std::memcpy(to, reinterpret_cast<const void *>(from), size); });
}
ENTRY(cuStreamCreate, hipStreamCreateWithFlags, (void **stream, unsigned flags), (stream, flags)) {
  if (const int code = checked("cuStreamCreate")) return code;
  if (flags > 1) return kInvalid;
  *stream = *streams.insert(new Stream{current.back(), {}}).first;
  return kOk;
}
ENTRY(cuStreamSynchronize, hipStreamSynchronize, (void *handle), (handle)) {
  if (const int code = checked("cuStreamSynchronize")) return code;
  Stream *stream = stream_of(handle);
  if (stream == nullptr) return kBadHandle;
  work_off(stream);
  return kOk;
}
ENTRY(cuStreamDestroy_v2, hipStreamDestroy, (void *handle), (handle)) {
  auto *stream = static_cast<Stream *>(handle);
  if (streams.erase(stream) == 0) return kBadHandle;
  work_off(stream);
  delete stream;
  return checked("cuStreamDestroy_v2", false);
}
