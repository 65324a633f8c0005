// Loops that are the same for all networks: products, reductions, sorting.
// A tensor in memory is an array of V, with RV of them for each element.

// One loop of a sum: the number of steps, and the distance of successive elements in both operands.
template <int kSize, int kLeft, int kRight = 0>
struct Loop {
  static constexpr int size = kSize, left = kLeft, right = kRight;
};
template <class... Each>
struct Loops {
  static constexpr int count = (1 * ... * Each::size);
};
template <class V, class Body>
INLINE void walk(Loops<>, const V *left, const V *right, const Body &body) {
  body(left, right);
}
template <class First, class... Rest, class V, class Body>
INLINE void walk(Loops<First, Rest...>, const V *left, const V *right, const Body &body) {
  LOOP for (int k = 0; k < First::size; ++k) {
    walk(Loops<Rest...>{}, left + k * First::left * RV, right + k * First::right * RV, body);
  }
}

// Calls `out(m, j, r, sum)` for each sum of a block. kLoop: `out` is long, so the loop is not unrolled.
template <bool kLoop, int kM, int kJ, int kR, class V, class Out>
INLINE void hand_out(const V (&sums)[kM][kJ][kR], int m, int j, int r, const Out &out) {
  if constexpr (kLoop) {
    LOOP for (int q = 0; q < kM * kJ * kR; ++q) {
      out(m + q / (kJ * kR), j + q / kR % kJ, r + q % kR, (&sums[0][0][0])[q]);
    }
  } else {
    UNROLL for (int a = 0; a < kM; ++a) {
      UNROLL for (int b = 0; b < kJ; ++b) {
        UNROLL for (int c = 0; c < kR; ++c) out(m + a, j + b, r + c, sums[a][b][c]);
      }
    }
  }
}

// kM times kJ sums in registers. The right operand is weights; the kJ weights of a step are adjacent.
template <bool kLoop, int kM, int kJ, int kLeft, class S, class V, class N, class Out>
INLINE void weighted_block(S steps, const V *left, const N *weights, int m, int j, const Out &out) {
  V sums[kM][kJ][RV];
  UNROLL for (int a = 0; a < kM; ++a) {
    UNROLL for (int b = 0; b < kJ; ++b) {
      UNROLL for (int r = 0; r < RV; ++r) sums[a][b][r] = V{};
    }
  }
  walk(steps, left, left, [&](const V *x, const V *) ALWAYS_INLINE {
    V own[kM][RV];
    UNROLL for (int a = 0; a < kM; ++a) {
      UNROLL for (int r = 0; r < RV; ++r) own[a][r] = x[a * kLeft * RV + r];
    }
    UNROLL for (int b = 0; b < kJ; ++b) {
      const V weight = splat(weights[b]);
      UNROLL for (int a = 0; a < kM; ++a) {
        UNROLL for (int r = 0; r < RV; ++r) sums[a][b][r] = fma(weight, own[a][r], sums[a][b][r]);
      }
    }
    weights += kJ;
  });
  hand_out<kLoop>(sums, m, j, 0, out);
}
template <bool kLoop, int kM, int kJ, int kMostJ, int kLeft, class S, class V, class N, class Out>
INLINE void weighted_rows(S steps, const V *left, const N *weights, int m, const Out &out) {
  int j = 0;
  LOOP for (; j + kMostJ <= kJ; j += kMostJ) {
    weighted_block<kLoop, kM, kMostJ, kLeft>(steps, left, weights + j * S::count, m, j, out);
  }
  if constexpr (kJ % kMostJ != 0) {
    weighted_block<kLoop, kM, kJ % kMostJ, kLeft>(steps, left, weights + j * S::count, m, j, out);
  }
}
// `K` describes the sums of a product by named constants. There are m times j sums, at most most_m times most_j in
// registers at a time. left, right: the distance of two rows of the left operand, and of two columns of the right one.
// loop: the code for a sum is not repeated for each. registers: how many the processor has, for `weighted_few`.
template <class K, class S, class V, class N, class Out>
INLINE void weighted(S steps, const V *left, const N *weights, const Out &out) {
  int m = 0;
  LOOP for (; m + K::most_m <= K::m; m += K::most_m) {
    weighted_rows<K::loop != 0, K::most_m, K::j, K::most_j, K::left>(steps, left + m * K::left * RV, weights, m, out);
  }
  if constexpr (K::m % K::most_m != 0) {
    weighted_rows<K::loop != 0, K::m % K::most_m, K::j, K::most_j, K::left>(steps, left + m * K::left * RV, weights, m, out);
  }
}

