// The part of torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h) that makes, describes and
// frees tensors, as AOTInductor's CPU libraries call it.
#include "tensors.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <vector>

namespace soa_shim {
namespace {

#ifndef SOA_SHIM_CACHED_BYTES  // 0 under sanitizers, so that they see when each block is freed
#define SOA_SHIM_CACHED_BYTES (size_t{256} << 20)
#endif

// Freed blocks of one thread, by size class, for the next run. Otherwise large blocks would be returned to the
// kernel, and the next run would have a page fault for each of their pages.
class Cache {
 public:
  ~Cache() {
    ended_ = true;
    for (auto &blocks : free_) {
      for (void *block : blocks) std::free(block);
    }
  }

  // A block of at least this size: a freed one of its size class, or a new one.
  static void *take(size_t bytes) {
    const int c = size_class(bytes);
    Cache *cache = mine();
    if (cache != nullptr && !cache->free_[c].empty()) {
      void *block = cache->free_[c].back();
      cache->free_[c].pop_back();
      cache->bytes_ -= class_size(c);
      return block;
    }
    void *block = std::aligned_alloc(64, class_size(c));
    if (block == nullptr) throw std::bad_alloc();
    return block;
  }

  // Keeps a block that `take(bytes)` gave, or frees it if the cache is full.
  static void give(void *block, size_t bytes) {
    const int c = size_class(bytes);
    Cache *cache = mine();
    if (cache == nullptr || cache->bytes_ + class_size(c) > SOA_SHIM_CACHED_BYTES) return std::free(block);
    try {
      cache->free_[c].push_back(block);
      cache->bytes_ += class_size(c);
    } catch (const std::bad_alloc &) {
      std::free(block);
    }
  }

 private:
  // Class 0 has up to 64 bytes. Then each power of two from 64 on has four classes, for its quarters: class 1 + 4 * p + q
  // has up to (5 + q) / 4 * 2^(6 + p) bytes.
  static int size_class(size_t bytes) {
    if (bytes <= 64) return 0;
    const int power = 63 - __builtin_clzll(bytes - 1);  // 2^power < bytes <= 2^(power + 1)
    const int quarter = static_cast<int>((bytes - 1) >> (power - 2) & 3);  // the two bits behind the first
    return 1 + 4 * (power - 6) + quarter;
  }
  // The size of the blocks of a class, in bytes: a multiple of 64, as their alignment.
  static size_t class_size(int c) {
    if (c == 0) return 64;
    const size_t power = (c - 1) / 4 + 6, quarter = (c - 1) % 4;
    const size_t bytes = (5 + quarter) << (power - 2);
    return (bytes + 63) / 64 * 64;
  }
  static Cache *mine() {  // null after this thread has destroyed its cache
    static thread_local Cache cache;
    return ended_ ? nullptr : &cache;
  }

