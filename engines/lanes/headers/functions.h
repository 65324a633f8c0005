// Elementary functions on F and D. They use only additions, products, quotients, roots and fma, and no function of
// the C library, whose bits depend on the processor. tests/engines/lanes/ulps.py measures them on all floats.
// Functions that networks call often compute in single precision. The others compute in double and round once.

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000), kNaN = __builtin_bit_cast(float, 0x7fc00000);
constexpr double kPi = 3.14159265358979323846, kLn2 = 0.69314718055994530942;

INLINE I mask(I m) { return m; }
INLINE I mask(Q m) { return narrow(m); }
template <class V> INLINE I eq(V a, V b) { return mask(equal(a, b)); }
template <class V> INLINE I ne(V a, V b) { return ~mask(equal(a, b)); }
template <class V> INLINE I lt(V a, V b) { return mask(less(a, b)); }
template <class V> INLINE I le(V a, V b) { return mask(less_equal(a, b)); }
template <class V> INLINE I gt(V a, V b) { return mask(less(b, a)); }
template <class V> INLINE I ge(V a, V b) { return mask(less_equal(b, a)); }
template <class V> INLINE I isnan(V x) { return ne(x, x); }

INLINE I to_bool(I x) { return x != 0; }
INLINE I to_bool(F x) { return x != 0; }
INLINE I to_bool(D x) { return ne(x, splat(0.0)); }
INLINE I to_bool(Q x) { return ne(x, splat((int64_t)0)); }

INLINE F abs(F x) { return number(bits(x) & INT32_MAX); }
INLINE D abs(D x) { return number(bits(x) & splat(INT64_MAX)); }
INLINE I abs(I x) { return select(x < 0, -x, x); }
INLINE Q abs(Q x) { return select(less(x, splat((int64_t)0)), -x, x); }
INLINE F copysign(F x, F of) { return number((bits(x) & INT32_MAX) | (bits(of) & INT32_MIN)); }
INLINE D copysign(D x, D of) { return number((bits(x) & splat(INT64_MAX)) | (bits(of) & splat(INT64_MIN))); }
template <class V> INLINE V square(V x) { return x * x; }
template <class V> INLINE V cube(V x) { return x * x * x; }

// A NaN stays NaN. `low` and `high` must not be NaN.
INLINE F at_least(F x, F low) { return greater(low, x); }
INLINE F at_most(F x, F high) { return lesser(high, x); }
INLINE D at_least(D x, D low) { return greater(low, x); }
INLINE D at_most(D x, D high) { return lesser(high, x); }
INLINE F maximum(F a, F b) { return select(a != a, a, greater(a, b)); }
INLINE F minimum(F a, F b) { return select(a != a, a, lesser(a, b)); }
INLINE D maximum(D a, D b) { return select(~equal(a, a), a, greater(a, b)); }
INLINE D minimum(D a, D b) { return select(~equal(a, a), a, lesser(a, b)); }
#define WHOLE(V)                                                          \
  INLINE V maximum(V a, V b) { return select(less(a, b), b, a); }         \
  INLINE V minimum(V a, V b) { return select(less(a, b), a, b); }         \
  INLINE V at_least(V x, V low) { return maximum(x, low); }               \
  INLINE V at_most(V x, V high) { return minimum(x, high); }              \
  INLINE V clamp(V x, V low, V high) { return minimum(maximum(x, low), high); }
WHOLE(I) WHOLE(Q)
#undef WHOLE
INLINE F relu(F x) { return at_least(x, splat(0.0f)); }
INLINE D relu(D x) { return at_least(x, splat(0.0)); }
INLINE I relu(I x) { return maximum(x, splat(0)); }
INLINE Q relu(Q x) { return maximum(x, splat((int64_t)0)); }
template <class V> INLINE V fmax(V a, V b) { return select(isnan(a), b, select(isnan(b), a, maximum(a, b))); }
template <class V> INLINE V fmin(V a, V b) { return select(isnan(a), b, select(isnan(b), a, minimum(a, b))); }
template <class V> INLINE V one_signed(V x, V one, V zero) {
  return select(less(zero, x), one, select(less(x, zero), zero - one, zero));
}
INLINE F sign(F x) { return one_signed(x, splat(1.0f), splat(0.0f)); }
INLINE D sign(D x) { return one_signed(x, splat(1.0), splat(0.0)); }
INLINE I sign(I x) { return one_signed(x, splat(1), splat(0)); }
INLINE Q sign(Q x) { return one_signed(x, splat((int64_t)1), splat((int64_t)0)); }
INLINE I isinf(F x) { return abs(x) == splat(kInfinity); }
INLINE I isinf(D x) { return eq(abs(x), splat((double)kInfinity)); }
INLINE I isinf(I) { return splat(0); }
INLINE I isinf(Q) { return splat(0); }

