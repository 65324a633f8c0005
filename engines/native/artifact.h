// What the runner asks of an artifact: to tie arguments to it, and to run them. What is refused is thrown as
// Failure, which stays inside the runner.
#ifndef SOA_ARTIFACT_H
#define SOA_ARTIFACT_H

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "include/soa_error.hpp"

namespace soa_runner {

struct Failure {
  soa::Refusal refusal;
  std::string text;
};

// What is refused; of what a function returns, where no more is known of it.
struct Refused : soa::Refusal {
  Refused(const soa::Refusal &refusal) : soa::Refusal(refusal) {}
  Refused(int returned_code)
      : soa::Refusal{returned_code == SOA_BAD_ARGUMENT ? soa::refusals::bind.code : soa::refusals::run.code, returned_code} {}
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Refused what, const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Failure{what, text};
}

// The code that soa_refusal gives.
inline thread_local const char *last_refusal = "";

// What a function of the C interface does with what was refused.
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

inline size_t dtype_index(const char *name) {
  size_t i = 0;
  while (i < kUnknown && std::strcmp(kDtypes[i].name, name) != 0) ++i;
  return i;
}

// An argument as it was given.
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
    fail(soa::refusals::collection, "argument %zu: null pointer for %llu bytes", index,
         static_cast<unsigned long long>(bytes));
  }
  if (address % kDtypes[type].bytes != 0) {
    fail(soa::refusals::collection, "argument %zu: address %p is not a multiple of %s's %llu bytes", index, given.data,
         given.dtype, static_cast<unsigned long long>(kDtypes[type].bytes));
  }
  if (!countable || bytes > PTRDIFF_MAX || address > UINTPTR_MAX - bytes) {
    fail(soa::refusals::collection, "argument %zu: its sizes pass the end of memory", index);
  }
  const auto ndim = static_cast<size_t>(given.ndim);
  return {static_cast<char *>(given.data), type, ndim, {given.sizes[0], ndim == 2 ? given.sizes[1] : 0}};
}

// How a call's rows are cut and shared; see soa_call_tile.
struct Tiling {
  std::string kinds;  // of the arguments; empty: nobody has said
  int64_t rows = 0;   // 0: all at once
  int threads = 1;
};

// Arguments tied to an artifact. One thread at a time uses it.
class Bound {
 public:
  Bound() = default;
  Bound(const Bound &) = delete;
  Bound &operator=(const Bound &) = delete;
  virtual ~Bound() = default;

  // Other memory for some arguments; all or, where it throws, none.
  virtual void replace(const std::vector<size_t> &indices, const std::vector<Memory> &memory) = 0;

  // threads: how many a library of the artifact's may use, 0 as it is set.
  virtual void run(const Tiling &tiling, int threads, void *stream) = 0;
};

// Opened code. It stays loaded when this is gone: it may be on some thread's stack, and AOTInductor's libraries
// register state that does not survive unloading.
class Artifact {
 public:
  Artifact(const Artifact &) = delete;
  Artifact &operator=(const Artifact &) = delete;
  virtual ~Artifact() = default;

  virtual std::unique_ptr<Bound> bind(const std::vector<Memory> &memory) = 0;

  // How many threads of OpenMP a run would use in this thread, where it is told to use `threads`.
  virtual int openmp_threads(int) const { return 1; }

  size_t inputs = 0;  // how many arguments it takes
  const bool on_gpu;

 protected:
  explicit Artifact(bool gpu) : on_gpu(gpu) {}
};

}  // namespace soa_runner

#endif
