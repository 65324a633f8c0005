// The driver of a GPU; one table has the function names of both vendors. Its library is opened at run time: no header of a
// vendor is included, and nothing is linked. Handles are pointers, and device addresses have the size of pointers.
#ifndef SOA_DEVICE_DRIVER_H
#define SOA_DEVICE_DRIVER_H

#include <dlfcn.h>

#include <string>

#include "artifact.h"

namespace soa_runner {

enum DriverFunction {
  kInit, kDeviceCount, kDevice, kAttribute, kRetain, kRelease, kPush, kPop, kLoad, kUnload, kFunction, kLaunch,
  kStreamOwner, kPointer, kAllocate, kFree, kCopyIn, kCopyOut, kNewStream, kSynchronise, kEndStream, kDriverFunctions
};

class Driver {
 public:
  // vendor: "cuda" or "rocm". The driver is opened once and never closed. Throws if it is not here or does not start.
  static const Driver &of(const std::string &vendor) {
    static const Driver cuda(kCuda), rocm(kRocm);
    const Driver &driver = vendor == "rocm" ? rocm : cuda;
    if (!driver.error_.empty()) fail(SOA_OPEN_FAILED, "%s", driver.error_.c_str());
    return driver;
  }

  // Calls a function. The arguments must have exactly the types of its parameters. `doing`: for the error message.
  template <typename... Arguments>
  void call(DriverFunction which, const char *doing, Arguments... arguments) const {
    const int code = attempt(which, arguments...);
    if (code != 0) fail(SOA_RUN_FAILED, "%s: %s failed: %s", doing, kNames[which][vendor_], error_text(code).c_str());
  }
  // As `call`, and returns the driver's code instead of throwing: 0 after success.
  template <typename... Arguments>
  int attempt(DriverFunction which, Arguments... arguments) const {
    return reinterpret_cast<int (*)(Arguments...)>(functions_[which])(arguments...);
  }

  // The number of devices.
  int devices() const {
    int count = 0;
    call(kDeviceCount, "counting devices", &count);
    return count;
  }

  // A device's handle, by its number.
  int device(int number) const {
    int handle = 0;
    call(kDevice, "opening the device", &handle, number);
    return handle;
  }

  // The architecture of a device, such as 90 for sm_90 or 94 for gfx942.
  int architecture(int device) const {
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR; the same of hipDeviceAttribute_t.
    const int major_attribute = rocm() ? 23 : 75, minor_attribute = rocm() ? 61 : 76;
    int major = 0, minor = 0;
    call(kAttribute, "asking for the device's architecture", &major, major_attribute, device);
    call(kAttribute, "asking for the device's architecture", &minor, minor_attribute, device);
    return 10 * major + minor;
  }

  bool rocm() const { return vendor_ == kRocm; }

 private:
  enum Vendor { kCuda, kRocm };  // the columns of kNames

  // Opens the driver. If that fails, `error_` says why.
  explicit Driver(Vendor vendor) : vendor_(vendor) {
    const char *library = rocm() ? "libamdhip64.so" : "libcuda.so.1";
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr && rocm()) handle = dlopen("libamdhip64.so.6", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      error_ = std::string(library) + ", the driver's library, is not here: run on a host with such a GPU";
      return;
    }
    for (int i = 0; i < kDriverFunctions; ++i) {
      functions_[i] = dlsym(handle, kNames[i][vendor]);
      if (functions_[i] == nullptr) error_ = std::string(library) + " is too old: it has no " + kNames[i][vendor];
    }
    if (!error_.empty()) return;
    const int code = attempt(kInit, 0u);
    if (code != 0) error_ = std::string(library) + " does not start: " + error_text(code);
  }

  // The text of an error code. These codes are the same for both vendors.
  static std::string error_text(int code) {
    struct Known {
      int code;
      const char *text;
    };
    const Known known[] = {
        {2, "out of device memory"},
        {100, "no device"},
        {101, "no such device"},
        {200, "the code is damaged"},
        {201, "the stream or the memory belongs to another context"},
        {209, "the code is for another kind of device"},
        {222, "the driver is too old for the code: update it, or build for this device"},
        {400, "a handle that the driver does not know: a stream that is gone, or of another context"},
        {700, "the kernel reached beyond the memory that it was given"},
        {719, "the kernel failed; the device takes no more work from this process"},
    };
    for (const Known &each : known) {
      if (each.code == code) return std::string(each.text) + " (error " + std::to_string(code) + ")";
    }
    return "error " + std::to_string(code);
  }

