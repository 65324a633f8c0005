// The elementary functions of float32 that AOTInductor's code calls. Those for vectors of eight have Sleef's names. Those
// for one value replace, through `ld --wrap`, functions of the C library whose bits depend on the processor. Both use the
// same implementation, which needs only AVX2 and FMA. All except exp compute in double precision and round once;
// tests/engines/native/ulps.py measures every function on all floats.
#include <immintrin.h>

#include <cmath>
#include <limits>

#include "product.h"
#include "tensors.h"

namespace {

using F = __m256;
using D = __m256d;
using I = __m256i;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kPi = 3.14159265358979323846, kLn2 = 0.69314718055994530942;

D all(double x) { return _mm256_set1_pd(x); }
D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
D select(D mask, D a, D b) { return _mm256_blendv_pd(b, a, mask); }
D round(D x) { return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
D floor(D x) { return _mm256_floor_pd(x); }
D absolute(D x) { return _mm256_andnot_pd(all(-0.0), x); }
D with_sign(D x, D of) { return _mm256_or_pd(absolute(x), _mm256_and_pd(all(-0.0), of)); }
D negative(D x) { return (D)((I)x >> 63); }  // the sign bit as a mask, also of -0
template <int kKind>
D is(D a, D b) {
  return _mm256_cmp_pd(a, b, kKind);
}
D equal(D a, D b) { return is<_CMP_EQ_OQ>(a, b); }
D above(D a, D b) { return is<_CMP_GT_OQ>(a, b); }

// c + x * (next + x * (…)).
D polynomial(D, double c) { return all(c); }
template <typename... Rest>
D polynomial(D x, double c, Rest... rest) {
  return fma(polynomial(x, rest...), x, all(c));
}

// For x = n log 2 + r: less_one = exp(r) - 1, and n.
struct Power {
  D less_one, n;
};
Power power(D x, double least, double most) {
  x = _mm256_min_pd(all(most), _mm256_max_pd(all(least), x));  // with this order of arguments NaN stays NaN
  const D n = round(x * all(1 / kLn2)), r = fma(n, all(-2.3190468138462996e-17), fma(n, all(-kLn2), x));
  const D tail = polynomial(r, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                            1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800);
  return {fma(r * r, tail, r), n};
}
D two_to(D n) { return (D)((I)(n + all(0x1p52 + 1023)) << 52); }
D exp(D x) {
  const Power p = power(x, -746, 711);
  const D half = floor(p.n * all(0.5));
  return (all(1) + p.less_one) * two_to(half) * two_to(p.n - half);
}
D expm1(D x) {
  const Power p = power(x, -50, 700);
  const D s = two_to(p.n), found = select(above(x, all(700)), exp(x), fma(p.less_one, s, s - all(1)));
  return select(equal(x, all(0)), x, found);
}
D exp2(D x) { return exp(x * all(kLn2)); }

// The method and coefficients are from fdlibm's e_log.c.
D log(D x) {
  const D tiny = above(all(0x1p-1022), x);
  const I bits = (I)select(tiny, x * all(0x1p54), x);
  D m = (D)((bits & 0x000fffffffffffff) | 0x3ff0000000000000);
  const D high = above(m, all(1.4142135623730951));
  m = select(high, m * all(0.5), m);
  const D exponent = (D)(_mm256_srli_epi64(bits, 52) | 0x4330000000000000) - all(0x1p52 + 1023);
  const D e = exponent + _mm256_and_pd(high, all(1)) - _mm256_and_pd(tiny, all(54));
  const D f = m - all(1), s = f / (all(2) + f), z = s * s, half = all(0.5) * f * f;
  const D series = polynomial(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                              2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                              1.479819860511658591e-01);
  const D low = fma(e, all(1.90821492927058770002e-10), s * fma(z, series, half));
  D found = fma(e, all(6.93147180369123816490e-01), f - (half - low));
  found = select(equal(x, all(0)), all(-kInf), found);
  found = select(equal(x, all(kInf)), x, found);
  return select(is<_CMP_GE_OQ>(x, all(0)), found, all(kNaN));
}
D log2(D x) { return log(x) * all(1 / kLn2); }
D log10(D x) { return log(x) * all(0.43429448190325182765); }
D log1p(D x) {
  const D u = all(1) + x, lost = (x - (u - all(1))) / u;  // the rounding error of the sum
  const D finite = _mm256_and_pd(above(u, all(0)), above(all(kInf), u));
  return select(equal(x, all(0)), x, log(u) + _mm256_and_pd(finite, lost));
}

D tanh(D x) {
  const D t = expm1(_mm256_min_pd(all(40), _mm256_max_pd(all(-40), x + x)));
  return t / (t + all(2));
}
D sinh(D x) {
  const D t = expm1(_mm256_min_pd(all(200), absolute(x)));
  return with_sign((t + t / (t + all(1))) * all(0.5), x);
}
D cosh(D x) {
  const D t = exp(absolute(x));
  return (t + all(1) / t) * all(0.5);
}
D asinh(D x) {
  const D a = absolute(x);
  const D more = a * a / (all(1) + _mm256_sqrt_pd(fma(a, a, all(1))));
  return with_sign(log1p(select(equal(a, all(kInf)), a, a + more)), x);
}
D acosh(D x) {
  const D t = x - all(1), found = log1p(t + _mm256_sqrt_pd(fma(t, t, t + t)));
  return select(above(all(1), x), all(kNaN), found);
}
D atanh(D x) {
  const D a = absolute(x);
  return with_sign(all(0.5) * log1p((a + a) / (all(1) - a)), x);
}

// x minus the nearest multiple of pi/2, and the number of that multiple modulo four.
struct Angle {
  D rest;
  I quarter;
};
// For a float of 2^30 or more (Payne and Hanek): the product of its 24 bits and the relevant bits of 2/pi.
double far_angle(double x, int64_t *quarter) {
  static const uint64_t two_over_pi[] = {0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041,
                                         0xfe5163abdebbc561};
  if (!std::isfinite(x)) return kNaN;
  int exponent = 0;
  const auto mantissa = static_cast<uint64_t>(std::frexp(std::fabs(x), &exponent) * 0x1p24);
  const int skip = exponent - 24 - 2, word = skip / 64, shift = skip % 64;
  unsigned __int128 window = static_cast<unsigned __int128>(two_over_pi[word]) << 64 | two_over_pi[word + 1];
  if (shift > 0) window = window << shift | two_over_pi[word + 2] >> (64 - shift);
  const unsigned __int128 turned = window * mantissa, one = static_cast<unsigned __int128>(1) << 126;
  const auto nearest = static_cast<int64_t>((turned + one / 2) >> 126);
  const auto left = static_cast<__int128>(turned - one * static_cast<uint64_t>(nearest));
  const double rest = static_cast<double>(left) * 0x1p-126 * (kPi / 2);
  *quarter = x < 0 ? -nearest : nearest;
  return x < 0 ? -rest : rest;
}
Angle angle(D x) {
  const D n = round(x * all(2 / kPi));
  Angle found{fma(n, all(-6.123233995736766e-17), fma(n, all(-kPi / 2), x)), (I)(n + all(0x1.8p52))};
  const int far = _mm256_movemask_pd(is<_CMP_NLT_UQ>(absolute(x), all(0x1p30)));
  for (int i = 0; far != 0 && i < 4; ++i) {
    if ((far >> i & 1) == 0) continue;
    int64_t quarter = 0;
    found.rest[i] = far_angle(x[i], &quarter);
    found.quarter[i] = quarter;
  }
  return found;
}
D sine(D r) {
  const D z = r * r;
  const D tail = polynomial(z, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800);
  return fma(r * z, tail, r);
}
D cosine(D r) {
  return polynomial(r * r, 1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                    -1.0 / 87178291200);
}
D odd(I quarter) { return (D)(quarter << 63); }  // as a mask for `select`, which uses the sign bit
D turned(const Angle &a, I quarter) {
  const D found = select(odd(quarter), cosine(a.rest), sine(a.rest));
  return _mm256_xor_pd(found, _mm256_and_pd((D)(quarter << 62), all(-0.0)));
}
D sin(D x) {
  const Angle a = angle(x);
  return select(equal(x, all(0)), x, turned(a, a.quarter));
}
D cos(D x) {
  const Angle a = angle(x);
  return turned(a, a.quarter + 1);
}
D tan(D x) {
  const Angle a = angle(x);
  const D s = sine(a.rest), c = cosine(a.rest), swap = odd(a.quarter);
  const D found = select(swap, all(0) - c, s) / select(swap, s, c);
  return select(equal(x, all(0)), x, found);
}

D atan2(D y, D x) {
  const D ax = absolute(x), ay = absolute(y), small = _mm256_min_pd(ax, ay), large = _mm256_max_pd(ax, ay);
  D t = select(equal(small, large), all(1), small / large);
  t = select(equal(large, all(0)), all(0), t);
  const D high = above(t, all(0.41421356237309503));
  const D u = select(high, (t - all(1)) / (t + all(1)), t), z = u * u;
  const D tail = polynomial(z, -3.33333333333329318027e-01, 1.99999999998764832476e-01, -1.42857142725034663711e-01,
                            1.11111104054623557880e-01, -9.09088713343650656196e-02, 7.69187620504482999495e-02,
                            -6.66107313738753120669e-02, 5.83357013379057348645e-02, -4.97687799461593236017e-02,
                            3.65315727442169155270e-02, -1.62858201153657823623e-02);  // from fdlibm's s_atan.c
  D found = fma(u * z, tail, u) + _mm256_and_pd(high, all(kPi / 4));
  found = select(above(ay, ax), all(kPi / 2) - found, found);
  found = select(negative(x), all(kPi) - found, found);
  return select(is<_CMP_UNORD_Q>(x, y), all(kNaN), with_sign(found, y));
}
D atan(D x) { return atan2(x, all(1)); }
D other_side(D x) { return _mm256_sqrt_pd((all(1) - x) * (all(1) + x)); }
D asin(D x) { return atan2(x, other_side(x)); }
D acos(D x) { return atan2(other_side(x), x); }

D pow(D x, D y) {
  const D ax = absolute(x), whole = equal(floor(y), y), half = y * all(0.5);
  const D uneven = _mm256_andnot_pd(equal(floor(half), half), whole);
  D found = exp(y * log(ax));
  found = _mm256_xor_pd(found, _mm256_and_pd(_mm256_and_pd(uneven, negative(x)), all(-0.0)));
  const D root = _mm256_and_pd(_mm256_and_pd(above(all(0), x), above(ax, all(0))), above(all(kInf), ax));
  found = select(_mm256_andnot_pd(whole, root), all(kNaN), found);  // a root of a negative number; y = ±inf counts as an integer
  found = select(_mm256_and_pd(equal(ax, all(1)), equal(absolute(y), all(kInf))), all(1), found);
  return select(_mm256_or_pd(equal(y, all(0)), equal(x, all(1))), all(1), found);
}

// W. H. Press et al., Numerical Recipes, third edition, 6.2.2: Chebyshev series of log(erfc(z) / t) + z^2.
D erfc_of_positive(D z) {
  static const double series[] = {-1.3026537197817094, 6.4196979235649026e-1, 1.9476473204185836e-2,
                                  -9.561514786808631e-3, -9.46595344482036e-4, 3.66839497852761e-4, 4.2523324806907e-5, -2.0278578112534e-5,
                                  -1.624290004647e-6, 1.303655835580e-6, 1.5626441722e-8, -8.5238095915e-8,
                                  6.529054439e-9, 5.059343495e-9, -9.91364156e-10, -2.27365122e-10, 9.6467911e-11};
  const D t = all(2) / (all(2) + z), twice = all(4) * t - all(2);
  D last = all(0), before = all(0);
  for (int j = 16; j > 0; --j) {
    const D next = fma(twice, last, all(series[j]) - before);
    before = last;
    last = next;
  }
  return t * exp(all(0.5) * fma(twice, last, all(series[0])) - before - z * z);
}
D erfc(D x) {
  const D found = erfc_of_positive(_mm256_min_pd(all(30), absolute(x)));
  return select(negative(x), all(2) - found, found);
}
D erf(D x) {
  const D a = absolute(x), z = a * a;
  const D near = a * polynomial(z, 1.1283791670955126, -0.37612638903183752, 0.11283791670955126, -0.026866170645131252,
                                0.0052239776254421878, -0.00085483270234508528, 0.00012055332981789664,
                                -1.4925650358406251e-05, 1.6462114365889246e-06);
  return with_sign(select(above(all(0.5), a), near, all(1) - erfc_of_positive(_mm256_min_pd(all(30), a))), x);
}
D hypot(D x, D y) {
  const D found = _mm256_sqrt_pd(fma(x, x, y * y));
  return select(_mm256_or_pd(equal(absolute(x), all(kInf)), equal(absolute(y), all(kInf))), all(kInf), found);
}

// exp in single precision, because networks call it most often.
F exp8(F x) {
  x = _mm256_min_ps(_mm256_set1_ps(89), _mm256_max_ps(_mm256_set1_ps(-105), x));
  const F n = _mm256_round_ps(x * _mm256_set1_ps(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693147182464599609375f), x);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(1.90465429995776806e-09f), r);
  F p = _mm256_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  }
  p = _mm256_fmadd_ps(p, r * r, r) + _mm256_set1_ps(1);
  const I e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), one = _mm256_set1_epi32(127);
  const auto power = [&](I k) { return (F)_mm256_slli_epi32(_mm256_add_epi32(k, one), 23); };
  return p * power(half) * power(_mm256_sub_epi32(e, half));
}

