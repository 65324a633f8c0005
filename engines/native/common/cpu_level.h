// CPU levels of the x86-64 psABI and of ARM: the features that each level needs, and those that this processor has.
// Features have the names of /proc/cpuinfo.
#ifndef SOA_CPU_LEVEL_H
#define SOA_CPU_LEVEL_H

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace soa_cpu {

// A feature, and the first level of its processor family that needs it.
struct Feature {
  const char *name, *level;
  bool present;
};

// Registers of CPUID, named by leaf; `saved` (XCR0): the vector states that the operating system saves.
struct Registers {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, extended1_ecx = 0, saved = 0;
};

inline bool bit(unsigned long value, int which) { return (value >> which & 1) != 0; }

// Features of an x86-64 processor, in the order of the levels. A vector feature counts only if its registers are saved.
inline std::vector<Feature> x86(const Registers &has) {
  const char *v2 = "x86-64-v2", *v3 = "x86-64-v3", *v4 = "x86-64-v4";
  const bool ymm = (has.saved & 0x6) == 0x6, zmm = (has.saved & 0xe6) == 0xe6;
  return {
      {"cx16", v2, bit(has.leaf1_ecx, 13)},
      {"lahf_lm", v2, bit(has.extended1_ecx, 0)},
      {"pni", v2, bit(has.leaf1_ecx, 0)},
      {"popcnt", v2, bit(has.leaf1_ecx, 23)},
      {"sse4_1", v2, bit(has.leaf1_ecx, 19)},
      {"sse4_2", v2, bit(has.leaf1_ecx, 20)},
      {"ssse3", v2, bit(has.leaf1_ecx, 9)},
      {"abm", v3, bit(has.extended1_ecx, 5)},
      {"avx", v3, bit(has.leaf1_ecx, 28) && ymm},
      {"avx2", v3, bit(has.leaf7_ebx, 5) && ymm},
      {"bmi1", v3, bit(has.leaf7_ebx, 3)},
      {"bmi2", v3, bit(has.leaf7_ebx, 8)},
      {"f16c", v3, bit(has.leaf1_ecx, 29) && ymm},
      {"fma", v3, bit(has.leaf1_ecx, 12) && ymm},
      {"movbe", v3, bit(has.leaf1_ecx, 22)},
      {"xsave", v3, bit(has.leaf1_ecx, 27)},
      {"avx512bw", v4, bit(has.leaf7_ebx, 30) && zmm},
      {"avx512cd", v4, bit(has.leaf7_ebx, 28) && zmm},
      {"avx512dq", v4, bit(has.leaf7_ebx, 17) && zmm},
      {"avx512f", v4, bit(has.leaf7_ebx, 16) && zmm},
      {"avx512vl", v4, bit(has.leaf7_ebx, 31) && zmm},
  };
}

// Features of an ARM processor, from the kernel's flags (AT_HWCAP).
inline std::vector<Feature> arm(unsigned long has) {
  return {
      {"fp", "aarch64", bit(has, 0)},           {"asimd", "aarch64", bit(has, 1)},
      {"asimdrdm", "armv8.2-a", bit(has, 12)}, {"atomics", "armv8.2-a", bit(has, 8)},
      {"crc32", "armv8.2-a", bit(has, 7)},
  };
}

// The features that `arch` needs and a processor lacks, separated by ", "; may be empty. "another processor family" if
// `arch` is no level of the processor's family.
inline std::string missing(const std::string &arch, const std::vector<Feature> &features) {
  const auto is_needed = [&](const Feature &feature) { return feature.level == arch; };
  const auto last = std::find_if(features.rbegin(), features.rend(), is_needed);
  if (last == features.rend()) return "another processor family";
  std::string lacking;
  for (auto feature = features.begin(); feature != last.base(); ++feature) {
    if (!feature->present) lacking += (lacking.empty() ? "" : ", ") + std::string(feature->name);
  }
  return lacking;
}

// The features of this processor.
inline std::vector<Feature> here() {
#if defined(__x86_64__)
  Registers has;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) has.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) has.leaf7_ebx = b;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) has.extended1_ecx = c;
  if (bit(has.leaf1_ecx, 27)) __asm__("xgetbv" : "=a"(has.saved), "=d"(d) : "c"(0));
  return x86(has);
#elif defined(__aarch64__)
  return arm(getauxval(AT_HWCAP));
#else
  return {};
#endif
}

inline std::string missing_here(const std::string &arch) { return missing(arch, here()); }

}  // namespace soa_cpu

#endif