// c + x * (next + x * (...)).
template <class V, class N>
INLINE V polynomial(V, N c) { return splat(c); }
template <class V, class N, class... Rest>
INLINE V polynomial(V x, N c, Rest... rest) { return fma(polynomial(x, rest...), x, splat(c)); }

// --- single precision ---

struct PowerF {
  F less_one;  // exp(x) = (1 + less_one) * 2^n
  I n;
};
INLINE PowerF power(F x) {  // for x from -104 to 89; the polynomial is from Cephes
  const F shifted = fma(x, splat(1.44269504f), splat(0x1.8p23f)), n = shifted - splat(0x1.8p23f);
  const F r = fma(n, splat(1.90465429995776806e-09f), fma(n, splat(-0.693147182464599609375f), x));
  const F tail = polynomial(r, 5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f, 8.3334519073e-3f,
                            1.3981999507e-3f, 1.9875691500e-4f);
  return {fma(tail, r * r, r), bits(shifted) - bits(splat(0x1.8p23f))};
}
INLINE F two_to(I n) { return number((n + 127) << 23); }
INLINE F scaled(F x, I n) {  // x * 2^n, rounded once
  const I half = n >> 1;
  return x * two_to(half) * two_to(n - half);
}
INLINE F exp(F x) {
  const I gone = x < splat(-104.0f);  // the result is 0; avoids slow denormal numbers
  const PowerF p = power(at_most(select(gone, splat(0.0f), x), splat(89.0f)));
  return number(bits(scaled(splat(1.0f) + p.less_one, p.n)) & ~gone);
}
INLINE F expm1(F x) {
  const PowerF p = power(at_least(at_most(x, splat(89.0f)), splat(-30.0f)));
  const F s = two_to(p.n - 1), half = fma(s, p.less_one, s - splat(0.5f));  // half of the result: 2^128 is no float
  return select(abs(x) < splat(0x1p-25f), x, half + half);  // subnormal numbers have no half
}
INLINE F sigmoid(F x) {  // by exp(-|x|), which keeps small results accurate
  const PowerF p = power(at_least(number(bits(x) | INT32_MIN), splat(-104.0f)));
  const F e = scaled(splat(1.0f) + p.less_one, p.n);
  return select(x < splat(0.0f), e, splat(1.0f)) / (splat(1.0f) + e);
}

struct LogF {
  F mantissa, exponent;  // x = (1 + mantissa) * 2^exponent, mantissa from -0.3 to 0.42
};
INLINE LogF parts(F x) {
  const I tiny = x < splat(0x1p-126f);
  const I b = bits(select(tiny, x * splat(0x1p23f), x)) - bits(splat(0.70710678f));
  const I e = b >> 23;
  return {number(bits(select(tiny, x * splat(0x1p23f), x)) - (e << 23)) - splat(1.0f),
          to_float32(e - (tiny & 23))};
}
INLINE F log_of(LogF p, F lost) {  // logf of Cephes; `lost` is added to the mantissa
  const F m = p.mantissa, z = m * m;
  const F tail = polynomial(m, 3.3333331174e-1f, -2.4999993993e-1f, 2.0000714765e-1f, -1.6668057665e-1f,
                            1.4249322787e-1f, -1.2420140846e-1f, 1.1676998740e-1f, -1.1514610310e-1f,
                            7.0376836292e-2f);
  F found = fma(tail, m * z, lost);
  found = fma(p.exponent, splat(-2.12194440e-4f), found);
  found = m + fma(splat(-0.5f), z, found);
  return fma(p.exponent, splat(0.693359375f), found);
}
INLINE F log(F x) {
  F found = log_of(parts(x), splat(0.0f));
  found = select(x == splat(kInfinity), x, found);
  found = select(x == splat(0.0f), splat(-kInfinity), found);
  return select(x >= splat(0.0f), found, splat(kNaN));
}
INLINE F log1p(F x) {
  const F u = splat(1.0f) + x, lost = select(u < splat(0x1p24f), x - (u - splat(1.0f)), splat(0.0f)) / u;
  F found = log_of(parts(u), lost);
  found = select(u == splat(kInfinity), u, found);
  found = select(x == splat(-1.0f), splat(-kInfinity), found);
  found = select(x >= splat(-1.0f), found, splat(kNaN));
  return select(abs(x) < splat(0x1p-24f), x, found);
}