  static constexpr const char *kNames[kDriverFunctions][2] = {
      {"cuInit", "hipInit"},
      {"cuDeviceGetCount", "hipGetDeviceCount"},
      {"cuDeviceGet", "hipDeviceGet"},
      {"cuDeviceGetAttribute", "hipDeviceGetAttribute"},
      {"cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain"},
      {"cuDevicePrimaryCtxRelease_v2", "hipDevicePrimaryCtxRelease"},
      {"cuCtxPushCurrent_v2", "hipCtxPushCurrent"},
      {"cuCtxPopCurrent_v2", "hipCtxPopCurrent"},
      {"cuModuleLoadData", "hipModuleLoadData"},
      {"cuModuleUnload", "hipModuleUnload"},
      {"cuModuleGetFunction", "hipModuleGetFunction"},
      {"cuLaunchKernel", "hipModuleLaunchKernel"},
      {"cuStreamGetCtx", "hipStreamGetDevice"},
      {"cuPointerGetAttribute", "hipPointerGetAttribute"},
      {"cuMemAlloc_v2", "hipMalloc"},
      {"cuMemFree_v2", "hipFree"},
      {"cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"},
      {"cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"},
      {"cuStreamCreate", "hipStreamCreateWithFlags"},
      {"cuStreamSynchronize", "hipStreamSynchronize"},
      {"cuStreamDestroy_v2", "hipStreamDestroy"},
  };

  const Vendor vendor_;
  void *functions_[kDriverFunctions] = {};
  std::string error_;
};

// A device of a driver and its primary context, which torch, CuPy and alpaka use, too.
class Device {
 public:
  // device: "cuda" or "cuda:1", also for AMD's devices.
  Device(const Driver &driver, const std::string &device) : driver(driver) {
    const std::size_t colon = device.find(':');
    number = colon == std::string::npos ? 0 : std::atoi(device.c_str() + colon + 1);
    const int count = driver.devices();
    if (number < 0 || number >= count) fail(SOA_OPEN_FAILED, "there is no GPU %d here: the driver sees %d", number, count);
    handle_ = driver.device(number);
    driver.call(kRetain, "opening the device", &context_, handle_);
  }
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;
  ~Device() { driver.attempt(kRelease, handle_); }  // may fail at the end of the process, which does no harm

  int architecture() const { return driver.architecture(handle_); }

  // Makes the device's context current in the calling thread, as long as this object exists.
  class Current {
   public:
    explicit Current(const Device &device) : driver_(device.driver) {
      driver_.call(kPush, "turning to the device", device.context_);
    }
    ~Current() {
      void *before = nullptr;
      driver_.attempt(kPop, &before);
    }

   private:
    const Driver &driver_;
  };

  // Throws unless the stream is one of this device.
  void require_stream(void *stream) const {
    std::uintptr_t owner = 0;  // a context; for AMD the number of a device
    const std::uintptr_t wanted = driver.rocm() ? static_cast<std::uintptr_t>(number) : reinterpret_cast<std::uintptr_t>(context_);
    const int code = driver.attempt(kStreamOwner, stream, &owner);
    if (code != 0 || owner != wanted) {
      fail(soa::refusals::bind_device, "the stream is not one of device %d, on which the artifact was opened", number);
    }
  }

  // Throws unless the address of an argument is one of this device's memory.
  void require_memory(const void *address, std::size_t argument) const {
    constexpr int kDeviceNumber = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, and HIP's
    int owner = -1;
    const int code = driver.attempt(kPointer, &owner, kDeviceNumber, address);
    if (code != 0) {
      fail(soa::refusals::bind_device, "argument %zu: address %p is no memory that the driver knows: the artifact runs on device %d",
           argument, address, number);
    }
    if (owner != number) {
      fail(soa::refusals::bind_device, "argument %zu: its memory is of device %d, the artifact runs on device %d", argument, owner, number);
    }
  }

  const Driver &driver;
  int number = 0;

 private:
  int handle_ = 0;
  void *context_ = nullptr;
};

}  // namespace soa_runner

#endif