template <typename Function, typename... Values>
F eight(Function function, Values... x) {
  return _mm256_set_m128(_mm256_cvtpd_ps(function(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))...)),
                         _mm256_cvtpd_ps(function(_mm256_cvtps_pd(_mm256_castps256_ps128(x))...)));
}
template <typename Function, typename... Values>
float one(Function function, Values... x) {
  return static_cast<float>(function(all(static_cast<double>(x))...)[0]);
}
template <typename V, typename Function>
V each(Function function, V a, V b) {
  V found;
  for (size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i) found[i] = function(a[i], b[i]);
  return found;
}

}  // namespace

#define SOA_UNARY(NAME, SLEEF)                                              \
  SOA_EXPORT F Sleef_##SLEEF(F x) { return eight([](D v) { return NAME(v); }, x); } \
  SOA_EXPORT float __wrap_##NAME##f(float x) { return one([](D v) { return NAME(v); }, x); }
#define SOA_BINARY(NAME, SLEEF)                                                               \
  SOA_EXPORT F Sleef_##SLEEF(F x, F y) { return eight([](D v, D w) { return NAME(v, w); }, x, y); } \
  SOA_EXPORT float __wrap_##NAME##f(float x, float y) { return one([](D v, D w) { return NAME(v, w); }, x, y); }

