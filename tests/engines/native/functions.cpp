// The elementary functions of the shim and of `lanes`, measured: `functions ulps STEP [FUNCTION]`, every STEP-th float of all
// 2^32; `functions doubles`; `functions widths`.
//
// A line for each function: its name, the worst error in units in the last place against the C library's double precision,
// where it is, and the number of values that are NaN or of another sign where the other is not, or that the vector and the
// scalar function give differently.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "product.cpp"
#include "vector_math.cpp"

namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The worst error of a function so far. `alone` is what its scalar form gives.
struct Worst {
  double ulps = 0.5;
  float at = 0, and_at = 0;
  uint64_t wrong = 0, count = 0;

  void add(float got, float alone, double exact, float x, float y) {
    ++count;
    const auto rounded = static_cast<float>(exact);
    const bool same = (got != got && alone != alone) || to_bits(got) == to_bits(alone);
    const bool fits = std::isnan(got) == std::isnan(exact) && std::signbit(got) == std::signbit(exact);
    if (!same || (!std::isnan(exact) && !fits) || std::isnan(got) != std::isnan(exact)) {
      if (wrong++ == 0) std::printf("# at %.9g %.9g: got %.9g, alone %.9g, exact %.17g\n", x, y, got, alone, exact);
      return;
    }
    if (std::isnan(exact) || got == rounded) return;  // half a unit at most
    const double here = error(got, exact);
    if (here > ulps) ulps = here, at = x, and_at = y;
  }
  // In units in the last place of `exact` as a float. Infinity counts as the number after the largest float.
  static double error(float got, double exact) {
    const double reached = std::isinf(got) ? std::copysign(0x1p128, got) : got;
    const int exponent = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
    return std::isinf(exact) ? 1e9 : std::fabs(reached - exact) / std::ldexp(1.0, exponent - 23);
  }
  void print(const std::string &name) const {
    std::printf("%s %.4f %.9g %.9g %llu of %llu\n", name.c_str(), ulps, at, and_at, static_cast<unsigned long long>(wrong),
                static_cast<unsigned long long>(count));
    std::fflush(stdout);
  }
};

using Vector1 = F (*)(F);
using Scalar1 = float (*)(float);
struct Unary {
  const char *name;
  Vector1 vector;
  Scalar1 scalar;  // null: there is none
  double (*exact)(double);
};
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
#define LANES_AS(NAME, EXACT) {"lanes_" #NAME, [](F x) { return (F)lanes::NAME((lanes::F)x); }, nullptr, EXACT}
#define OF_LANES(NAME) LANES_AS(NAME, [](double x) { return std::NAME(x); })
#define UNARY(NAME, SLEEF) {#NAME, Sleef_##SLEEF, __wrap_##NAME##f, [](double x) { return std::NAME(x); }}
const Unary kUnary[] = {
    UNARY(exp, expf8_u10),     UNARY(exp2, exp2f8_u10),   UNARY(expm1, expm1f8_u10), UNARY(log, logf8_u10),
    UNARY(log2, log2f8_u10),   UNARY(log10, log10f8_u10), UNARY(log1p, log1pf8_u10), UNARY(tanh, tanhf8_u10),
    UNARY(sinh, sinhf8_u10),   UNARY(cosh, coshf8_u10),   UNARY(asinh, asinhf8_u10), UNARY(acosh, acoshf8_u10),
    UNARY(atanh, atanhf8_u10), UNARY(sin, sinf8_u35),     UNARY(cos, cosf8_u35),     UNARY(tan, tanf8_u10),
    UNARY(asin, asinf8_u10),   UNARY(acos, acosf8_u10),   UNARY(atan, atanf8_u10),   UNARY(erf, erff8_u10),
    UNARY(erfc, erfcf8_u15),
    OF_LANES(exp),   OF_LANES(expm1), OF_LANES(exp2),  OF_LANES(log),   OF_LANES(log1p), OF_LANES(log2),  OF_LANES(log10),
    OF_LANES(tanh),  OF_LANES(sinh),  OF_LANES(cosh),  OF_LANES(asinh), OF_LANES(acosh), OF_LANES(atanh), OF_LANES(sin),
    OF_LANES(cos),   OF_LANES(tan),   OF_LANES(asin),  OF_LANES(acos),  OF_LANES(atan),  OF_LANES(erf),   OF_LANES(erfc),
    LANES_AS(sigmoid, sigmoid)};

struct Binary {
  const char *name;
  F (*vector)(F, F);
  float (*scalar)(float, float);
  double (*exact)(double, double);
};
#define BINARY(NAME, SLEEF) {#NAME, Sleef_##SLEEF, __wrap_##NAME##f, [](double x, double y) { return std::NAME(x, y); }}
const Binary kBinary[] = {BINARY(pow, powf8_u10), BINARY(atan2, atan2f8_u10), BINARY(hypot, hypotf8_u05)};

