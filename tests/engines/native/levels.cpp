// What engines/native/common/cpu_level.h says, for tests/engines/native/test_native_levels.py to compare:
//
//   needs LEVEL FEATURE, ...    of a processor that has nothing
//   lacks LEVEL FEATURE, ...    of this processor
//   saves LEVEL FEATURE, ...    of one that has all, under a system that saves only XMM registers
#include <cstdio>

#include "common/cpu_level.h"

int main() {
  const uint32_t all = UINT32_MAX;
  for (const char *arch : {"x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v5", "aarch64", "armv8.2-a", "x86-64-v", ""}) {
    std::printf("needs %s: %s\n", arch, soa_cpu::missing(arch, soa_cpu::x86({})).c_str());
    std::printf("lacks %s: %s\n", arch, soa_cpu::missing_here(arch).c_str());
    std::printf("arm needs %s: %s\n", arch, soa_cpu::missing(arch, soa_cpu::arm(0)).c_str());
    std::printf("arm lacks %s: %s\n", arch, soa_cpu::missing(arch, soa_cpu::arm(~0UL)).c_str());
    std::printf("saves %s: %s\n", arch, soa_cpu::missing(arch, soa_cpu::x86({all, all, all, 0x3})).c_str());
  }
}
