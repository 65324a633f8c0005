// Replaces the vectors of lanes.h on a GPU: F, I, D and Q are one float, int32_t, double and int64_t. A thread computes
// one row, or a block of threads computes RV rows together. Each operation is that of a lane in lanes.h, so that the results have the same bits.

#define LANES 1
#if !defined(RV)
#define RV 1
#endif
constexpr int kRows = RV;

// An I is also a truth value: -1 is true, 0 is false.
struct I {
  int32_t v;
  I() = default;
  INLINE_MEMBER constexpr I(int32_t x) : v(x) {}
  INLINE_MEMBER int32_t operator[](int) const { return v; }
};
struct F {
  float v;
  F() = default;
  INLINE_MEMBER constexpr F(float x) : v(x) {}
};
struct D {
  double v;
};
struct Q {
  int64_t v;
};

template <class To, class From>
INLINE To same_bits(From from) {
  return __builtin_bit_cast(To, from);
}
INLINE I bits(F x) { return same_bits<int32_t>(x.v); }
INLINE Q bits(D x) { return {same_bits<int64_t>(x.v)}; }
INLINE F number(I x) { return same_bits<float>(x.v); }
INLINE D number(Q x) { return {same_bits<double>(x.v)}; }

INLINE F splat(float x) { return x; }
INLINE I splat(int32_t x) { return x; }
INLINE D splat(double x) { return {x}; }
INLINE Q splat(int64_t x) { return {x}; }

#define OF_TWO(V, op) \
  INLINE V operator op(V a, V b) { return {a.v op b.v}; }
OF_TWO(F, +) OF_TWO(F, -) OF_TWO(F, /) OF_TWO(D, +) OF_TWO(D, -) OF_TWO(D, /)
#if defined(ROUNDED_PRODUCTF)  // for compilers that make an fma of a product and a sum
INLINE F operator*(F a, F b) { return {ROUNDED_PRODUCTF(a.v, b.v)}; }
INLINE D operator*(D a, D b) { return {ROUNDED_PRODUCT(a.v, b.v)}; }
#else
OF_TWO(F, *) OF_TWO(D, *)
#endif
OF_TWO(I, &) OF_TWO(I, |) OF_TWO(I, ^) OF_TWO(Q, &) OF_TWO(Q, |) OF_TWO(Q, ^)
#undef OF_TWO
// Integers wrap around.
#define WRAPPING(V, U, N, op) \
  INLINE V operator op(V a, V b) { return {(N)((U)a.v op (U)b.v)}; }
WRAPPING(I, uint32_t, int32_t, +) WRAPPING(I, uint32_t, int32_t, -) WRAPPING(I, uint32_t, int32_t, *)
WRAPPING(Q, uint64_t, int64_t, +) WRAPPING(Q, uint64_t, int64_t, -) WRAPPING(Q, uint64_t, int64_t, *)
#undef WRAPPING
INLINE F operator-(F x) { return -x.v; }
INLINE D operator-(D x) { return {-x.v}; }
INLINE I operator-(I x) { return I(0) - x; }
INLINE Q operator-(Q x) { return Q{0} - x; }
INLINE I operator~(I x) { return ~x.v; }
INLINE Q operator~(Q x) { return {~x.v}; }
INLINE I operator<<(I x, I by) { return (int32_t)((uint32_t)x.v << by.v); }
INLINE I operator>>(I x, I by) { return x.v >> by.v; }
INLINE Q operator<<(Q x, int by) { return {(int64_t)((uint64_t)x.v << by)}; }
INLINE Q operator>>(Q x, int by) { return {x.v >> by}; }
INLINE Q shifted_left(Q x, Q by) { return x << (int)by.v; }
INLINE Q shifted_right(Q x, Q by) { return x >> (int)by.v; }
#define COMPARED(V, op) \
  INLINE I operator op(V a, V b) { return -(int32_t)(a.v op b.v); }
COMPARED(F, <) COMPARED(F, <=) COMPARED(F, >) COMPARED(F, >=) COMPARED(F, ==) COMPARED(F, !=)
COMPARED(I, <) COMPARED(I, <=) COMPARED(I, >) COMPARED(I, >=) COMPARED(I, ==) COMPARED(I, !=)
#undef COMPARED

// Conversions as on x86: to an integer towards zero; a number that does not fit gives the least integer.
INLINE D to_float64(F x) { return {(double)x.v}; }
INLINE D to_float64(I x) { return {(double)x.v}; }
INLINE D to_float64(Q x) { return {(double)x.v}; }
INLINE F to_float32(D x) { return (float)x.v; }
INLINE F to_float32(I x) { return (float)x.v; }
#if !defined(__aarch64__)  // see functions.h
INLINE F to_float32(Q x) { return (float)x.v; }
#endif
INLINE Q wide(I x) { return {x.v}; }
INLINE I narrow(Q x) { return (int32_t)x.v; }
INLINE I to_int32(F x) { return x.v >= -0x1p31f && x.v < 0x1p31f ? (int32_t)x.v : INT32_MIN; }
INLINE Q to_int64(D x) { return {x.v >= -0x1p63 && x.v < 0x1p63 ? (int64_t)x.v : INT64_MIN}; }

