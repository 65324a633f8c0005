// The tensors of the shim and their memory. In a process without torch, the AtenTensorHandle of torch's C
// interface points to such a tensor.
#ifndef SOA_SHIM_TENSORS_H
#define SOA_SHIM_TENSORS_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#define SOA_EXPORT extern "C" __attribute__((visibility("default")))

namespace soa_shim {

constexpr int kMaxDims = 8;

// torch's numbers of the dtypes (c10/core/ScalarType.h).
enum Dtype : int32_t {
  kUInt8 = 0, kInt8 = 1, kInt16 = 2, kInt32 = 3, kInt64 = 4, kFloat16 = 5, kFloat32 = 6, kFloat64 = 7,
  kBool = 11, kBFloat16 = 15, kUInt16 = 27, kUInt32 = 28, kUInt64 = 29,
};
int64_t item_size(int32_t dtype);  // in bytes; throws if the dtype is none of these

// Memory with 64-byte alignment. A thread keeps the blocks that it gives back for later use, up to a limit.
void *take(size_t bytes);
void give(void *block, size_t bytes) noexcept;

// Memory for one call of an operator.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : bytes_(static_cast<size_t>(count) * sizeof(T)), data_(static_cast<T *>(take(bytes_))) {}
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  ~Scratch() { give(data_, bytes_); }
  T *data() const { return data_; }
  T &operator[](int64_t i) const { return data_[i]; }

 private:
  size_t bytes_;
  T *data_;
};

struct Storage {
  std::atomic<int> users{1};
  char *data;
  size_t bytes;
  bool owned;
};

struct Tensor {
  Storage *storage;
  int64_t offset, dims;  // the offset in elements
  int64_t sizes[kMaxDims], strides[kMaxDims];
  int32_t dtype;

  template <typename T>
  T *data() const {
    return reinterpret_cast<T *>(storage->data) + offset;
  }
  char *bytes() const { return storage->data + offset * item_size(dtype); }
  int64_t count() const;
  // The stride of a dimension that is broadcast to `size`. Dimensions are counted from the last, which is 0.
  int64_t step(int64_t from_last, int64_t size) const;
};

// Tensors that own their memory, which is not initialised.
Tensor *empty(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype);
Tensor *contiguous(int64_t dims, const int64_t *sizes, int32_t dtype);
// A dense tensor whose dimensions have the same order in memory as those of `like`: torch's empty_like.
Tensor *dense(const Tensor *like, const int64_t *sizes, int32_t dtype);

void require(bool fine, const char *what);
void require_float(std::initializer_list<const Tensor *> tensors);

// Every function of the interface returns 0; after an error it writes a message to stderr and returns 1.
int32_t failed(const char *name, const char *why) noexcept;
template <typename Function>
int32_t guarded(const char *name, Function &&function) noexcept {
  try {
    function();
    return 0;
  } catch (const std::exception &error) {
    return failed(name, error.what());
  }
}

}  // namespace soa_shim

// A function of the interface: SOA_SHIM(name, (parameters), { body }).
#define SOA_SHIM(NAME, PARAMETERS, ...) \
  SOA_EXPORT int32_t NAME PARAMETERS { return soa_shim::guarded(#NAME, [&] __VA_ARGS__); }

#endif
