// Vectors of rows: F, D, I and Q are LANES rows of float, double, int32_t and int64_t.
//
// Included once for each width, each time in a separate namespace, with LANES and RV (vectors in a row block)
// defined. A truth value is an I of -1 (true) or 0. Every operation is exact or rounds once, so that results
// do not depend on the width or on the processor. Only an `fma` in the source is compiled to an fma
// (-ffp-contract=off). x86-64-v2 has no fma: there `fma` rounds twice, and the bits differ.

#if LANES == 16
#define X86(name) _mm512_##name
#elif LANES == 8
#define X86(name) _mm256_##name
#define X86_INDEX(at) (__m256i) at
#else
#define X86(name) _mm_##name
#define X86_INDEX(at) (__m128i) at
#endif

constexpr int kRows = LANES * RV;

typedef float F __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t I __attribute__((vector_size(LANES * 4), may_alias));
typedef double D_ __attribute__((vector_size(LANES * 8), may_alias));
typedef int64_t Q_ __attribute__((vector_size(LANES * 8), may_alias));
typedef double DHalf __attribute__((vector_size(LANES * 4), may_alias));
typedef int64_t QHalf __attribute__((vector_size(LANES * 4), may_alias));

// Elements of eight bytes take two registers: compilers split comparisons of wider vectors into single elements.
struct D {
  DHalf low, high;
};
struct Q {
  QHalf low, high;
};

template <class V>
struct Element;
#define ELEMENT(V, T) \
  template <>         \
  struct Element<V> { \
    typedef T Type;   \
  };
ELEMENT(F, float) ELEMENT(I, int32_t) ELEMENT(D, double) ELEMENT(Q, int64_t)
#undef ELEMENT

template <class To, class From>
INLINE To same_bits(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "bits are lost");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
INLINE I bits(F x) { return (I)x; }
INLINE Q bits(D x) { return {(QHalf)x.low, (QHalf)x.high}; }
INLINE F number(I x) { return (F)x; }
INLINE D number(Q x) { return {(DHalf)x.low, (DHalf)x.high}; }

INLINE F splat(float x) { return x - F{}; }  // not F{} + x, which changes -0 to 0
INLINE I splat(int32_t x) { return x - I{}; }
INLINE D splat(double x) { return {x - DHalf{}, x - DHalf{}}; }
INLINE Q splat(int64_t x) { return {x - QHalf{}, x - QHalf{}}; }

#define ON_HALVES(T, op) \
  INLINE T operator op(T a, T b) { return {a.low op b.low, a.high op b.high}; }
ON_HALVES(D, +) ON_HALVES(D, -) ON_HALVES(D, *) ON_HALVES(D, /)
ON_HALVES(Q, +) ON_HALVES(Q, -) ON_HALVES(Q, *) ON_HALVES(Q, &) ON_HALVES(Q, |) ON_HALVES(Q, ^)
#undef ON_HALVES
INLINE D operator-(D x) { return {-x.low, -x.high}; }
INLINE Q operator-(Q x) { return {-x.low, -x.high}; }
INLINE Q operator~(Q x) { return {~x.low, ~x.high}; }
INLINE Q operator<<(Q x, int by) { return {x.low << by, x.high << by}; }
INLINE Q operator>>(Q x, int by) { return {x.low >> by, x.high >> by}; }
INLINE Q shifted_left(Q x, Q by) { return {x.low << by.low, x.high << by.high}; }
INLINE Q shifted_right(Q x, Q by) { return {x.low >> by.low, x.high >> by.high}; }

// Both halves as one vector, `whole`. A function that takes or returns one of 64 bytes would have another ABI with
// AVX-512, of which g++ warns.
#define WHOLE_OF(V_, x) \
  V_ whole;             \
  __builtin_memcpy(&whole, &x, sizeof whole)