// Comparisons; with a NaN they are false.
#define ORDERED(V, M)                                                             \
  INLINE M less(V a, V b) { return {-(decltype(M::v))(a.v < b.v)}; }        \
  INLINE M equal(V a, V b) { return {-(decltype(M::v))(a.v == b.v)}; }      \
  INLINE M less_equal(V a, V b) { return {-(decltype(M::v))(a.v <= b.v)}; }
ORDERED(F, I) ORDERED(I, I) ORDERED(D, Q) ORDERED(Q, Q)
#undef ORDERED
template <class V>
INLINE V select(I m, V a, V b) {
  return m.v < 0 ? a : b;
}
template <class V>
INLINE V select(Q m, V a, V b) {
  return m.v < 0 ? a : b;
}

// `greater` and `lesser` give b if one of them is NaN, or if both are 0.
#define OF_HARDWARE(V, single)                                \
  INLINE V round(V x) { return {HARDWARE(rint##single)(x.v)}; }   \
  INLINE V floor(V x) { return {HARDWARE(floor##single)(x.v)}; }  \
  INLINE V ceil(V x) { return {HARDWARE(ceil##single)(x.v)}; }    \
  INLINE V trunc(V x) { return {HARDWARE(trunc##single)(x.v)}; }  \
  INLINE V greater(V a, V b) { return a.v > b.v ? a : b; }    \
  INLINE V lesser(V a, V b) { return a.v < b.v ? a : b; }
OF_HARDWARE(F, f) OF_HARDWARE(D, )
#undef OF_HARDWARE
INLINE F sqrt(F x) { return ROUNDED_SQRTF(x.v); }
INLINE D sqrt(D x) { return {ROUNDED_SQRT(x.v)}; }
INLINE F fma(F a, F b, F c) { return ROUNDED_FMAF(a.v, b.v, c.v); }
INLINE D fma(D a, D b, D c) { return {ROUNDED_FMA(a.v, b.v, c.v)}; }

// Divisions of integers; the result is 0 if the divisor is 0.
INLINE I div_trunc(I a, I b) { return b.v == 0 ? I(0) : b.v == -1 ? -a : I(a.v / b.v); }
INLINE Q div_trunc(Q a, Q b) { return b.v == 0 ? Q{0} : b.v == -1 ? -a : Q{a.v / b.v}; }

#define COLUMN(name, T, V)                                                                                  \
  INLINE V load_##name(const void *column, int64_t row) { return {(decltype(V::v))((const T *)column)[row]}; } \
  INLINE void store_##name(void *column, int64_t row, V x) { ((T *)column)[row] = (T)x.v; }
COLUMN(float32, float, F) COLUMN(int8, int8_t, I) COLUMN(uint8, uint8_t, I) COLUMN(int16, int16_t, I)
COLUMN(uint16, uint16_t, I) COLUMN(int32, int32_t, I) COLUMN(float64, double, D) COLUMN(int64, int64_t, Q)
COLUMN(uint32, uint32_t, Q)
#undef COLUMN

template <int kBytes>
struct Gathered {
  alignas(8) char bytes[kBytes];
};
template <int kBytes>
INLINE Gathered<kBytes> same(const void *from) {
  Gathered<kBytes> found;
  for (int b = 0; b < kBytes; ++b) found.bytes[b] = ((const char *)from)[b];
  return found;
}
template <int kBytes>
INLINE Gathered<kBytes> items_at(const void *column, Q at, int64_t count) {
  Gathered<kBytes> found{};
  if (at.v >= 0 && at.v < count) found = same<kBytes>((const char *)column + at.v * kBytes);
  return found;
}

// The element at this row's index, of weights or of a tensor in memory.
INLINE F pick(const float *from, I at) { return from[at.v]; }
INLINE I pick(const int32_t *from, I at) { return from[at.v]; }
INLINE D pick(const double *from, I at) { return {from[at.v]}; }
INLINE Q pick(const int64_t *from, I at) { return {from[at.v]}; }
template <class V>
INLINE V pick_row(const V *from, I at, int r) {
  return from[at.v * RV + r];
}
template <bool kAdd, class V>
INLINE void put_row(V *into, I at, I inside, V x) {
  V &to = into[at.v * RV];
  if (inside.v != 0) to = kAdd ? to + x : x;
}
