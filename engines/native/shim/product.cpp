#include "product.h"

#include <immintrin.h>

#include "tensors.h"

namespace soa_shim {

// Both widths give the same bits.
namespace wide256 {
using Vector = __m256;
constexpr int kLanes = 8;
inline Vector load(const float *from) { return _mm256_loadu_ps(from); }
inline void store(float *to, Vector value) { _mm256_storeu_ps(to, value); }
inline Vector spread(float value) { return _mm256_set1_ps(value); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#include "product.inc"
}  // namespace wide256

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace wide512 {
using Vector = __m512;
constexpr int kLanes = 16;
inline Vector load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Vector value) { _mm512_storeu_ps(to, value); }
inline Vector spread(float value) { return _mm512_set1_ps(value); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#include "product.inc"
}  // namespace wide512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace {
const bool has_512 = __builtin_cpu_supports("avx512f") != 0;
constexpr int64_t kWidest = 2 * wide512::kLanes;  // the largest width of a panel
}  // namespace

void multiply(Matrix out, Matrix a, Matrix b, Addend addend) {
  const Scratch<float> panel(kWidest * a.cols);
  (has_512 ? wide512::product_of : wide256::product_of)(out, a, b, addend, panel.data());
}

int64_t packed_size(Matrix weights) { return (weights.rows + kWidest - 1) / kWidest * kWidest * weights.cols; }

void pack_weights(Matrix weights, float *packed) { (has_512 ? wide512::pack_of : wide256::pack_of)(weights, packed); }

void convolve(Matrix out, const Segments &segments, const float *packed, const float *bias) {
  (has_512 ? wide512::convolution_of : wide256::convolution_of)(out, segments, packed, bias);
}

}  // namespace soa_shim