// Rational functions from Eigen.
INLINE F tanh(F x) {
  const F c = at_least(at_most(x, splat(7.90531110763549805f)), splat(-7.90531110763549805f)), z = c * c;
  const F p = polynomial(z, 4.89352455891786e-03f, 6.37261928875436e-04f, 1.48572235717979e-05f, 5.12229709037114e-08f,
                         -8.60467152213735e-11f, 2.00018790482477e-13f, -2.76076847742355e-16f);
  const F q = polynomial(z, 4.89352518554385e-03f, 2.26843463243900e-03f, 1.18534705686654e-04f, 1.19825839466702e-06f);
  const F found = select(abs(x) < splat(4e-4f), x, c * p / q);
  return select(abs(x) > splat(9.01f), copysign(splat(1.0f), x), found);
}
INLINE F erf(F x) {
  const F c = at_least(at_most(x, splat(4.0f)), splat(-4.0f)), z = c * c;
  const F p = polynomial(z, -1.60960333262415e-02f, -2.95459980854025e-03f, -7.34990630326855e-04f, -5.69250639462346e-05f,
                         -2.10102402082508e-06f, 2.77068142495902e-08f, -2.72614225801306e-10f);
  const F q = polynomial(z, -1.42647390514189e-02f, -7.37332916720468e-03f, -1.68282697438203e-03f, -2.13374055278905e-04f,
                         -1.45660718464996e-05f);
  return select(abs(x) > splat(3.9192059f), copysign(splat(1.0f), x), c * (p / q));
}

// --- double precision ---

INLINE D expm1_near(D r) {  // for |r| up to log(2) / 2
  const D tail = polynomial(r, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                            1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800);
  return fma(r * r, tail, r);
}
struct PowerD {
  D less_one, n;  // exp(x) = (1 + less_one) * 2^n
};
INLINE PowerD power(D x, double least, double most) {
  x = at_most(at_least(x, splat(least)), splat(most));
  const D n = round(x * splat(1 / kLn2)), r = fma(n, splat(-2.3190468138462996e-17), fma(n, splat(-kLn2), x));
  return {expm1_near(r), n};
}
INLINE D two_to(D n) { return number(bits(n + splat(0x1p52 + 1023)) << 52); }
INLINE D scaled(D x, D n) {  // x * 2^n, rounded once
  const D half = floor(n * splat(0.5));
  return x * two_to(half) * two_to(n - half);
}
INLINE D exp(D x) {
  const PowerD p = power(x, -746, 711);
  return scaled(splat(1.0) + p.less_one, p.n);
}
INLINE D expm1(D x) {
  const PowerD p = power(x, -50, 700);
  const D s = two_to(p.n), found = select(less(splat(700.0), x), exp(x), fma(p.less_one, s, s - splat(1.0)));
  return select(equal(x, splat(0.0)), x, found);
}
INLINE D exp2(D x) {
  x = at_most(at_least(x, splat(-1080.0)), splat(1030.0));
  const D n = round(x);
  return scaled(splat(1.0) + expm1_near((x - n) * splat(kLn2)), n);
}
INLINE D sigmoid(D x) { return splat(1.0) / (splat(1.0) + exp(-x)); }

// The method and coefficients are from fdlibm's e_log.c.
INLINE D log(D x) {
  const Q tiny = less(x, splat(0x1p-1022));
  const Q b = bits(select(tiny, x * splat(0x1p54), x));
  D m = number((b & splat(0x000fffffffffffff)) | splat(0x3ff0000000000000));
  const Q high = less(splat(1.4142135623730951), m);
  m = select(high, m * splat(0.5), m);
  const D exponent = number(((b >> 52) & splat((int64_t)0xfff)) | splat(0x4330000000000000)) - splat(0x1p52 + 1023);
  const D e = exponent + select(high, splat(1.0), splat(0.0)) - select(tiny, splat(54.0), splat(0.0));
  const D f = m - splat(1.0), s = f / (splat(2.0) + f), z = s * s, half = splat(0.5) * f * f;
  const D series = polynomial(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                              2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                              1.479819860511658591e-01);
  const D low = fma(e, splat(1.90821492927058770002e-10), s * fma(z, series, half));
  D found = fma(e, splat(6.93147180369123816490e-01), f - (half - low));
  found = select(equal(x, splat(0.0)), splat(-(double)kInfinity), found);
  found = select(equal(x, splat((double)kInfinity)), x, found);
  return select(less_equal(splat(0.0), x), found, splat((double)kNaN));
}
INLINE D log2(D x) { return log(x) * splat(1 / kLn2); }
INLINE D log10(D x) { return log(x) * splat(0.43429448190325182765); }
INLINE D log1p(D x) {
  const D u = splat(1.0) + x, lost = (x - (u - splat(1.0))) / u;  // the rounding error of the sum
  const Q finite = less(splat(0.0), u) & less(u, splat((double)kInfinity));
  return select(equal(x, splat(0.0)), x, log(u) + select(finite, lost, splat(0.0)));
}

