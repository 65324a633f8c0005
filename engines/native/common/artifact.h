// The interface between the runner and an artifact: arguments are tied to the artifact, which then runs on them. Errors
// are thrown as soa::Error, which does not leave the runner.
#ifndef SOA_ARTIFACT_H
#define SOA_ARTIFACT_H

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../include/soa_error.hpp"

namespace soa_runner {

// A refusal. It can also be made of the code that a function returns, if nothing more is known.
struct Refused : soa::Refusal {
  Refused(const soa::Refusal &refusal) : soa::Refusal(refusal) {}
  Refused(int returned_code)
      : soa::Refusal{returned_code == SOA_BAD_ARGUMENT ? soa::refusals::bind.code : soa::refusals::run.code, returned_code} {}
};

// Throws an error with a message in the format of printf, of which 2047 bytes are kept.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Refused refusal, const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw soa::Error(text, refusal);
}

// The code that soa_refusal returns.
inline thread_local const char *last_refusal = "";

// Reports a refusal from a function of the C interface: stores the code, writes the message, gives the returned code.
inline int told(const soa::Refusal &refusal, const std::string &text, char *message, size_t size) {
  last_refusal = refusal.code;
  if (message != nullptr && size > 0) std::snprintf(message, size, "%s", text.c_str());
  return refusal.returned;
}

struct Dtype {
  const char *name;
  uint64_t bytes;
};
const Dtype kDtypes[] = {{"bool", 1},    {"int8", 1},    {"int16", 2},    {"int32", 4},
                         {"int64", 8},   {"uint8", 1},   {"uint16", 2},   {"uint32", 4},
                         {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
constexpr size_t kUnknown = std::size(kDtypes);

// The index of a dtype in kDtypes; kUnknown if it is none of them.
inline size_t dtype_index(const char *name) {
  size_t i = 0;
  while (i < kUnknown && std::strcmp(kDtypes[i].name, name) != 0) ++i;
  return i;
}

// The memory of an argument.
struct Memory {
  char *data;
  size_t type, ndim;  // type: the index of the dtype in kDtypes
  int64_t sizes[2];
};

// The memory that a caller describes. Fails unless its dtype, sizes and address are possible.
inline Memory checked(const soa_tensor &tensor, size_t index) {
  if (tensor.dtype == nullptr || tensor.ndim < 1 || tensor.ndim > 2) {
    fail(SOA_BAD_ARGUMENT, "argument %zu: needs a dtype and 1 or 2 sizes", index);
  }
  const size_t type = dtype_index(tensor.dtype);
  if (type == kUnknown) fail(SOA_BAD_ARGUMENT, "argument %zu: unknown dtype %s", index, tensor.dtype);
  uint64_t bytes = kDtypes[type].bytes;
  bool countable = true;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.sizes[i] < 0) {
      fail(SOA_BAD_ARGUMENT, "argument %zu: size %lld is negative", index, static_cast<long long>(tensor.sizes[i]));
    }
    countable = countable && !__builtin_mul_overflow(bytes, tensor.sizes[i], &bytes);
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (address == 0 && bytes > 0) {
    fail(soa::refusals::collection, "argument %zu: null pointer for %llu bytes", index,
         static_cast<unsigned long long>(bytes));
  }
  if (bytes > 0 && address % kDtypes[type].bytes != 0) {
    fail(soa::refusals::collection, "argument %zu: address %p is not a multiple of %s's %llu bytes", index, tensor.data,
         tensor.dtype, static_cast<unsigned long long>(kDtypes[type].bytes));
  }
  if (!countable || bytes > PTRDIFF_MAX || address > UINTPTR_MAX - bytes) {
    fail(soa::refusals::collection, "argument %zu: its sizes pass the end of memory", index);
  }
  const auto ndim = static_cast<size_t>(tensor.ndim);
  return {static_cast<char *>(tensor.data), type, ndim, {tensor.sizes[0], ndim == 2 ? tensor.sizes[1] : 0}};
}

// How the rows of a call are cut into tiles; see soa_call_tile.
struct Tiling {
  std::string kinds;  // a letter for each argument; empty: not given
  int64_t rows = 0;   // rows of a tile; 0: all rows at once
  int threads = 1;
};

// Arguments tied to an artifact. Only one thread at a time may use them.
class Bound {
 public:
  Bound() = default;
  Bound(const Bound &) = delete;
  Bound &operator=(const Bound &) = delete;
  virtual ~Bound() = default;

  // Replaces the memory of some arguments. If it throws, all arguments are as before.
  virtual void replace(const std::vector<size_t> &indices, const std::vector<Memory> &memory) = 0;

  // threads: how many threads may compute this run; 0: as the artifact's libraries are set.
  virtual void run(const Tiling &tiling, int threads, void *stream) = 0;
};

// Opened code. It stays loaded after this object is destroyed, because it may be on the stack of a thread, and because
// libraries of AOTInductor (not those of `lanes`) register state that does not survive unloading.
class Artifact {
 public:
  Artifact(const Artifact &) = delete;
  Artifact &operator=(const Artifact &) = delete;
  virtual ~Artifact() = default;

  virtual std::unique_ptr<Bound> bind(const std::vector<Memory> &memory) = 0;

  // How many OpenMP threads a run in this thread would use, if its setting is `threads`.
  virtual int openmp_threads(int) const { return 1; }

  size_t inputs = 0;  // the number of arguments
  const bool on_gpu;

 protected:
  explicit Artifact(bool gpu) : on_gpu(gpu) {}
};

}  // namespace soa_runner

#endif