#if defined(__FMA__) && !defined(BLOCK_SIZE) && !defined(__CUDACC__) && !defined(__HIP__)
// A whole register of the processor, full of sums of one row.
#if defined(__AVX512F__)
#define WIDEST(name) _mm512_##name
constexpr int kRegisterBytes = 64;
#else
#define WIDEST(name) _mm256_##name
constexpr int kRegisterBytes = 32;
#endif
template <class N>
struct Register;
#define REGISTER(N, fmadd)                                                     \
  template <>                                                                  \
  struct Register<N> {                                                         \
    typedef N V __attribute__((vector_size(kRegisterBytes), may_alias));       \
    V sums;                                                                    \
    INLINE_MEMBER void add(const Register &weights, N own) {                   \
      sums = (V)WIDEST(fmadd)(weights.sums, own - V{}, sums); /* -0 stays */   \
    }                                                                          \
  };
REGISTER(float, fmadd_ps) REGISTER(double, fmadd_pd)
#undef REGISTER
#undef WIDEST
// The sums of kR rows and kM rows of the left operand, kBlocks registers for each. A block of four rows has copies of the
// first row behind its own kR rows. Each sum takes its steps in the same order as in `weighted_block`.
template <class K, int kR, int kM, int kBlocks, class S, class V, class N, class Out>
INLINE void few_block(S steps, const V *left, const N *weights, int m, int j, const Out &out) {
  constexpr int kJ = K::most_j, kSums = kBlocks * kJ;
  static_assert(sizeof(Register<N>) == kJ * sizeof(N), "the weights of a step fill a register");
  Register<N> sums[kR][kM][kBlocks];
  UNROLL for (int q = 0; q < kR * kM * kBlocks; ++q) (&sums[0][0][0])[q] = Register<N>{};
  walk(steps, left, left, [&](const V *x, const V *) ALWAYS_INLINE {
    Register<N> own[kBlocks];
    UNROLL for (int q = 0; q < kBlocks; ++q) __builtin_memcpy(&own[q], weights + q * kJ * S::count, sizeof own[q]);
    UNROLL for (int r = 0; r < kR; ++r) {
      UNROLL for (int a = 0; a < kM; ++a) {
        const N value = ((const N *)(x + a * K::left))[r];
        UNROLL for (int q = 0; q < kBlocks; ++q) sums[r][a][q].add(own[q], value);
      }
    }
    weights += kJ;
  });
  N made[kR][kM][kSums];
  __builtin_memcpy(&made, &sums, sizeof made);
  const int count = K::j - j < kSums ? K::j - j : kSums;  // behind them are zeros
  UNROLL for (int a = 0; a < kM; ++a) {
    LOOP for (int k = 0; k < count; ++k) {
      N rows[kRows];
      UNROLL for (int r = 0; r < kRows; ++r) rows[r] = made[r < kR ? r : 0][a][k];
      V sum;
      __builtin_memcpy(&sum, rows, sizeof sum);
      out(m + a, j + k, 0, sum);
    }
  }
}
template <class K, int kR, int kM, class S, class V, class N, class Out>
INLINE void few_rows(S steps, const V *left, const N *weights, int m, const Out &out) {
  constexpr int kJ = K::most_j, kAll = (K::j + kJ - 1) / kJ, kFit = (K::registers - 1) / (kR * kM + 1);
  constexpr int kPasses = (kAll + kFit - 1) / kFit, kBlocks = (kAll + kPasses - 1) / kPasses;
  int q = 0;
  LOOP for (; q + kBlocks <= kAll; q += kBlocks) {
    few_block<K, kR, kM, kBlocks>(steps, left, weights + q * kJ * S::count, m, q * kJ, out);
  }
  if constexpr (kAll % kBlocks != 0) {
    few_block<K, kR, kM, kAll % kBlocks>(steps, left, weights + q * kJ * S::count, m, q * kJ, out);
  }
}
template <class K, int kR, class S, class V, class N, class Out>
INLINE void few_products(S steps, const V *left, const N *weights, const Out &out) {
  constexpr int kM = K::m < 4 / kR ? K::m : 4 / kR;
  int m = 0;
  LOOP for (; m + kM <= K::m; m += kM) few_rows<K, kR, kM>(steps, left + m * K::left, weights, m, out);
  if constexpr (K::m % kM != 0) {
    LOOP for (; m < K::m; ++m) few_rows<K, kR, 1>(steps, left + m * K::left, weights, m, out);
  }
}
// As `weighted`, for a block of four rows, of which `own_rows` are not copies of the first.
template <class K, class S, class V, class N, class Out>
INLINE void weighted_few(int own_rows, S steps, const V *left, const N *weights, const Out &out) {
  if constexpr (kRows == 1) {
    few_products<K, 1>(steps, left, weights, out);
  } else if (own_rows == 2) {
    few_products<K, 2>(steps, left, weights, out);
  } else {
    few_products<K, 4>(steps, left, weights, out);
  }
}
#endif

