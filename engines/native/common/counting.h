// Counts a column's values in bins: the distribution of what a model reads and answers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace soa_runner {

constexpr int64_t kCounted = 2048;  // values at a time: they stay in L1 for all edges

// The numbers in `counts` before those of the bins. Below and above: outside all bins.
enum : int { kNaN, kMinusInfinity, kInfinity, kZero, kBelow, kAbove, kBins };

// The number of values for which a predicate holds. A compiler makes vector code of it.
template <class T, class Predicate>
__attribute__((always_inline)) inline int32_t number_of(const T *values, int32_t n, Predicate holds) {
  int32_t number = 0;
  for (int32_t i = 0; i < n; ++i) number += holds(values[i]);
  return number;
}

// An edge in the dtype of the values: those below it are below `least`, or all are, or none.
template <class T>
struct Edge {
  T least;
  bool all = false;  // true if all values are below it; then `least` is not used

  explicit Edge(double edge) {
    if constexpr (std::is_integral_v<T>) {
      edge = std::ceil(std::max(edge, static_cast<double>(std::numeric_limits<T>::min())));
      all = edge >= std::ldexp(1.0, std::numeric_limits<T>::digits);  // beyond all values
    }
    least = all ? T() : static_cast<T>(edge);
  }

  // Whether zeros are below it. Asked of `least`: where the thread takes denormal numbers for 0, one that is denormal is 0.
  bool above_zero() const { return all || least > 0; }
};

// The numbers of values below four edges, in one pass over the values.
template <class T>
__attribute__((always_inline)) inline void numbers_below(const T *values, int32_t n, const Edge<T> *edges, int32_t *below) {
  const T a = edges[0].least, b = edges[1].least, c = edges[2].least, d = edges[3].least;
  int32_t of_a = 0, of_b = 0, of_c = 0, of_d = 0;
  for (int32_t i = 0; i < n; ++i) {
    of_a += values[i] < a;
    of_b += values[i] < b;
    of_c += values[i] < c;
    of_d += values[i] < d;
  }
  const int32_t counts[] = {of_a, of_b, of_c, of_d};
  for (int k = 0; k < 4; ++k) below[k] = edges[k].all ? n : counts[k];
}

// See count_between, which calls it for the dtype T.
template <class T>
__attribute__((always_inline)) inline void count_all(const void *memory, int64_t n, const double *edges, int32_t most,
                                                     int64_t *counts) {
  for (int64_t begin = 0; begin < n; begin += kCounted) {
    const T *values = static_cast<const T *>(memory) + begin;
    const auto size = static_cast<int32_t>(std::min(kCounted, n - begin));
    int32_t nan = 0, low = 0, high = 0;
    if constexpr (std::is_floating_point_v<T>) {
      constexpr T infinity = std::numeric_limits<T>::infinity();
      nan = number_of(values, size, [](T x) { return x != x; });
      low = number_of(values, size, [](T x) { return x == -infinity; });
      high = number_of(values, size, [](T x) { return x == infinity; });
    }
    const int32_t zero = number_of(values, size, [](T x) { return x == 0; });
    counts[kNaN] += nan;
    counts[kMinusInfinity] += low;
    counts[kInfinity] += high;
    counts[kZero] += zero;
    // Values are counted below each edge, without -infinity and zeros. A bin has the difference of two of these numbers.
    int32_t below_last = 0;
    for (int32_t first = 0; first < most; first += 4) {
      const auto edge = [&](int32_t k) { return Edge<T>(edges[std::min(first + k, most - 1)]); };
      const Edge<T> four[] = {edge(0), edge(1), edge(2), edge(3)};
      int32_t numbers[4];
      numbers_below(values, size, four, numbers);
      for (int32_t k = first; k < std::min(first + 4, most); ++k) {
        const int32_t below = numbers[k - first] - low - (four[k - first].above_zero() ? zero : 0);
        counts[k == 0 ? kBelow : kBins + k - 1] += below - below_last;
        below_last = below;
      }
    }
    counts[kAbove] += size - nan - low - high - zero - below_last;
  }
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2"))) void count_by_avx2(const void *memory, int64_t n, const double *edges, int32_t most,
                                                   int64_t *counts) {
  count_all<T>(memory, n, edges, most, counts);
}
#endif

// As count_all, by AVX2 if this processor has it.
template <class T>
void count_here(const void *memory, int64_t n, const double *edges, int32_t most, int64_t *counts) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return count_by_avx2<T>(memory, n, edges, most, counts);
#endif
  count_all<T>(memory, n, edges, most, counts);
}

// Adds to `counts`, which has kBins numbers and one for each bin: bin k has the values from edges[k] to below edges[k + 1].
// `most`: the number of edges. False for a dtype that is not counted here: float16 and bfloat16 are not.
inline bool count_between(const std::string &dtype, const void *memory, int64_t n, const double *edges,
                          int32_t most, int64_t *counts) {
  const auto count = dtype == "float32"   ? count_here<float>
                     : dtype == "float64" ? count_here<double>
                     : dtype == "bool"    ? count_here<uint8_t>
                     : dtype == "int8"    ? count_here<int8_t>
                     : dtype == "uint8"   ? count_here<uint8_t>
                     : dtype == "int16"   ? count_here<int16_t>
                     : dtype == "uint16"  ? count_here<uint16_t>
                     : dtype == "int32"   ? count_here<int32_t>
                     : dtype == "uint32"  ? count_here<uint32_t>
                     : dtype == "int64"   ? count_here<int64_t>
                                          : nullptr;
  if (count == nullptr) return false;
  count(memory, n, edges, most, counts);
  return true;
}

}  // namespace soa_runner