// Conversions as in the processor: to an integer towards zero; a number that does not fit gives the least integer.
INLINE D to_float64(F x) { return same_bits<D>(__builtin_convertvector(x, D_)); }
INLINE D to_float64(I x) { return same_bits<D>(__builtin_convertvector(x, D_)); }
INLINE F to_float32(D x) {
  WHOLE_OF(D_, x);
  return __builtin_convertvector(whole, F);
}
INLINE F to_float32(I x) { return __builtin_convertvector(x, F); }
#if !defined(__aarch64__)  // see functions.h
INLINE F to_float32(Q x) {
  WHOLE_OF(Q_, x);
  return __builtin_convertvector(whole, F);
}
#endif
INLINE Q wide(I x) { return same_bits<Q>(__builtin_convertvector(x, Q_)); }
INLINE I narrow(Q x) {
  WHOLE_OF(Q_, x);
  return __builtin_convertvector(whole, I);
}

// Comparisons; with a NaN they are false.
INLINE I less(F a, F b) { return a < b; }
INLINE I less(I a, I b) { return a < b; }
INLINE Q less(D a, D b) { return {a.low < b.low, a.high < b.high}; }
INLINE Q less(Q a, Q b) { return {a.low < b.low, a.high < b.high}; }
INLINE I equal(F a, F b) { return a == b; }
INLINE I equal(I a, I b) { return a == b; }
INLINE Q equal(D a, D b) { return {a.low == b.low, a.high == b.high}; }
INLINE Q equal(Q a, Q b) { return {a.low == b.low, a.high == b.high}; }
INLINE I less_equal(F a, F b) { return a <= b; }
INLINE I less_equal(I a, I b) { return a <= b; }
INLINE Q less_equal(D a, D b) { return {a.low <= b.low, a.high <= b.high}; }
INLINE Q less_equal(Q a, Q b) { return {a.low <= b.low, a.high <= b.high}; }

INLINE F select(I m, F a, F b) { return m < 0 ? a : b; }
INLINE I select(I m, I a, I b) { return m < 0 ? a : b; }
INLINE D select(Q m, D a, D b) { return {m.low < 0 ? a.low : b.low, m.high < 0 ? a.high : b.high}; }
INLINE Q select(Q m, Q a, Q b) { return {m.low < 0 ? a.low : b.low, m.high < 0 ? a.high : b.high}; }
INLINE D select(I m, D a, D b) { return select(wide(m), a, b); }
INLINE Q select(I m, Q a, Q b) { return select(wide(m), a, b); }

// Operations with a different name in each instruction set. `greater` and `lesser` give b if one of them is NaN, or if
// both are 0.
#if defined(__SSE4_1__)
#define PAIR(name, a, b) {(DHalf)HALVED(name)(a.low, b.low), (DHalf)HALVED(name)(a.high, b.high)}
#if LANES == 16
#define HALVED(name) _mm512_##name
#define ROUND(x, how) (F) _mm512_roundscale_ps(x, how)
#define ROUND_D(x, how) (DHalf) _mm512_roundscale_pd(x, how)
#elif LANES == 8
#define HALVED(name) _mm256_##name
#define ROUND(x, how) (F) _mm256_round_ps(x, how)
#define ROUND_D(x, how) (DHalf) _mm256_round_pd(x, how)
#else
#define HALVED(name) _mm_##name
#define ROUND(x, how) (F) _mm_round_ps(x, how)
#define ROUND_D(x, how) (DHalf) _mm_round_pd(x, how)
#endif
#define ROUNDED(name, how)                      \
  INLINE F name(F x) { return ROUND(x, how); } \
  INLINE D name(D x) { return {ROUND_D(x.low, how), ROUND_D(x.high, how)}; }