// As `weighted`, for two operands that differ between rows: one vector at a time.
template <bool kLoop, int kM, int kJ, int kLeft, int kRight, class S, class V, class Out>
INLINE void paired_block(S steps, const V *left, const V *right, int m, int j, const Out &out) {
  LOOP for (int r = 0; r < RV; ++r) {
    V sums[kM][kJ][1];
    UNROLL for (int a = 0; a < kM; ++a) {
      UNROLL for (int b = 0; b < kJ; ++b) sums[a][b][0] = V{};
    }
    walk(steps, left + r, right + r, [&](const V *x, const V *y) ALWAYS_INLINE {
      V own[kM];
      UNROLL for (int a = 0; a < kM; ++a) own[a] = x[a * kLeft * RV];
      UNROLL for (int b = 0; b < kJ; ++b) {
        const V other = y[b * kRight * RV];
        UNROLL for (int a = 0; a < kM; ++a) sums[a][b][0] = fma(other, own[a], sums[a][b][0]);
      }
    });
    hand_out<kLoop>(sums, m, j, r, out);
  }
}
template <bool kLoop, int kM, int kJ, int kMostJ, int kLeft, int kRight, class S, class V, class Out>
INLINE void paired_rows(S steps, const V *left, const V *right, int m, const Out &out) {
  int j = 0;
  LOOP for (; j + kMostJ <= kJ; j += kMostJ) {
    paired_block<kLoop, kM, kMostJ, kLeft, kRight>(steps, left, right + j * kRight * RV, m, j, out);
  }
  if constexpr (kJ % kMostJ != 0) {
    paired_block<kLoop, kM, kJ % kMostJ, kLeft, kRight>(steps, left, right + j * kRight * RV, m, j, out);
  }
}
template <class K, class S, class V, class Out>
INLINE void paired(S steps, const V *left, const V *right, const Out &out) {
  int m = 0;
  LOOP for (; m + K::most_m <= K::m; m += K::most_m) {
    paired_rows<K::loop != 0, K::most_m, K::j, K::most_j, K::left, K::right>(steps, left + m * K::left * RV, right, m, out);
  }
  if constexpr (K::m % K::most_m != 0) {
    paired_rows<K::loop != 0, K::m % K::most_m, K::j, K::most_j, K::left, K::right>(steps, left + m * K::left * RV, right, m, out);
  }
}

