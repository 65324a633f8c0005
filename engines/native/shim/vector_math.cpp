// The elementary functions that AOTInductor's code calls: those of the engine `lanes`, which need only AVX2 and FMA here.
// Those for vectors have Sleef's names. Those for one value replace, through `ld --wrap`, functions of the C library whose
// bits depend on the processor. All of float32 except exp compute in double precision and round once;
// tests/engines/lanes/ulps.py measures every function on all floats.
#include "../../lanes/headers/prelude.h"

#include <cmath>
#include <limits>

#include "product.h"
#include "tensors.h"

#pragma GCC diagnostic ignored "-Wignored-attributes"
namespace {

namespace lanes {
#define LANES 8
#define RV 1
#include "../../lanes/headers/lanes.h"
#include "../../lanes/headers/functions.h"
}  // namespace lanes

using F = __m256;
using D = __m256d;

// A function of two numbers for each element of two vectors.
template <typename V, typename Function>
V each(Function function, V a, V b) {
  V results;
  for (size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i) results[i] = function(a[i], b[i]);
  return results;
}

// A function of doubles for eight floats, for four doubles (as both halves of eight, which compilers compute once), and for
// one float.
template <typename Function, typename... Values>
F eight(Function function, Values... x) {
  return (F)lanes::to_float32(function(lanes::to_float64((lanes::F)x)...));
}
template <typename Function, typename... Values>
D four(Function function, Values... x) {
  return (D)function(lanes::D{(lanes::DHalf)x, (lanes::DHalf)x}...).low;
}
template <typename Function, typename... Values>
float one(Function function, Values... x) {
  return static_cast<float>(four(function, _mm256_set1_pd(x)...)[0]);
}
// In single precision, because networks call it most often.
F exp8(F x) { return (F)lanes::exp((lanes::F)x); }

}  // namespace

#define SOA_UNARY(NAME, SLEEF)                                                                         \
  SOA_EXPORT F Sleef_##SLEEF(F x) { return eight([](lanes::D v) { return lanes::NAME(v); }, x); }      \
  SOA_EXPORT float __wrap_##NAME##f(float x) { return one([](lanes::D v) { return lanes::NAME(v); }, x); }
#define SOA_BINARY(NAME, SLEEF)                                                                                         \
  SOA_EXPORT F Sleef_##SLEEF(F x, F y) { return eight([](lanes::D v, lanes::D w) { return lanes::NAME(v, w); }, x, y); } \
  SOA_EXPORT float __wrap_##NAME##f(float x, float y) {                                                                 \
    return one([](lanes::D v, lanes::D w) { return lanes::NAME(v, w); }, x, y);                                         \
  }

SOA_UNARY(exp2, exp2f8_u10) SOA_UNARY(expm1, expm1f8_u10)
SOA_UNARY(log, logf8_u10) SOA_UNARY(log2, log2f8_u10) SOA_UNARY(log10, log10f8_u10) SOA_UNARY(log1p, log1pf8_u10)
SOA_UNARY(tanh, tanhf8_u10) SOA_UNARY(sinh, sinhf8_u10) SOA_UNARY(cosh, coshf8_u10)
SOA_UNARY(asinh, asinhf8_u10) SOA_UNARY(acosh, acoshf8_u10) SOA_UNARY(atanh, atanhf8_u10)
SOA_UNARY(sin, sinf8_u35) SOA_UNARY(cos, cosf8_u35) SOA_UNARY(tan, tanf8_u10)
SOA_UNARY(asin, asinf8_u10) SOA_UNARY(acos, acosf8_u10) SOA_UNARY(atan, atanf8_u10)
SOA_UNARY(erf, erff8_u10) SOA_UNARY(erfc, erfcf8_u15)
SOA_BINARY(atan2, atan2f8_u10) SOA_BINARY(pow, powf8_u10) SOA_BINARY(hypot, hypotf8_u05)

// Functions of doubles whose accuracy needs no wider arithmetic.
#define SOA_DOUBLE(NAME, SLEEF)                                                                    \
  SOA_EXPORT D Sleef_##SLEEF(D x) { return four([](lanes::D v) { return lanes::NAME(v); }, x); }  \
  SOA_EXPORT double __wrap_##NAME(double x) {                                                      \
    return four([](lanes::D v) { return lanes::NAME(v); }, _mm256_set1_pd(x))[0];                  \
  }
SOA_DOUBLE(exp, expd4_u10) SOA_DOUBLE(expm1, expm1d4_u10) SOA_DOUBLE(log, logd4_u10) SOA_DOUBLE(log1p, log1pd4_u10)
SOA_DOUBLE(tanh, tanhd4_u10) SOA_DOUBLE(atan, atand4_u10) SOA_DOUBLE(asin, asind4_u10) SOA_DOUBLE(acos, acosd4_u10)
SOA_EXPORT D Sleef_atan2d4_u10(D y, D x) {
  return four([](lanes::D v, lanes::D w) { return lanes::atan2(v, w); }, y, x);
}
SOA_EXPORT double __wrap_atan2(double y, double x) { return Sleef_atan2d4_u10(_mm256_set1_pd(y), _mm256_set1_pd(x))[0]; }

SOA_EXPORT F Sleef_expf8_u10(F x) { return exp8(x); }
SOA_EXPORT float __wrap_expf(float x) { return exp8(_mm256_set1_ps(x))[0]; }
SOA_EXPORT void __wrap_sincosf(float x, float *sine_of, float *cosine_of) {
  *sine_of = __wrap_sinf(x);
  *cosine_of = __wrap_cosf(x);
}
// These functions are exact by definition, so those of the C library can be used.
#define SOA_EXACT(NAME)                                                                                              \
  SOA_EXPORT F Sleef_##NAME##f8(F x, F y) { return each([](float a, float b) { return std::NAME(a, b); }, x, y); }   \
  SOA_EXPORT D Sleef_##NAME##d4(D x, D y) { return each([](double a, double b) { return std::NAME(a, b); }, x, y); }
SOA_EXACT(fmod) SOA_EXACT(nextafter) SOA_EXACT(copysign)

float soa_shim::softmax(float *row, int64_t n, float scale, const float *mask, int64_t step) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  float top = lowest;  // the largest value, or NaN if there is one
  for (int64_t i = 0; i < n; ++i) {
    row[i] *= scale;
    if (mask != nullptr) row[i] += mask[i * step];
    top = row[i] > top || row[i] != row[i] ? row[i] : top;
  }
  if (top == lowest) top = 0;  // else -infinity - top were NaN
  F sums = _mm256_setzero_ps();
  for (int64_t i = 0; i < n; i += 8) {
    float differences[8];  // behind the row: -infinity, whose exponential is 0
    for (int64_t j = 0; j < 8; ++j) differences[j] = i + j < n ? row[i + j] - top : lowest;
    const F powers = exp8(_mm256_loadu_ps(differences));
    sums += powers;
    for (int64_t j = 0; j < 8 && i + j < n; ++j) row[i + j] = powers[j];
  }
  float sum = 0;
  for (int j = 0; j < 8; ++j) sum += sums[j];
  for (int64_t i = 0; i < n; ++i) row[i] = sum == 0 ? 0 : row[i] / sum;
  return top + __wrap_logf(sum);
}