ROUNDED(round, 8) ROUNDED(floor, 9) ROUNDED(ceil, 10) ROUNDED(trunc, 11)
INLINE F greater(F a, F b) { return (F)X86(max_ps)(a, b); }
INLINE F lesser(F a, F b) { return (F)X86(min_ps)(a, b); }
INLINE D greater(D a, D b) { return PAIR(max_pd, a, b); }
INLINE D lesser(D a, D b) { return PAIR(min_pd, a, b); }
INLINE F sqrt(F x) { return (F)X86(sqrt_ps)(x); }
INLINE D sqrt(D x) { return {(DHalf)HALVED(sqrt_pd)(x.low), (DHalf)HALVED(sqrt_pd)(x.high)}; }
INLINE I to_int32(F x) { return (I)X86(cvttps_epi32)(x); }
#if defined(__FMA__)
INLINE F fma(F a, F b, F c) { return (F)X86(fmadd_ps)(a, b, c); }
INLINE D fma(D a, D b, D c) {
  return {(DHalf)HALVED(fmadd_pd)(a.low, b.low, c.low), (DHalf)HALVED(fmadd_pd)(a.high, b.high, c.high)};
}
#else
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE D fma(D a, D b, D c) { return a * b + c; }
#endif
#undef PAIR
#undef HALVED
#undef ROUND
#undef ROUND_D
#undef ROUNDED
#elif defined(__aarch64__)
#define NEON(name, f, d)                            \
  INLINE F name(F x) { return (F)f((float32x4_t)x); } \
  INLINE D name(D x) { return {(DHalf)d((float64x2_t)x.low), (DHalf)d((float64x2_t)x.high)}; }
NEON(round, vrndnq_f32, vrndnq_f64) NEON(floor, vrndmq_f32, vrndmq_f64) NEON(ceil, vrndpq_f32, vrndpq_f64)
NEON(trunc, vrndq_f32, vrndq_f64) NEON(sqrt, vsqrtq_f32, vsqrtq_f64)
#undef NEON
INLINE F greater(F a, F b) { return a > b ? a : b; }
INLINE F lesser(F a, F b) { return a < b ? a : b; }
INLINE D greater(D a, D b) { return select(less(b, a), a, b); }
INLINE D lesser(D a, D b) { return select(less(a, b), a, b); }
INLINE F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE D fma(D a, D b, D c) {
  return {(DHalf)vfmaq_f64((float64x2_t)c.low, (float64x2_t)a.low, (float64x2_t)b.low),
          (DHalf)vfmaq_f64((float64x2_t)c.high, (float64x2_t)a.high, (float64x2_t)b.high)};
}
// For a number that does not fit, this processor gives the nearest integer; x86 gives the least.
INLINE I to_int32(F x) {
  const I fits = (x >= splat(-0x1p31f)) & (x < splat(0x1p31f));
  return select(fits, __builtin_convertvector(x, I), splat(INT32_MIN));
}
#endif

INLINE Q to_int64(D x) {  // AVX2 has no instruction for this
  Q found;
  UNROLL for (int l = 0; l < LANES / 2; ++l) {
    const bool low = x.low[l] >= -0x1p63 && x.low[l] < 0x1p63, high = x.high[l] >= -0x1p63 && x.high[l] < 0x1p63;
    found.low[l] = low ? (int64_t)x.low[l] : INT64_MIN;
    found.high[l] = high ? (int64_t)x.high[l] : INT64_MIN;
  }
  return found;
}
INLINE D to_float64(Q x) { return {__builtin_convertvector(x.low, DHalf), __builtin_convertvector(x.high, DHalf)}; }

// Divisions of integers; the result is 0 if the divisor is 0. In branches: for nested conditions in one expression, g++ 12.2
// makes code that gives -1 for x / x.
template <class V>
INLINE V quotient(V a, V b) {
  V found;
  for (int l = 0; l < (int)(sizeof(V) / sizeof a[0]); ++l) {
    const auto one = a[l], by = b[l];
    if (by == 0) found[l] = 0;
    else if (by == -1) found[l] = 0 - (uint64_t)one;
    else found[l] = one / by;
  }
  return found;
}
INLINE I div_trunc(I a, I b) { return quotient(a, b); }
INLINE Q div_trunc(Q a, Q b) { return {quotient(a.low, b.low), quotient(a.high, b.high)}; }