  static inline thread_local bool ended_ = false;
  std::vector<void *> free_[4 * 58];  // by size class
  size_t bytes_ = 0;                  // in all of them
};

// Gives up one reference; the last one frees the memory, if the storage owns it.
void release(Storage *storage) noexcept {
  if (storage->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (storage->owned) give(storage->data, storage->bytes);
  give(storage, sizeof(Storage));
}

// A storage with one reference. owned: it frees the memory.
Storage *store(char *data, size_t bytes, bool owned) {
  Storage *storage = new (take(sizeof(Storage))) Storage;
  storage->data = data;
  storage->bytes = bytes;
  storage->owned = owned;
  return storage;
}

// Makes a tensor, which takes over one reference to `storage`.
Tensor *tensor(Storage *storage, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset,
               int32_t dtype) {
  auto *tensor = static_cast<Tensor *>(take(sizeof(Tensor)));
  tensor->storage = storage;
  tensor->offset = offset;
  tensor->dims = dims;
  tensor->dtype = dtype;
  std::copy(sizes, sizes + dims, tensor->sizes);
  std::copy(strides, strides + dims, tensor->strides);
  return tensor;
}

// Another tensor over the storage of `of`. offset: in its elements.
Tensor *view(const Tensor *of, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset) {
  require(dims <= kMaxDims, "more than eight dimensions");
  of->storage->users.fetch_add(1, std::memory_order_relaxed);
  return tensor(of->storage, dims, sizes, strides, offset, of->dtype);
}

// The number of elements from the first to the last, gaps included; 0 if there is none.
int64_t span_of(int64_t dims, const int64_t *sizes, const int64_t *strides) {
  int64_t last = 1;
  for (int64_t i = 0; i < dims; ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return last;
}

// Copies elements between strided tensors of the same shape and item size.
template <typename T>
void copy(T *to, const int64_t *to_strides, const T *from, const int64_t *from_strides, const int64_t *sizes,
          int64_t dims) {
  if (dims == 0) {
    *to = *from;
  } else {
    for (int64_t i = 0; i < sizes[0]; ++i) {
      copy(to + i * to_strides[0], to_strides + 1, from + i * from_strides[0], from_strides + 1, sizes + 1,
           dims - 1);
    }
  }
}

// Copies a tensor into another one of the same dtype, to whose shape it is broadcast.
void copy(const Tensor *to, const Tensor *from) {
  require(to->dtype == from->dtype, "a copy between dtypes");
  int64_t strides[kMaxDims];
  for (int64_t i = 0; i < to->dims; ++i) strides[i] = from->step(to->dims - 1 - i, to->sizes[i]);
  if (to->count() == 0) return;
  switch (item_size(to->dtype)) {
    case 1: return copy(to->data<uint8_t>(), to->strides, from->data<uint8_t>(), strides, to->sizes, to->dims);
    case 2: return copy(to->data<uint16_t>(), to->strides, from->data<uint16_t>(), strides, to->sizes, to->dims);
    case 4: return copy(to->data<uint32_t>(), to->strides, from->data<uint32_t>(), strides, to->sizes, to->dims);
    default: return copy(to->data<uint64_t>(), to->strides, from->data<uint64_t>(), strides, to->sizes, to->dims);
  }
}

thread_local bool grad_mode = false;

}  // namespace

void *take(size_t bytes) { return Cache::take(bytes); }
void give(void *block, size_t bytes) noexcept { Cache::give(block, bytes); }

void require(bool fine, const char *what) {
  if (!fine) throw std::runtime_error(std::string(what) + ": not supported without torch");
}

void require_float(std::initializer_list<const Tensor *> tensors) {
  for (const Tensor *each : tensors) require(each->dtype == kFloat32, "a dtype other than float32");
}

int32_t failed(const char *name, const char *why) noexcept {
  std::fprintf(stderr, "%s: %s\n", name, why);
  return 1;
}

int64_t item_size(int32_t dtype) {
  switch (dtype) {
    case kUInt8: case kInt8: case kBool: return 1;
    case kInt16: case kUInt16: case kFloat16: case kBFloat16: return 2;
    case kInt32: case kUInt32: case kFloat32: return 4;
    case kInt64: case kUInt64: case kFloat64: return 8;
    default: throw std::runtime_error("dtype " + std::to_string(dtype) + ": not supported without torch");
  }
}

int64_t Tensor::count() const {
  return std::accumulate(sizes, sizes + dims, int64_t{1}, std::multiplies<int64_t>());
}

int64_t Tensor::step(int64_t from_last, int64_t size) const {
  const int64_t at = dims - 1 - from_last;
  if (at < 0 || sizes[at] == 1) return 0;
  require(sizes[at] == size, "a shape that does not fit");
  return strides[at];
}

Tensor *empty(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  require(dims <= kMaxDims, "more than eight dimensions");
  const auto bytes = static_cast<size_t>(span_of(dims, sizes, strides) * item_size(dtype));
  return tensor(store(static_cast<char *>(take(bytes)), bytes, true), dims, sizes, strides, 0, dtype);
}

Tensor *contiguous(int64_t dims, const int64_t *sizes, int32_t dtype) {
  int64_t strides[kMaxDims], step = 1;
  require(dims <= kMaxDims, "more than eight dimensions");
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty(dims, sizes, strides, dtype);
}

Tensor *dense(const Tensor *like, const int64_t *sizes, int32_t dtype) {
  int64_t order[kMaxDims], strides[kMaxDims], step = 1;
  for (int64_t i = 0; i < like->dims; ++i) order[i] = like->dims - 1 - i;
  std::stable_sort(order, order + like->dims,
                   [&](int64_t a, int64_t b) { return like->strides[a] < like->strides[b]; });
  for (int64_t i = 0; i < like->dims; ++i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return empty(like->dims, sizes, strides, dtype);
}

}  // namespace soa_shim

using namespace soa_shim;

// The version of the shim. It is increased with every function that artifacts may need and an older shim lacks.
SOA_EXPORT int32_t soa_shim_version() { return 1; }

SOA_EXPORT int32_t aoti_torch_device_type_cpu() { return 0; }
SOA_EXPORT int32_t aoti_torch_device_type_cuda() { return 1; }
SOA_EXPORT int32_t aoti_torch_layout_strided() { return 0; }
SOA_EXPORT bool aoti_torch_grad_mode_is_enabled() { return grad_mode; }
SOA_EXPORT void aoti_torch_grad_mode_set_enabled(bool on) { grad_mode = on; }
SOA_EXPORT size_t aoti_torch_dtype_element_size(int32_t dtype) { return static_cast<size_t>(item_size(dtype)); }
#define SOA_DTYPE(NAME, VALUE) SOA_EXPORT int32_t aoti_torch_dtype_##NAME() { return VALUE; }
SOA_DTYPE(uint8, kUInt8) SOA_DTYPE(int8, kInt8) SOA_DTYPE(int16, kInt16) SOA_DTYPE(int32, kInt32)
SOA_DTYPE(int64, kInt64) SOA_DTYPE(float16, kFloat16) SOA_DTYPE(float32, kFloat32) SOA_DTYPE(float64, kFloat64)
SOA_DTYPE(bool, kBool) SOA_DTYPE(bfloat16, kBFloat16) SOA_DTYPE(uint16, kUInt16) SOA_DTYPE(uint32, kUInt32)
SOA_DTYPE(uint64, kUInt64)

// An assertion of the generated code, for example for the bounds of an index. If it is false, the run ends with an error.
SOA_EXPORT void aoti_torch_check(bool fine, const char *, const char *, uint32_t, const char *message) {
  if (!fine) throw std::runtime_error(message);
}

SOA_SHIM(aoti_torch_create_tensor_from_blob,
         (void *data, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype,
          int32_t device_type, int32_t, Tensor **result), {
  require(device_type == 0, "a device other than a CPU");
  require(dims <= kMaxDims, "more than eight dimensions");
  const auto bytes = static_cast<size_t>((offset + span_of(dims, sizes, strides)) * item_size(dtype));
  *result = tensor(store(static_cast<char *>(data), bytes, false), dims, sizes, strides, offset, dtype);
})
SOA_EXPORT int32_t aoti_torch_create_tensor_from_blob_v2(void *data, int64_t dims, const int64_t *sizes,
                                                         const int64_t *strides, int64_t offset, int32_t dtype,
                                                         int32_t device_type, int32_t device_index, Tensor **result,
                                                         int32_t layout, const uint8_t *, int64_t) {
  if (layout != 0) return failed(__func__, "a layout other than strided: not supported without torch");
  return aoti_torch_create_tensor_from_blob(data, dims, sizes, strides, offset, dtype, device_type, device_index, result);
}
SOA_SHIM(aoti_torch_empty_strided,
         (int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t, int32_t, Tensor **result),
         { *result = empty(dims, sizes, strides, dtype); })
SOA_SHIM(aoti_torch_delete_tensor_object, (Tensor * self), {
  if (self == nullptr) return;
  release(self->storage);
  give(self, sizeof(Tensor));
})
SOA_SHIM(aoti_torch_new_tensor_handle, (Tensor * self, Tensor **result),
         { *result = view(self, self->dims, self->sizes, self->strides, self->offset); })
SOA_SHIM(aoti_torch_assign_tensors_out, (Tensor * self, Tensor **result),
         { *result = view(self, self->dims, self->sizes, self->strides, self->offset); })
SOA_SHIM(aoti_torch__reinterpret_tensor,
         (Tensor * self, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset, Tensor **result),
         { *result = view(self, dims, sizes, strides, self->offset + offset); })
SOA_SHIM(aoti_torch_clone, (Tensor * self, Tensor **result), {
  *result = dense(self, self->sizes, self->dtype);
  copy(*result, self);
})
SOA_SHIM(aoti_torch_copy_, (Tensor * self, Tensor *from, int32_t), { copy(self, from); })
SOA_SHIM(aoti_torch_get_data_ptr, (Tensor * self, void **result), { *result = self->bytes(); })

#define SOA_GET(NAME, TYPE, VALUE) SOA_SHIM(aoti_torch_get_##NAME, (Tensor * self, TYPE *result), { *result = VALUE; })
SOA_GET(storage_size, int64_t, static_cast<int64_t>(self->storage->bytes))
SOA_GET(storage_offset, int64_t, self->offset)
SOA_GET(dim, int64_t, self->dims)
SOA_GET(numel, int64_t, self->count())
SOA_GET(sizes, int64_t *, self->sizes)
SOA_GET(strides, int64_t *, self->strides)
SOA_GET(dtype, int32_t, self->dtype)
SOA_GET(device_type, int32_t, (static_cast<void>(self), 0))
SOA_SHIM(aoti_torch_get_size, (Tensor * self, int64_t dim, int64_t *result), { *result = self->sizes[dim]; })
SOA_SHIM(aoti_torch_get_stride, (Tensor * self, int64_t dim, int64_t *result), { *result = self->strides[dim]; })