// Measures all functions, or `only` one, at every `step`-th float; those of two arguments at special and random pairs.
int ulps(uint64_t step, const char *only) {
  for (const Unary &f : kUnary) {
    if (only != nullptr && std::strcmp(only, f.name) != 0) continue;
    Worst worst;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 8 * step) {
      F x;
      for (uint64_t i = 0; i < 8; ++i) x[i] = from_bits(static_cast<uint32_t>(bits + i * step));
      const F got = f.vector(x);
      const int checked = static_cast<int>(bits / (8 * step) % 8);  // the element whose scalar function is asked, too
      for (int i = 0; i < 8; ++i) {
        const float alone = i == checked && f.scalar != nullptr ? f.scalar(x[i]) : got[i];
        worst.add(got[i], alone, f.exact(x[i]), x[i], 0);
      }
    }
    worst.print(f.name);
  }
  std::mt19937 draw(1);
  const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -0.5f, 2.0f, -2.0f, 3.0f, -3.0f, 2.5f, 1e-45f, -1e-45f, 1e38f, -1e38f, INFINITY, -INFINITY, NAN};
  for (const Binary &f : kBinary) {
    if (only != nullptr && std::strcmp(only, f.name) != 0) continue;
    Worst worst;
    const auto look = [&](float a, float b) {
      const F got = f.vector(_mm256_set1_ps(a), _mm256_set1_ps(b));
      worst.add(got[3], f.scalar(a, b), f.exact(a, b), a, b);
    };
    for (float a : special) for (float b : special) look(a, b);
    std::uniform_real_distribution<float> near(-20, 20);
    for (uint64_t i = 0; i < (uint64_t{1} << 26) / step; ++i) {
      look(from_bits(draw()), from_bits(draw()));
      look(near(draw), near(draw));
      look(std::fabs(near(draw)), near(draw));
    }
    worst.print(f.name);
  }
  return 0;
}

// The functions of double precision, against 80 bits; their errors are in the last place of a double.
double far_off(double got, long double exact) {
  if (std::isnan(got) || std::isnan(exact)) return std::isnan(got) == std::isnan(exact) ? 0 : 1e9;
  if (got == static_cast<double>(exact)) return 0;
  const int exponent = std::max(std::ilogb(exact), -1022);
  return static_cast<double>(std::fabs(got - exact) / std::ldexp(1.0L, exponent - 52));
}
#define DOUBLE(NAME) {#NAME "_double", __wrap_##NAME, [](long double x) { return std::NAME(x); }}
int doubles() {
  struct {
    const char *name;
    double (*got)(double);
    long double (*exact)(long double);
  } const all_of[] = {DOUBLE(exp), DOUBLE(expm1), DOUBLE(log), DOUBLE(log1p), DOUBLE(tanh), DOUBLE(atan), DOUBLE(asin), DOUBLE(acos)};
  std::mt19937_64 draw(3);
  std::normal_distribution<double> value;
  const auto any = [&] {
    const uint64_t bits = draw();
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return draw() % 3 == 0 ? x : draw() % 2 == 0 ? value(draw) * 100 : std::tanh(value(draw));
  };
  for (const auto &f : all_of) {
    double worst = 0, at = 0;
    for (int i = 0; i < 1000000; ++i) {
      const double x = any(), error = far_off(f.got(x), f.exact(x));
      if (error > worst) worst = error, at = x;
    }
    std::printf("%s %.3f %.17g 0 0\n", f.name, worst, at);
  }
  double worst = 0;
  for (int i = 0; i < 1000000; ++i) {
    const double y = any(), x = any();
    worst = std::max(worst, far_off(__wrap_atan2(y, x), std::atan2(static_cast<long double>(y), static_cast<long double>(x))));
  }
  std::printf("atan2_double %.3f 0 0 0\n", worst);
  return 0;
}

// The two widths of products and convolutions, and single rows alone, bit for bit.
int widths() {
  if (!__builtin_cpu_supports("avx512f")) return std::puts("no AVX-512"), 0;
  std::mt19937 draw(2);
  std::normal_distribution<float> value;
  uint64_t wrong = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t m = 1 + draw() % 70, n = 1 + draw() % 70, k = draw() % 50;
    std::vector<float> a(m * k), b(k * n), narrow(m * n), wide(m * n), alone(m * n), added(n), panel(32 * std::max<int64_t>(k, 1));
    for (auto *numbers : {&a, &b, &added}) for (float &x : *numbers) x = value(draw);
    const bool turned = draw() % 2 != 0;
    const soa_shim::Matrix ma{a.data(), m, k, turned ? 1 : k, turned ? m : 1}, mb{b.data(), k, n, turned ? n : 1, turned ? 1 : k};
    const soa_shim::Addend add{draw() % 2 != 0 ? added.data() : nullptr, 0, 1};
    soa_shim::wide256::product_of({narrow.data(), m, n, n, 1}, ma, mb, add, panel.data());
    soa_shim::wide512::product_of({wide.data(), m, n, n, 1}, ma, mb, add, panel.data());
    for (int64_t i = 0; i < m; ++i) soa_shim::multiply({alone.data() + i * n, 1, n, n, 1}, {ma.at(i, 0), 1, k, ma.row, ma.col}, mb, add);
    wrong += std::memcmp(narrow.data(), wide.data(), narrow.size() * 4) != 0;
    wrong += std::memcmp(narrow.data(), alone.data(), narrow.size() * 4) != 0;
  }
  std::printf("%llu wrong\n", static_cast<unsigned long long>(wrong));
  return wrong != 0;
}

}  // namespace

// What product.cpp takes from tensors.cpp.
namespace soa_shim {
void *take(size_t bytes) { return std::aligned_alloc(64, (bytes + 64) / 64 * 64); }
void give(void *block, size_t) noexcept { std::free(block); }
}  // namespace soa_shim

int main(int count, char **words) {
  if (count > 2 && std::strcmp(words[1], "ulps") == 0) return ulps(std::strtoull(words[2], nullptr, 10), count > 3 ? words[3] : nullptr);
  if (count > 1 && std::strcmp(words[1], "widths") == 0) return widths();
  if (count > 1 && std::strcmp(words[1], "doubles") == 0) return doubles();
  return std::puts("functions ulps STEP [FUNCTION] | doubles | widths"), 2;
}