// LANES rows of a column, from `row` on; the address may be unaligned.
#define COLUMN(name, T, V)                                                                               \
  typedef T name##_lanes __attribute__((vector_size(LANES * sizeof(T)), may_alias, aligned(sizeof(T)))); \
  INLINE V load_##name(const void *column, int64_t row) {                                                \
    return __builtin_convertvector(*(const name##_lanes *)((const T *)column + row), V);                 \
  }                                                                                                      \
  INLINE void store_##name(void *column, int64_t row, V x) {                                             \
    *(name##_lanes *)((T *)column + row) = __builtin_convertvector(x, name##_lanes);                     \
  }
COLUMN(float32, float, F) COLUMN(int8, int8_t, I) COLUMN(uint8, uint8_t, I) COLUMN(int16, int16_t, I)
COLUMN(uint16, uint16_t, I) COLUMN(int32, int32_t, I)
#undef COLUMN
#define LONG_COLUMN(name, T, V, V_)                                                                      \
  typedef T name##_lanes __attribute__((vector_size(LANES * sizeof(T)), may_alias, aligned(sizeof(T)))); \
  INLINE V load_##name(const void *column, int64_t row) {                                                \
    return same_bits<V>(__builtin_convertvector(*(const name##_lanes *)((const T *)column + row), V_));  \
  }                                                                                                      \
  INLINE void store_##name(void *column, int64_t row, V x) {                                             \
    WHOLE_OF(V_, x);                                                                                     \
    *(name##_lanes *)((T *)column + row) = __builtin_convertvector(whole, name##_lanes);                 \
  }
LONG_COLUMN(float64, double, D, D_) LONG_COLUMN(int64, int64_t, Q, Q_) LONG_COLUMN(uint32, uint32_t, Q, Q_)
#undef LONG_COLUMN
#undef WHOLE_OF

// Elements gathered into a small column: the same element for all rows, or for each row the item at its index; 0 if
// there is no such item.
template <int kBytes>
struct Gathered {
  char bytes[LANES * kBytes] = {};
};
template <int kBytes>
INLINE Gathered<kBytes> same(const void *from) {
  Gathered<kBytes> found;
  for (int l = 0; l < LANES; ++l) __builtin_memcpy(found.bytes + l * kBytes, from, kBytes);
  return found;
}
template <int kBytes>
INLINE Gathered<kBytes> items_at(const void *column, Q at, int64_t count) {
  Gathered<kBytes> found;
  for (int l = 0; l < LANES; ++l) {
    const int64_t item = ((const int64_t *)&at)[l];
    if (item < 0 || item >= count) continue;
    __builtin_memcpy(found.bytes + l * kBytes, (const char *)column + item * kBytes, kBytes);
  }
  return found;
}

// The element at each row's index, of weights, or of vector r of a tensor in memory.
INLINE F pick(const float *from, I at) {
#if defined(__AVX512F__) && LANES == 16
  return (F)_mm512_i32gather_ps((__m512i)at, from, 4);
#elif defined(__AVX2__) && LANES < 16
  return (F)X86(i32gather_ps)(from, X86_INDEX(at), 4);
#else
  F found;
  for (int l = 0; l < LANES; ++l) found[l] = from[at[l]];
  return found;
#endif
}
INLINE I pick(const int32_t *from, I at) { return bits(pick((const float *)from, at)); }
INLINE D pick(const double *from, I at) {
  D found;
  UNROLL for (int l = 0; l < LANES / 2; ++l) {
    found.low[l] = from[at[l]];
    found.high[l] = from[at[LANES / 2 + l]];
  }
  return found;
}
INLINE Q pick(const int64_t *from, I at) { return bits(pick((const double *)from, at)); }
INLINE I lane() {
  I found;
  for (int l = 0; l < LANES; ++l) found[l] = l;
  return found;
}
INLINE F pick_row(const F *from, I at, int r) { return pick((const float *)(from + r), at * kRows + lane()); }
INLINE I pick_row(const I *from, I at, int r) { return pick((const int32_t *)(from + r), at * kRows + lane()); }
INLINE D pick_row(const D *from, I at, int r) { return pick((const double *)(from + r), at * kRows + lane()); }
INLINE Q pick_row(const Q *from, I at, int r) { return pick((const int64_t *)(from + r), at * kRows + lane()); }
template <bool kAdd, class V>
INLINE void put_row(V *into, I at, I inside, V x) {
  typedef typename Element<V>::Type E;
  for (int l = 0; l < LANES; ++l) {
    if (inside[l] == 0) continue;
    E &to = ((E *)into)[at[l] * kRows + l];
    to = kAdd ? to + ((const E *)&x)[l] : ((const E *)&x)[l];
  }
}
#undef X86
#undef X86_INDEX