INLINE D tanh(D x) {
  const D t = expm1(at_most(at_least(x + x, splat(-40.0)), splat(40.0)));
  return t / (t + splat(2.0));
}
INLINE D sinh(D x) {
  const D t = expm1(at_most(abs(x), splat(709.0))), far = exp(abs(x) - splat(kLn2));
  return copysign(select(less(splat(30.0), abs(x)), far, (t + t / (t + splat(1.0))) * splat(0.5)), x);
}
INLINE D cosh(D x) {
  const D t = exp(abs(x)), far = exp(abs(x) - splat(kLn2));
  return select(less(splat(30.0), abs(x)), far, (t + splat(1.0) / t) * splat(0.5));
}
INLINE D asinh(D x) {
  const D a = abs(x), more = a * a / (splat(1.0) + sqrt(fma(a, a, splat(1.0))));
  const D found = select(less(splat(0x1p500), a), log(a) + splat(kLn2), log1p(a + more));
  return copysign(select(equal(a, splat((double)kInfinity)), a, found), x);
}
INLINE D acosh(D x) {
  const D t = x - splat(1.0), found = log1p(t + sqrt(fma(t, t, t + t)));
  const D far = select(less(splat(0x1p500), x), log(x) + splat(kLn2), found);
  return select(less(x, splat(1.0)), splat((double)kNaN), far);
}
INLINE D atanh(D x) {
  const D a = abs(x);
  return copysign(splat(0.5) * log1p((a + a) / (splat(1.0) - a)), x);
}