#if defined(BLOCK_SIZE)
// Where a block of a GPU's threads computes RV rows together, each thread takes tiles of a product: most_m times most_j
// sums of most_r rows (of one row for two operands that differ between rows), in registers. A tile at an edge reads its
// last element again, and does not hand these sums out.
template <int kCount, class V>
struct alignas(kCount * sizeof(V) % 16 == 0 ? 16 : kCount * sizeof(V)) Adjacent {
  V each[kCount];
};
template <class K, class S, class V, class N, class Out>
INLINE void weighted_tile(int tile, int own_rows, S steps, const V *left, const N *weights, const Out &out) {
  constexpr int kM = K::most_m, kJ = K::most_j, kR = K::most_r, kAcross = (K::j + kJ - 1) / kJ;
  const int r = tile % (RV / kR) * kR, j = tile / (RV / kR) % kAcross * kJ, m = tile / (RV / kR) / kAcross * kM;
  if (r >= own_rows) return;
  V sums[kM][kJ][kR];
  UNROLL for (int q = 0; q < kM * kJ * kR; ++q) (&sums[0][0][0])[q] = V{};
  weights += j;
  walk(steps, left + r, left, [&](const V *x, const V *) ALWAYS_INLINE {
    const Adjacent<kJ, N> own = *(const Adjacent<kJ, N> *)weights;
    UNROLL for (int a = 0; a < kM; ++a) {
      const int at = m + a < K::m ? m + a : K::m - 1;
      const Adjacent<kR, V> rows = *(const Adjacent<kR, V> *)(x + at * K::left * RV);
      UNROLL for (int b = 0; b < kJ; ++b) {
        UNROLL for (int c = 0; c < kR; ++c) sums[a][b][c] = fma(splat(own.each[b]), rows.each[c], sums[a][b][c]);
      }
    }
    weights += kAcross * kJ;
  });
  hand_out<K::loop != 0>(sums, m, j, r, [&](int a, int b, int c, V sum) ALWAYS_INLINE {
    if (a < K::m && b < K::j && c < own_rows) out(a, b, c, sum);
  });
}
template <class K, class S, class V, class Out>
INLINE void paired_tile(int tile, int own_rows, S steps, const V *left, const V *right, const Out &out) {
  constexpr int kM = K::most_m, kJ = K::most_j, kAcross = (K::j + kJ - 1) / kJ;
  const int r = tile % RV, j = tile / RV % kAcross * kJ, m = tile / RV / kAcross * kM;
  if (r >= own_rows) return;
  V sums[kM][kJ][1];
  UNROLL for (int q = 0; q < kM * kJ; ++q) (&sums[0][0][0])[q] = V{};
  walk(steps, left + r, right + r, [&](const V *x, const V *y) ALWAYS_INLINE {
    V own[kM];
    UNROLL for (int a = 0; a < kM; ++a) own[a] = x[(m + a < K::m ? m + a : K::m - 1) * K::left * RV];
    UNROLL for (int b = 0; b < kJ; ++b) {
      const V other = y[(j + b < K::j ? j + b : K::j - 1) * K::right * RV];
      UNROLL for (int a = 0; a < kM; ++a) sums[a][b][0] = fma(other, own[a], sums[a][b][0]);
    }
  });
  hand_out<K::loop != 0>(sums, m, j, r, [&](int a, int b, int c, V sum) ALWAYS_INLINE {
    if (a < K::m && b < K::j) out(a, b, c, sum);
  });
}
#endif

// Reductions take values one after the other. A sum has up to eight parts; step k is added to part k % 8. The parts are
// combined in a fixed order, so that the bits are the same whether lanes are rows or steps.
INLINE void start(F &x, double number) { x = splat((float)number); }
INLINE void start(D &x, double number) { x = splat(number); }
INLINE void start(I &x, double number) { x = splat(number < 0 ? INT32_MIN : number > 1 ? INT32_MAX : (int32_t)number); }
INLINE void start(Q &x, double number) {
  x = splat(number < 0 ? INT64_MIN : number > 1 ? INT64_MAX : (int64_t)number);
}
// Calls `take(k, part)` for each step of the innermost loop. kLong: the code of `take` is not repeated for each part.
template <bool kLong, int kSteps, class Take>
INLINE void in_parts(const Take &take) {
  if constexpr (kLong) {
    LOOP for (int k = 0; k < kSteps; ++k) take(k, k % 8);
  } else {
    LOOP for (int k = 0; k + 8 <= kSteps; k += 8) {
      UNROLL for (int u = 0; u < 8; ++u) take(k + u, u);
    }
    UNROLL for (int u = 0; u < kSteps % 8; ++u) take(kSteps - kSteps % 8 + u, u);
  }
}
#define REDUCTION(Name, both, number)                                             \
  template <class V, int kParts>                                                  \
  struct Name {                                                                   \
    V part[8];                                                                    \
    INLINE_MEMBER Name() {                                                        \
      UNROLL for (int p = 0; p < 8; ++p) start(part[p], number);                  \
    }                                                                             \
    INLINE_MEMBER void take(V x, int k) { part[k] = both(part[k], x); }           \
    INLINE_MEMBER V found() const {                                               \
      V sum[8];                                                                   \
      UNROLL for (int p = 0; p < 8; ++p) sum[p] = part[p];                        \
      UNROLL for (int apart = 4; apart > 0; apart /= 2) {                         \
        UNROLL for (int p = 0; p < apart; ++p) {                                  \
          if (p + apart < kParts) sum[p] = both(sum[p], sum[p + apart]);          \
        }                                                                         \
      }                                                                           \
      return sum[0];                                                              \
    }                                                                             \
  };
