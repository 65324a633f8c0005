// Counts a column's values between edges: the distribution of what a model reads and answers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace soa_runner {

constexpr int64_t kCounted = 2048;  // values at a time: they stay in L1 for all edges

// The numbers in `counts` before those of the edges.
enum : int { kNaN, kMinusInfinity, kInfinity, kZero, kEdges };

// The number of values for which `is` holds. A compiler makes vector code of it.
template <class T, class Is> int32_t number_of(const T *values, int32_t n, Is is) {
  int32_t found = 0;
  for (int32_t i = 0; i < n; ++i) found += is(values[i]);
  return found;
}

template <class T> int32_t number_below(const T *values, int32_t n, double edge) {
  if constexpr (std::is_integral_v<T>) {
    if (!(edge > static_cast<double>(std::numeric_limits<T>::min()))) return 0;
    if (edge >= std::ldexp(1.0, std::numeric_limits<T>::digits)) return n;  // beyond all values
    edge = std::ceil(edge);
  }
  const T limit = static_cast<T>(edge);
  return number_of(values, n, [limit](T x) { return x < limit; });
}

template <class T>
void count_all(const void *memory, int64_t n, const double *edges, int32_t most, int64_t *counts) {
  for (int64_t begin = 0; begin < n; begin += kCounted) {
    const T *values = static_cast<const T *>(memory) + begin;
    const auto some = static_cast<int32_t>(std::min(kCounted, n - begin));
    if constexpr (std::is_floating_point_v<T>) {
      constexpr T infinity = std::numeric_limits<T>::infinity();
      counts[kNaN] += number_of(values, some, [](T x) { return x != x; });
      counts[kMinusInfinity] += number_of(values, some, [](T x) { return x == -infinity; });
      counts[kInfinity] += number_of(values, some, [](T x) { return x == infinity; });
    }
    counts[kZero] += number_of(values, some, [](T x) { return x == 0; });
    for (int32_t k = 0; k < most; ++k) {
      counts[kEdges + k] += number_below(values, some, edges[k]);
    }
  }
}

// Adds to `counts`: the values that are NaN, -infinity, infinity and zero, and for each edge the
// values below it. False for a dtype that is not counted here: float16 and bfloat16 are not.
inline bool count_between(const std::string &dtype, const void *memory, int64_t n, const double *edges,
                          int32_t most, int64_t *counts) {
  const auto count = dtype == "float32"   ? count_all<float>
                     : dtype == "float64" ? count_all<double>
                     : dtype == "bool"    ? count_all<uint8_t>
                     : dtype == "int8"    ? count_all<int8_t>
                     : dtype == "uint8"   ? count_all<uint8_t>
                     : dtype == "int16"   ? count_all<int16_t>
                     : dtype == "uint16"  ? count_all<uint16_t>
                     : dtype == "int32"   ? count_all<int32_t>
                     : dtype == "uint32"  ? count_all<uint32_t>
                     : dtype == "int64"   ? count_all<int64_t>
                                          : nullptr;
  if (count == nullptr) return false;
  count(memory, n, edges, most, counts);
  return true;
}

}  // namespace soa_runner