// `rest`: x minus the nearest multiple of pi/2. `quarter`: the number of that multiple; only its value modulo 4 counts.
struct Angle {
  D rest;
  Q quarter;
};
// For a number of 2^30 or more (Payne and Hanek): the product of its 53 bits and the 192 bits of 2/pi that count. Those
// before them give multiples of 4, which are whole turns; those behind them are too small. The least `rest` of all doubles
// is about 2^-61, so of the 126 bits behind the point enough are left.
FAR double far_angle(double x, int64_t *quarter) {
  static constexpr uint64_t two_over_pi[] = {
      0,                  0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
      0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484, 0xe99c7026b45f7e41,
      0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f, 0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7,
      0x4f463f669e5fea2d, 0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab};
  if (!(x - x == 0)) return (double)kNaN;
  const int64_t b = same_bits<int64_t>(x);
  const int exponent = (int)(b >> 52 & 0x7ff) - 1022;  // x = 0.1... * 2^exponent
  const uint64_t mantissa = ((uint64_t)b & 0x000fffffffffffff) | 0x0010000000000000;
  const uint32_t skip = (uint32_t)(exponent - 53 - 2 + 64), shift = skip % 64;
  const uint64_t *const word = two_over_pi + skip / 64;
  uint64_t high = word[0], middle = word[1], low = word[2];
  if (shift > 0) {
    high = high << shift | middle >> (64 - shift);
    middle = middle << shift | low >> (64 - shift);
    low = low << shift | word[3] >> (64 - shift);
  }
  // In units of 2^-126 quarter turns, without the whole turns.
  const unsigned __int128 turned = ((unsigned __int128)(high * mantissa) << 64) + (unsigned __int128)middle * mantissa +
                                   ((unsigned __int128)low * mantissa >> 64);
  const unsigned __int128 one = (unsigned __int128)1 << 126;
  const int64_t nearest = (int64_t)((turned + one / 2) >> 126);
  const __int128 left = (__int128)(turned - one * (uint64_t)nearest);
  const double both = (double)(int64_t)(left >> 64) * 0x1p64 + (double)(uint64_t)left;
  const double rest = both * 0x1p-126 * (kPi / 2);
  *quarter = x < 0 ? -nearest : nearest;
  return x < 0 ? -rest : rest;
}
// of_float: x is a float. None comes so near to a multiple of pi/2 that a third part of pi/2 changes its results.
INLINE Angle angle(D x, bool of_float) {
  const D n = round(x * splat(2 / kPi));
  Angle found{fma(n, splat(-6.123233995736766e-17), fma(n, splat(-kPi / 2), x)), bits(n + splat(0x1.8p52))};
  if (!of_float) found.rest = fma(n, splat(1.4973849048591698e-33), found.rest);
  const I near = lt(abs(x), splat(0x1p30));
  UNROLL for (int l = 0; l < LANES; ++l) {
    if (near[l]) continue;
    double *const rest = (double *)&found.rest + l;
    int64_t quarter = 0;
    *rest = far_angle(((const double *)&x)[l], &quarter);
    ((int64_t *)&found.quarter)[l] = quarter;
  }
  return found;
}
INLINE D sine(D r) {
  const D z = r * r;
  const D tail = polynomial(z, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800,
                            -1.0 / 1307674368000, 1.0 / 355687428096000);
  return fma(r * z, tail, r);
}
INLINE D cosine(D r) {
  return polynomial(r * r, 1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                    -1.0 / 87178291200, 1.0 / 20922789888000);
}
INLINE Q odd(Q quarter) { return less(quarter << 63, splat((int64_t)0)); }
INLINE D turned(Angle a, Q quarter) {
  const D found = select(odd(quarter), cosine(a.rest), sine(a.rest));
  return number(bits(found) ^ ((quarter << 62) & splat(INT64_MIN)));
}
INLINE D sin(D x, bool of_float = false) {
  const Angle a = angle(x, of_float);
  return select(equal(x, splat(0.0)), x, turned(a, a.quarter));
}
INLINE D cos(D x, bool of_float = false) {
  const Angle a = angle(x, of_float);
  return turned(a, a.quarter + splat((int64_t)1));
}
INLINE D tan(D x, bool of_float = false) {
  const Angle a = angle(x, of_float);
  const D s = sine(a.rest), c = cosine(a.rest);
  const Q swap = odd(a.quarter);
  const D found = select(swap, splat(0.0) - c, s) / select(swap, s, c);
  return select(equal(x, splat(0.0)), x, found);
}

INLINE D atan2(D y, D x) {
  const D ax = abs(x), ay = abs(y), small = lesser(ax, ay), large = greater(ax, ay);
  D t = select(equal(small, large), splat(1.0), small / large);
  t = select(equal(large, splat(0.0)), splat(0.0), t);
  const Q high = less(splat(0.41421356237309503), t);
  const D u = select(high, (t - splat(1.0)) / (t + splat(1.0)), t), z = u * u;
  const D tail = polynomial(z, -3.33333333333329318027e-01, 1.99999999998764832476e-01, -1.42857142725034663711e-01,
                            1.11111104054623557880e-01, -9.09088713343650656196e-02, 7.69187620504482999495e-02,
                            -6.66107313738753120669e-02, 5.83357013379057348645e-02, -4.97687799461593236017e-02,
                            3.65315727442169155270e-02, -1.62858201153657823623e-02);  // from fdlibm's s_atan.c
  D found = fma(u * z, tail, u) + select(high, splat(kPi / 4), splat(0.0));
  found = select(less(ax, ay), splat(kPi / 2) - found, found);
  found = select(less(bits(x), splat((int64_t)0)), splat(kPi) - found, found);
  return select(~(equal(x, x) & equal(y, y)), splat((double)kNaN), copysign(found, y));
}
INLINE D atan(D x) { return atan2(x, splat(1.0)); }
INLINE D other_side(D x) { return sqrt((splat(1.0) - x) * (splat(1.0) + x)); }
INLINE D asin(D x) { return atan2(x, other_side(x)); }
INLINE D acos(D x) { return atan2(other_side(x), x); }