template <class V> INLINE V added(V a, V b) { return a + b; }
template <class V> INLINE V multiplied(V a, V b) { return a * b; }
template <class V> INLINE V either(V a, V b) { return a | b; }
template <class V> INLINE V together(V a, V b) { return a & b; }
REDUCTION(Sum, added, 0) REDUCTION(Prod, multiplied, 1) REDUCTION(Max, maximum, -(double)kInfinity)
REDUCTION(Min, minimum, (double)kInfinity) REDUCTION(Any, either, 0)
#undef REDUCTION
// Integer keys with the order in which torch sorts numbers: NaN is the largest, and 0 equals -0.
INLINE I order(F x) {
  const I b = bits(x + splat(0.0f));
  return select(x != x, splat(INT32_MAX), b ^ ((b >> 31) & INT32_MAX));
}
INLINE Q order(D x) {
  const Q b = bits(x + splat(0.0));
  const Q negative = less(b, splat((int64_t)0));
  return select(~equal(x, x), splat(INT64_MAX), b ^ (negative & splat(INT64_MAX)));
}
INLINE I order(I x) { return x; }
INLINE Q order(Q x) { return x; }
INLINE void unordered(I key, F &x) {
  x = select(key == INT32_MAX, splat(kNaN), number(key ^ ((key >> 31) & INT32_MAX)));
}
INLINE void unordered(Q key, D &x) {
  const Q negative = less(key, splat((int64_t)0));
  x = select(equal(key, splat(INT64_MAX)), splat((double)kNaN), number(key ^ (negative & splat(INT64_MAX))));
}
INLINE void unordered(I key, I &x) { x = key; }
INLINE void unordered(Q key, Q &x) { x = key; }

// The index of the largest or the smallest value; of equal values, the first one.
template <class V, bool kLargest>
struct Place {
  decltype(order(V{})) best;
  Q at;
  INLINE_MEMBER void take(V x, int k) {
    auto key = order(x);
    if (!kLargest) key = select(ne(x, x), key, ~key);  // a NaN wins in both cases
    const auto ahead = less(best, key);
    at = k == 0 ? splat((int64_t)0) : select(ahead, splat((int64_t)k), at);
    best = k == 0 ? key : select(ahead, key, best);
  }
  INLINE_MEMBER Q found() const { return at; }
};
template <class V, int>
using ArgMax = Place<V, true>;
template <class V, int>
using ArgMin = Place<V, false>;

// Where a sort keeps its keys and places: a few on the stack, many in the memory of its results. A thread's stack may
// have only 128 kB.
constexpr int kOnStack = 64;
template <class V, class K, int kCount, bool kFew>
struct Ordered {
  V *to;
  Q *places;
  int to_apart, places_apart;
  INLINE_MEMBER K key(int t) const { return same_bits<K>(to[t * to_apart * RV]); }
  INLINE_MEMBER I place(int t) const { return narrow(places[t * places_apart * RV]); }
  INLINE_MEMBER void put(int t, K key, I place) {
    to[t * to_apart * RV] = same_bits<V>(key);
    places[t * places_apart * RV] = wide(place);
  }
};
template <class V, class K, int kCount>
struct Ordered<V, K, kCount, true> {
  V *to;
  Q *places;
  int to_apart, places_apart;
  K keys[kCount];
  I at[kCount];
  INLINE_MEMBER K key(int t) const { return keys[t]; }
  INLINE_MEMBER I place(int t) const { return at[t]; }
  INLINE_MEMBER void put(int t, K key, I place) {
    keys[t] = key;
    at[t] = place;
  }
};

