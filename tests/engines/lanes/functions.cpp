// The functions of `lanes`, measured on every STEP-th float of all 2^32: functions STEP.
//
// A line for each: its name, the worst error in units in the last place against the C library's double
// precision, where it is, and how many answers are NaN, infinite or of another sign where they should not be.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "prelude.h"
#define LANES 8
#define RV 1
namespace lanes {
#include "lanes.h"
#include "functions.h"
}  // namespace lanes

static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <class Ours>
static void measure(const char *name, uint64_t step, const Ours &ours, double (*exact)(double)) {
  double worst = 0.5;
  float at = 0;
  uint64_t wrong = 0;
  for (uint64_t first = 0; first < (1ull << 32); first += LANES * step) {
    float x[LANES], found[LANES];
    for (int l = 0; l < LANES; ++l) {
      const auto bits = static_cast<uint32_t>(first + static_cast<uint64_t>(l) * step);
      std::memcpy(&x[l], &bits, sizeof bits);
    }
    lanes::F given;
    std::memcpy(&given, x, sizeof given);
    given = ours(given);
    std::memcpy(found, &given, sizeof found);
    for (int l = 0; l < LANES; ++l) {
      const double wanted = exact(x[l]);
      const auto rounded = static_cast<float>(wanted);
      if (std::isnan(found[l]) || std::isnan(wanted)) {
        wrong += std::isnan(found[l]) != std::isnan(wanted);
        continue;
      }
      if (found[l] == rounded && std::signbit(found[l]) == std::signbit(rounded)) continue;
      const int exponent = wanted == 0 ? -126 : std::max(std::ilogb(wanted), -126);
      const double error = std::fabs(found[l] - wanted) / std::ldexp(1.0, exponent - 23);
      const bool near_the_end = std::isinf(found[l]) != std::isinf(rounded) && std::fabs(wanted) > 3.4028e38;
      if (std::signbit(found[l]) != std::signbit(wanted) || (!(error < 1e6) && !near_the_end)) {
        ++wrong;
      } else if (!near_the_end && error > worst) {
        worst = error, at = x[l];
      }
    }
  }
  std::printf("%s %.4f %.9g %llu\n", name, worst, at, static_cast<unsigned long long>(wrong));
  std::fflush(stdout);
}

#define STANDARD(name) \
  measure(#name, step, [](lanes::F x) { return lanes::name(x); }, [](double x) { return std::name(x); });
int main(int, char **words) {
  const uint64_t step = std::strtoull(words[1], nullptr, 10);
  measure("sigmoid", step, [](lanes::F x) { return lanes::sigmoid(x); }, sigmoid);
  STANDARD(exp) STANDARD(expm1) STANDARD(exp2) STANDARD(log) STANDARD(log1p) STANDARD(log2) STANDARD(log10)
  STANDARD(tanh) STANDARD(sinh) STANDARD(cosh) STANDARD(asinh) STANDARD(acosh) STANDARD(atanh) STANDARD(sin)
  STANDARD(cos) STANDARD(tan) STANDARD(asin) STANDARD(acos) STANDARD(atan) STANDARD(erf) STANDARD(erfc)
}