SOA_UNARY(exp2, exp2f8_u10) SOA_UNARY(expm1, expm1f8_u10)
SOA_UNARY(log, logf8_u10) SOA_UNARY(log2, log2f8_u10) SOA_UNARY(log10, log10f8_u10) SOA_UNARY(log1p, log1pf8_u10)
SOA_UNARY(tanh, tanhf8_u10) SOA_UNARY(sinh, sinhf8_u10) SOA_UNARY(cosh, coshf8_u10)
SOA_UNARY(asinh, asinhf8_u10) SOA_UNARY(acosh, acoshf8_u10) SOA_UNARY(atanh, atanhf8_u10)
SOA_UNARY(sin, sinf8_u35) SOA_UNARY(cos, cosf8_u35) SOA_UNARY(tan, tanf8_u10)
SOA_UNARY(asin, asinf8_u10) SOA_UNARY(acos, acosf8_u10) SOA_UNARY(atan, atanf8_u10)
SOA_UNARY(erf, erff8_u10) SOA_UNARY(erfc, erfcf8_u15)
SOA_BINARY(atan2, atan2f8_u10) SOA_BINARY(pow, powf8_u10) SOA_BINARY(hypot, hypotf8_u05)

// Functions of doubles whose accuracy needs no wider arithmetic.
#define SOA_DOUBLE(NAME, SLEEF)                       \
  SOA_EXPORT D Sleef_##SLEEF(D x) { return NAME(x); } \
  SOA_EXPORT double __wrap_##NAME(double x) { return NAME(all(x))[0]; }