// The first kCount of kSize elements in descending or ascending order, and their original indices.
template <int kSize, int kCount, bool kDescending, class V>
INLINE void sorted(const V *from, int apart, V *to, int to_apart, Q *places, int places_apart) {
  typedef decltype(order(V{})) K;
  Ordered<V, K, kCount, kCount <= kOnStack> best{to, places, to_apart, places_apart};
  LOOP for (int p = 0; p < kSize; ++p) {
    const K found = order(from[p * apart * RV]);
    const K own = kDescending ? found : ~found;
    K key = own;
    I place = splat(p);
    const int filled = p < kCount ? p : kCount;
    LOOP for (int t = 0; t < filled; ++t) {
      const K other = best.key(t);
      const I other_place = best.place(t);
      const K ahead = less(other, own);  // if true, it is true for all later t, too: equal elements keep their order
      best.put(t, select(ahead, key, other), select(mask(ahead), place, other_place));
      key = select(ahead, other, key);
      place = select(mask(ahead), other_place, place);
    }
    if (p < kCount) best.put(p, key, place);
  }
  LOOP for (int t = 0; t < kCount; ++t) {
    const I place = best.place(t);
    unordered(kDescending ? best.key(t) : ~best.key(t), to[t * to_apart * RV]);
    places[t * places_apart * RV] = wide(place);
  }
}

// The leaf of one decision tree that each row reaches. A word has a bit for each of up to 32 leaves, from left to right.
// Where a row goes right, it cannot reach the leaves on the left: their bits are cleared, for all nodes of the tree. The
// first leaf whose bit is left is the one that the row reaches. For the tables see Forest in tensors.py.
template <bool kEqual, int kVectors, class V, class N>
INLINE void leaf(const V *rows, int apart, const N *thresholds, const int32_t *nodes, const int32_t *words,
                 const int32_t *trees, int tree, I *to) {
  const int first = trees[2 * tree], last = trees[2 * tree + 2];
  for (int r = 0; r < kVectors; ++r) to[r] = splat(-1);
  LOOP for (int word = first; word < last; ++word) {
    I alive[kVectors];
    UNROLL for (int r = 0; r < kVectors; ++r) alive[r] = splat(-1);
    LOOP for (int k = words[word]; k < words[word + 1]; ++k) {
      const V *x = rows + nodes[2 * k] * apart * RV;
      const V threshold = splat(thresholds[k]);
      const I kept = splat(nodes[2 * k + 1]);
      UNROLL for (int r = 0; r < kVectors; ++r) {
        const I left = kEqual ? mask(less_equal(x[r], threshold)) : mask(less(x[r], threshold));
        alive[r] = alive[r] & (left | kept);
      }
    }
    UNROLL for (int r = 0; r < kVectors; ++r) {
      const I lowest = alive[r] & -alive[r];  // a power of 2, whose exponent is the number of the leaf in the word
      const I number = ((bits(to_float32(lowest)) >> splat(23)) & splat(255)) - splat(127);
      const I found = number + splat(32 * (word - first) + trees[2 * tree + 1]);
      to[r] = select(less(to[r], splat(0)) & ne(alive[r], splat(0)), found, to[r]);
    }
  }
}

