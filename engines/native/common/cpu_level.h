// CPU levels of the x86-64 psABI and of ARM, as in engines/kinds/cpu.py: the features that each level needs, and those
// that this processor has. Features have the names of /proc/cpuinfo.
#ifndef SOA_CPU_LEVEL_H
#define SOA_CPU_LEVEL_H

#include <cstdint>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace soa_cpu {

// Registers of CPUID, named by leaf; `saved` (XCR0): the vector states that the operating system saves.
struct Registers {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, extended1_ecx = 0, saved = 0;
};

#if defined(__x86_64__)
inline Registers here() {
  Registers found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) found.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) found.leaf7_ebx = b;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) found.extended1_ecx = c;
  if ((found.leaf1_ecx >> 27 & 1) != 0) __asm__("xgetbv" : "=a"(found.saved), "=d"(d) : "c"(0));
  return found;
}
#endif

// The features that `arch` needs and a processor with these registers lacks, separated by ", "; may be empty.
// "another processor family" if `arch` is no x86-64 level.
inline std::string missing(const std::string &arch, const Registers &has) {
  struct Feature {
    char level;
    const char *name;
    uint32_t value, bit;
    uint32_t saved;  // the register state that the operating system must save for this feature
  };
  constexpr uint32_t ymm = 0x6, zmm = 0xe6;
  const Feature features[] = {
      {'2', "cx16", has.leaf1_ecx, 13, 0},      {'2', "lahf_lm", has.extended1_ecx, 0, 0},
      {'2', "pni", has.leaf1_ecx, 0, 0},        {'2', "popcnt", has.leaf1_ecx, 23, 0},
      {'2', "sse4_1", has.leaf1_ecx, 19, 0},    {'2', "sse4_2", has.leaf1_ecx, 20, 0},
      {'2', "ssse3", has.leaf1_ecx, 9, 0},      {'3', "abm", has.extended1_ecx, 5, 0},
      {'3', "avx", has.leaf1_ecx, 28, ymm},     {'3', "avx2", has.leaf7_ebx, 5, ymm},
      {'3', "bmi1", has.leaf7_ebx, 3, 0},       {'3', "bmi2", has.leaf7_ebx, 8, 0},
      {'3', "f16c", has.leaf1_ecx, 29, ymm},    {'3', "fma", has.leaf1_ecx, 12, ymm},
      {'3', "movbe", has.leaf1_ecx, 22, 0},     {'3', "xsave", has.leaf1_ecx, 27, 0},
      {'4', "avx512bw", has.leaf7_ebx, 30, zmm}, {'4', "avx512cd", has.leaf7_ebx, 28, zmm},
      {'4', "avx512dq", has.leaf7_ebx, 17, zmm}, {'4', "avx512f", has.leaf7_ebx, 16, zmm},
      {'4', "avx512vl", has.leaf7_ebx, 31, zmm},
  };
  const std::string family = "x86-64-v";
  if (arch.size() != family.size() + 1 || arch.compare(0, family.size(), family) != 0 ||
      arch.back() < '2' || arch.back() > '4') {
    return "another processor family";
  }
  std::string lacking;
  for (const Feature &f : features) {
    const bool there = (f.value >> f.bit & 1) != 0 && (has.saved & f.saved) == f.saved;
    if (f.level > arch.back() || there) continue;
    lacking += (lacking.empty() ? "" : ", ") + std::string(f.name);
  }
  return lacking;
}

// The same for an ARM processor, from the kernel's flags (AT_HWCAP).
inline std::string missing_arm(const std::string &arch, unsigned long has) {
  struct Feature {
    const char *name;
    int bit;
    bool later;  // needed by armv8.2-a only
  };
  const Feature features[] = {{"fp", 0, false},        {"asimd", 1, false}, {"asimdrdm", 12, true},
                              {"atomics", 8, true}, {"crc32", 7, true}};
  if (arch != "aarch64" && arch != "armv8.2-a") return "another processor family";
  std::string lacking;
  for (const Feature &f : features) {
    if ((has >> f.bit & 1) != 0 || (f.later && arch == "aarch64")) continue;
    lacking += (lacking.empty() ? "" : ", ") + std::string(f.name);
  }
  return lacking;
}

// The features that this host lacks to run native code built for `arch`; may be empty.
inline std::string missing_here(const std::string &arch) {
#if defined(__x86_64__)
  return missing(arch, here());
#elif defined(__aarch64__)
  return missing_arm(arch, getauxval(AT_HWCAP));
#else
  return "another processor family";
#endif
}

}  // namespace soa_cpu

#endif