INLINE D pow(D x, D y) {
  const D ax = abs(x), half = y * splat(0.5);
  const Q whole = equal(floor(y), y), uneven = whole & ~equal(floor(half), half), under = less(bits(x), splat((int64_t)0));
  D found = exp(y * log(ax));
  found = number(bits(found) ^ (uneven & under & splat(INT64_MIN)));
  const Q root = less(x, splat(0.0)) & less(splat(0.0), ax) & less(ax, splat((double)kInfinity));
  found = select(root & ~whole, splat((double)kNaN), found);  // a root of a negative number; y = ±inf counts as an integer
  found = select(equal(ax, splat(1.0)) & equal(abs(y), splat((double)kInfinity)), splat(1.0), found);
  return select(equal(y, splat(0.0)) | equal(x, splat(1.0)), splat(1.0), found);
}

// For z from 0 to 28: erfc(z) exp(z^2) / t, where t = 4 / (4 + z), as a polynomial in t - 9/16, which t leaves by at most
// 7/16. It is a Chebyshev fit with an error below 1e-17; tests/engines/lanes/test_erfc.py derives the numbers.
INLINE D erfc_of_positive(D z) {
  const D t = splat(4.0) / (splat(4.0) + z), square = z * z, lost = fma(z, z, -square);
  const D series = polynomial(t - splat(0.5625), 0.3078220955665328, 0.599007667587648, 1.0107421500723868,
                              1.4733766496526814, 1.8376724945459242, 1.9249846801150026, 1.6343937744392691,
                              1.0406173724172323, 0.3872988816439826, -0.05604096517823535, -0.17674027064358366,
                              -0.08013980813424111, 0.03283998540214565, 0.04892380278040745, 0.002566607792126191,
                              -0.022644155293128933, -0.00664861776219601, 0.010376743072260287, 0.00485231081803456,
                              -0.004796845497399577, -0.0026902220480154336, 0.0016437229562557326, 0.0009525832472292394);
  const D found = t * series * exp(-square);
  return fma(found, -lost, found);
}
INLINE D erfc(D x) {
  const D found = erfc_of_positive(at_most(abs(x), splat(28.0)));
  return select(less(bits(x), splat((int64_t)0)), splat(2.0) - found, found);
}
INLINE D erf(D x) {
  const D a = abs(x), z = a * a;
  const D near = a * polynomial(z, 1.1283791670955126, -0.37612638903183752, 0.11283791670955126,
                                -0.026866170645131252, 0.0052239776254421878, -0.00085483270234508528,
                                0.00012055332981789664, -1.4925650358406251e-05, 1.6462114365889246e-06,
                                -1.6365844691234924e-07, 1.4807192815879218e-08, -1.2290555301717926e-09,
                                9.422759064650411e-11);
  return copysign(select(less(splat(0.5), a), splat(1.0) - erfc_of_positive(at_most(a, splat(28.0))), near), x);
}
INLINE D hypot_of_moderate(D x, D y) {  // whose squares neither overflow nor lose bits that count
  const D found = sqrt(fma(x, x, y * y));
  const Q far = equal(abs(x), splat((double)kInfinity)) | equal(abs(y), splat((double)kInfinity));
  return select(far, splat((double)kInfinity), found);
}
INLINE D hypot(D x, D y) {
  const D size = greater(abs(x), abs(y)), one = splat(1.0);
  const Q large = less(splat(0x1p500), size), small = less(size, splat(0x1p-450));
  const D by = select(large, splat(0x1p-600), select(small, splat(0x1p600), one));
  const D back = select(large, splat(0x1p600), select(small, splat(0x1p-600), one));
  return hypot_of_moderate(x * by, y * by) * back;
}
INLINE F hypot(F x, F y) { return to_float32(hypot_of_moderate(to_float64(x), to_float64(y))); }

// Exact: subtracts multiples of the divisor until the rest is smaller than the divisor.
INLINE D fmod(D a, D b) {
  const D size = abs(b);
  D left = abs(a);
  for (int step = 0; step < 64; ++step) {
    const D quotient = trunc(left / size);
    const I going = lt(splat(0.0), abs(quotient)) & lt(abs(quotient), splat((double)kInfinity));
    bool any = false;
    UNROLL for (int l = 0; l < LANES; ++l) any = any || going[l];
    if (!any) break;
    left = select(going, fma(-quotient, size, left), left);
  }
  left = select(less(left, splat(0.0)), left + size, left);  // if a quotient was rounded up
  const Q none = ~(less(abs(a), splat((double)kInfinity)) & less(splat(0.0), size));
  return select(none, splat((double)kNaN), copysign(left, a));
}

// --- functions of floats that are computed in double precision ---