// As `leaf`, for all trees and one row after the other, which goes down in some trees at once, without a branch for a
// node. A leaf is its own child. For the table see Paths in tensors.py.
template <bool kEqual, class K, class N, class V>
INLINE void go_down(int own_rows, const V *rows, const int32_t *nodes, I *to) {
  LOOP for (int row = 0; row < kRows; ++row) {
    int32_t *const own = (int32_t *)to + row;
    if (row >= own_rows) {  // a copy of the first row
      LOOP for (int t = 0; t < K::trees; ++t) {
        own[t * K::trees_apart * kRows] = own[t * K::trees_apart * kRows - row];
      }
      continue;
    }
    N values[K::columns + 1];
    LOOP for (int f = 0; f < K::columns; ++f) values[f] = ((const N *)(rows + f * K::apart * RV))[row];
    values[K::columns] = -1;  // below the limit of any leaf
    LOOP for (int begin = 0; begin < K::trees; begin += K::together) {
      const int first = begin + K::together < K::trees ? begin : K::trees - K::together;
      int32_t at[K::together], moved;
      UNROLL for (int g = 0; g < K::together; ++g) at[g] = first + g;
      do {
        moved = 0;
        UNROLL for (int g = 0; g < K::together; ++g) {
          const int32_t *const node = nodes + K::node * (int64_t)at[g];
          const N x = values[node[0]];
          N limit;
          __builtin_memcpy(&limit, node + 2, sizeof limit);
          const int32_t next = node[1] + !(kEqual ? x <= limit : x < limit);
          moved |= next ^ at[g];
          at[g] = next;
        }
      } while (moved != 0);
      UNROLL for (int g = 0; g < K::together; ++g) {
        own[(first + g) * K::trees_apart * kRows] = nodes[K::node * (int64_t)at[g] + 2];
      }
    }
  }
}

#if !defined(BLOCK_SIZE) && !defined(__CUDACC__) && !defined(__HIP__)
// As `leaf`, for all trees and one row after the other. All nodes of a column where a row goes right come before the
// others. So the column clears the bits that a mask has cleared for most of them, and those of the nodes behind it. For
// the tables see Ranks in tensors.py.
template <bool kEqual, class K, class N, class V>
INLINE void leaves(int own_rows, const V *rows, const N *thresholds, const int32_t *nodes, const int32_t *columns,
                   const int32_t *masks, const int32_t *trees, I *to) {
  typedef int32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
  LOOP for (int row = 0; row < kRows; ++row) {
    const auto value = [&](int f, int of) { return ((const N *)(rows + f * K::apart * RV))[of]; };
    int32_t *const own = (int32_t *)to + row;
    if (row >= own_rows) {  // a copy of the first row
      for (int t = 0; t < K::trees; ++t) own[t * K::trees_apart * kRows] = own[t * K::trees_apart * kRows - row];
      continue;
    }
    int32_t alive[K::words];
    const int32_t *mask[K::columns];
    int behind[K::columns];  // the first node behind the mask
    for (int f = 0; f < K::columns; ++f) {
      const N x = value(f, row), *const limits = thresholds + columns[2 * f] - 1;
      int masked = 0;
      for (int left = columns[2 * f + 3] - columns[2 * f + 1] - 1; left > 0; left -= (left + 1) / 2) {
        const int half = (left + 1) / 2;
        const N limit = limits[(masked + half) * K::step];
        masked += half & -(int)(kEqual ? x > limit : x >= limit);  // without a branch
      }
      behind[f] = columns[2 * f] + masked * K::step;
      mask[f] = masks + (int64_t)(columns[2 * f + 1] + masked) * K::words;
    }
    for (int w = 0; w < K::words; w += 16) {
      Words found = *(const Words *)(mask[0] + w);
      for (int f = 1; f < K::columns; ++f) found &= *(const Words *)(mask[f] + w);
      *(Words *)(alive + w) = found;
    }
    for (int f = 0; f < K::columns; ++f) {
      const N x = value(f, row);
      for (int k = behind[f]; k < columns[2 * f + 2] && (kEqual ? x > thresholds[k] : x >= thresholds[k]); ++k) {
        alive[nodes[2 * k]] &= nodes[2 * k + 1];
      }
    }
    for (int t = 0; t < K::trees; ++t) {
      const int first = K::one_word ? t : trees[2 * t], last = K::one_word ? t : trees[2 * t + 2] - 1;
      int found = 32 * (last - first) + __builtin_ctz((unsigned)alive[last]);
      for (int word = last - 1; word >= first; --word) {
        const int number = 32 * (word - first) + __builtin_ctz((unsigned)alive[word]);
        found = alive[word] != 0 ? number : found;
      }
      own[t * K::trees_apart * kRows] = trees[2 * t + 1] + found;
    }
  }
}
#endif