SOA_DOUBLE(exp, expd4_u10) SOA_DOUBLE(expm1, expm1d4_u10) SOA_DOUBLE(log, logd4_u10) SOA_DOUBLE(log1p, log1pd4_u10)
SOA_DOUBLE(tanh, tanhd4_u10) SOA_DOUBLE(atan, atand4_u10) SOA_DOUBLE(asin, asind4_u10) SOA_DOUBLE(acos, acosd4_u10)
SOA_EXPORT D Sleef_atan2d4_u10(D y, D x) { return atan2(y, x); }
SOA_EXPORT double __wrap_atan2(double y, double x) { return atan2(all(y), all(x))[0]; }

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
  float top = lowest;
  for (int64_t i = 0; i < n; ++i) {
    row[i] *= scale;
    if (mask != nullptr) row[i] += mask[i * step];
    top = row[i] > top || row[i] != row[i] ? row[i] : top;
  }
  if (top == lowest) top = 0;
  F sums = _mm256_setzero_ps();
  for (int64_t i = 0; i < n; i += 8) {
    float part[8];
    for (int64_t j = 0; j < 8; ++j) part[j] = i + j < n ? row[i + j] - top : lowest;
    const F found = exp8(_mm256_loadu_ps(part));
    sums += found;
    for (int64_t j = 0; j < 8 && i + j < n; ++j) row[i + j] = found[j];
  }
  float sum = 0;
  for (int j = 0; j < 8; ++j) sum += sums[j];
  for (int64_t i = 0; i < n; ++i) row[i] = sum == 0 ? 0 : row[i] / sum;
  return top + __wrap_logf(sum);
}