#define FROM_DOUBLE(name) INLINE F name(F x) { return to_float32(name(to_float64(x))); }
FROM_DOUBLE(exp2) FROM_DOUBLE(log2) FROM_DOUBLE(log10) FROM_DOUBLE(sinh) FROM_DOUBLE(cosh) FROM_DOUBLE(asinh)
FROM_DOUBLE(acosh) FROM_DOUBLE(atanh) FROM_DOUBLE(asin) FROM_DOUBLE(acos) FROM_DOUBLE(atan) FROM_DOUBLE(erfc)
#undef FROM_DOUBLE
#define FROM_DOUBLE(name) INLINE F name(F x) { return to_float32(name(to_float64(x), true)); }
FROM_DOUBLE(sin) FROM_DOUBLE(cos) FROM_DOUBLE(tan)
#undef FROM_DOUBLE
#define FROM_DOUBLE(name) INLINE F name(F x, F y) { return to_float32(name(to_float64(x), to_float64(y))); }
FROM_DOUBLE(atan2) FROM_DOUBLE(pow) FROM_DOUBLE(fmod)
#undef FROM_DOUBLE

// The remainder has the divisor's sign.
#define SIGNED_AS_DIVISOR(V, zero)                                                  \
  INLINE V remainder(V a, V b) {                                                    \
    const V left = fmod(a, b);                                                      \
    return select(ne(left, zero) & (lt(left, zero) ^ lt(b, zero)), left + b, left); \
  }
SIGNED_AS_DIVISOR(F, splat(0.0f)) SIGNED_AS_DIVISOR(D, splat(0.0))
#undef SIGNED_AS_DIVISOR
// Computed from the exact remainder, as in torch.
#define FLOORED(V, N)                                                                                        \
  INLINE V div_floor(V a, V b) {                                                                             \
    const V left = fmod(a, b), zero = splat((N)0), quotient = (a - left) / b;                                  \
    const I other = ne(left, zero) & (lt(left, zero) ^ lt(b, zero));                                         \
    const V exact = quotient - select(other, splat((N)1), zero), below = floor(exact);                         \
    const V found = below + select(gt(exact - below, splat((N)0.5)), splat((N)1), zero);                         \
    return select(eq(b, zero), a / b, select(eq(exact, zero), copysign(zero, a / b), found));                \
  }
FLOORED(F, float) FLOORED(D, double)
#undef FLOORED
template <class V> INLINE V div_trunc(V a, V b) { return trunc(a / b); }
#define WHOLE(V, N)                                                                            \
  INLINE V unless_zero(V b, V x) { return select(eq(b, splat((N)0)), splat((N)0), x); }            \
  INLINE V fmod(V a, V b) { return unless_zero(b, a - div_trunc(a, b) * b); }                  \
  INLINE V div_floor(V a, V b) {                                                               \
    const V q = div_trunc(a, b), zero = splat((N)0);                                             \
    const I down = ne(q * b, a) & (lt(a, zero) ^ lt(b, zero));                                 \
    return unless_zero(b, q + select(down, splat((N)-1), zero));                                 \
  }                                                                                            \
  INLINE V remainder(V a, V b) { return unless_zero(b, a - div_floor(a, b) * b); }             \
  INLINE V pow(V x, V y) { /* 1 / x is 0 unless x is 1 or -1 */                                \
    const V zero = splat((N)0), one = splat((N)1), uneven = y & one;                               \
    const I under = lt(y, zero), first = eq(x, one), last = eq(x, zero - one);                 \
    V found = one;                                                                             \
    for (int bit = 0; bit < (int)sizeof(N) * 8 - 1; ++bit) {                                   \
      found = select(ne(y & one, zero), found * x, found);                                     \
      x = x * x;                                                                               \
      y = y >> 1;                                                                              \
    }                                                                                          \
    const V inverse = select(first, one, select(last, one - uneven - uneven, zero));           \
    return select(under, inverse, found);                                                      \
  }
WHOLE(I, int32_t) WHOLE(Q, int64_t)
#undef WHOLE

// --- conversions, and arithmetic of types with fewer than 4 bytes ---

INLINE Q to_int64(I x) { return wide(x); }
INLINE Q to_int64(F x) { return to_int64(to_float64(x)); }
#if defined(__aarch64__)
// clang's vectors would convert through double there. Where double does not hold x, 11 bits become one, which is 1 if any of
// them was: then double holds it, and the second rounding is right.
INLINE F to_float32(Q x) {
  const Q ends = splat((int64_t)0x7ff), fewer = (x | ((x & ends) + ends)) & ~ends;
  const int64_t most = (int64_t)1 << 53;
  return to_float32(to_float64(select(less(splat(-most), x) & less(x, splat(most)), x, fewer)));
}
#endif
INLINE I to_int32(Q x) { return narrow(x); }
INLINE I to_int32(D x) { return narrow(to_int64(x)); }
INLINE I to_int32(I x) { return x; }
INLINE Q to_int64(Q x) { return x; }
INLINE F to_float32(F x) { return x; }
INLINE D to_float64(D x) { return x; }
INLINE I rounded_int8(I x) { return (x << 24) >> 24; }
INLINE I rounded_uint8(I x) { return x & 0xff; }
INLINE I rounded_int16(I x) { return (x << 16) >> 16; }
INLINE I rounded_uint16(I x) { return x & 0xffff; }
INLINE Q rounded_uint32(Q x) { return x & splat((int64_t)0xffffffff); }
template <class V> INLINE I to_int8(V x) { return rounded_int8(to_int32(x)); }
template <class V> INLINE I to_uint8(V x) { return rounded_uint8(to_int32(x)); }
template <class V> INLINE I to_int16(V x) { return rounded_int16(to_int32(x)); }
template <class V> INLINE I to_uint16(V x) { return rounded_uint16(to_int32(x)); }
template <class V> INLINE Q to_uint32(V x) { return rounded_uint32(to_int64(x)); }

INLINE I bitwise_left_shift(I x, I by) { return select((by < 0) | (by > 31), splat(0), x << (by & 31)); }
INLINE I bitwise_right_shift(I x, I by) { return x >> select((by < 0) | (by > 31), splat(31), by); }
#define SHIFT(name, far, shifted)                                                                    \
  INLINE Q name(Q x, Q by) {                                                                         \
    const Q size = select(ge(by, splat((int64_t)0)) & lt(by, splat((int64_t)64)), by, splat((int64_t)63)); \
    const Q found = shifted(x, size);                                                                \
    return select(equal(size, by), found, far);                                                      \
  }
SHIFT(bitwise_left_shift, splat((int64_t)0), shifted_left) SHIFT(bitwise_right_shift, found, shifted_right)
#undef SHIFT

// Rounds to the nearest number of 16 bits, half-way cases to the even one.
INLINE F rounded_bfloat16(F x) {
  const I b = bits(x), up = b + 0x7fff + ((b >> 16) & 1);
  return select(x != x, x, number(up & (int32_t)0xffff0000));
}
INLINE F rounded_float16(F x) {
  const I b = bits(x), up = b + 0xfff + ((b >> 13) & 1);
  const F small = copysign((abs(x) + splat(0.5f)) - splat(0.5f), x);  // below 2^-14 the last bit is 2^-24
  F found = select(abs(x) < splat(0x1p-14f), small, number(up & (int32_t)0xffffe000));
  found = select(abs(found) > splat(65504.0f), copysign(splat(kInfinity), x), found);
  return select(x != x, x, found);
}
template <class V> INLINE F to_bfloat16(V x) { return rounded_bfloat16(to_float32(x)); }
template <class V> INLINE F to_float16(V x) { return rounded_float16(to_float32(x)); }

INLINE F load_bfloat16(const void *column, int64_t row) { return number(load_uint16(column, row) << 16); }
INLINE void store_bfloat16(void *column, int64_t row, F x) {
  const I b = bits(rounded_bfloat16(x));
  store_uint16(column, row, select(x != x, splat(0x7fc0), (b >> 16) & 0xffff));
}
INLINE F load_float16(const void *column, int64_t row) {
  const I h = load_uint16(column, row), size = h & 0x7fff;
  const F found = number(size << 13) * splat(0x1p112f);  // exact, denormal numbers too
  const F kept = select(size >= 0x7c00, number((size << 13) | 0x7f800000), found);
  return number(bits(kept) | (h & 0x8000) << 16);
}
INLINE void store_float16(void *column, int64_t row, F x) {
  const F r = rounded_float16(x), a = abs(r);
  I b = bits(a * splat(0x1p-112f)) >> 13;  // exact
  b = select(a == splat(kInfinity), splat(0x7c00), select(x != x, splat(0x7e00), b));
  store_uint16(column, row, b | ((bits(x) >> 16) & 0x8000));
}
INLINE I load_bool(const void *column, int64_t row) { return load_uint8(column, row) != 0; }
INLINE void store_bool(void *column, int64_t row, I x) { store_uint8(column, row, x & 1); }
