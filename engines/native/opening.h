// Opening a library: what is asked of the file, and of this host, before its code is loaded.
#ifndef SOA_OPENING_H
#define SOA_OPENING_H

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "artifact.h"
#include "cpu_level.h"

namespace soa_runner {

// A function of a library, of whatever type it is assigned to.
struct Symbol {
  void *address;

  template <typename Function>
  operator Function() const {
    return reinterpret_cast<Function>(address);
  }
};

inline Symbol find(void *library, const std::string &name) {
  void *address = dlsym(library, name.c_str());
  if (address == nullptr) {
    fail(SOA_OPEN_FAILED, "no symbol %s: not an AOTInductor library, or torch is not there", name.c_str());
  }
  return {address};
}

// Whether every byte that the ELF headers name is in the file. The dynamic loader does not look: it
// maps a truncated library, and touching what is missing kills the process.
inline void require_whole_library(const char *path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(SOA_OPEN_FAILED, "%s: cannot be read: %s", path, std::strerror(errno));
  const auto length = static_cast<uint64_t>(file.tellg());
  Elf64_Ehdr header;
  file.seekg(0);
  bool whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&header), sizeof header)) &&
               std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
               header.e_ident[EI_CLASS] == ELFCLASS64 &&
               header.e_phentsize == sizeof(Elf64_Phdr) &&
               header.e_shoff <= length &&
               static_cast<uint64_t>(header.e_shnum) * header.e_shentsize <= length - header.e_shoff;
  for (int i = 0; whole && i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    file.seekg(static_cast<std::streamoff>(header.e_phoff + static_cast<uint64_t>(i) * sizeof segment));
    whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&segment), sizeof segment)) &&
            segment.p_offset <= length && segment.p_filesz <= length - segment.p_offset;
  }
  if (!whole) fail(SOA_OPEN_FAILED, "%s: not a whole 64-bit ELF library", path);
}

// The library that stands in for torch: beside this code, else wherever the loader looks. It stays loaded,
// and the artifact finds it by its name.
inline void load_shim(int version) {
  Dl_info here;
  const std::string name = "libsoa_shim.so";
  std::string path = name;
  if (dladdr(reinterpret_cast<void *>(&load_shim), &here) != 0) {
    const std::string code = here.dli_fname, beside = code.substr(0, code.rfind('/') + 1) + name;
    if (::access(beside.c_str(), F_OK) == 0) {
      require_whole_library(beside.c_str());
      path = beside;
    }
  }
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(SOA_OPEN_FAILED, "an artifact that runs without torch needs %s", dlerror());
  const auto found = reinterpret_cast<int32_t (*)()>(dlsym(handle, "soa_shim_version"));
  if (found == nullptr || found() < version) {
    fail(SOA_OPEN_FAILED, "the artifact needs version %d of %s, this one is %d: install a newer soa-pipeline", version,
         name.c_str(), found != nullptr ? found() : 0);
  }
}

// That this host runs what folder/target.txt says the library was built for. Asked before it is
// loaded: code of a higher CPU level would end the process by SIGILL. Returns whether the library runs
// without torch; then the shim has been loaded.
inline bool require_target(const std::string &folder, const char *device) {
  std::ifstream file(folder + "/target.txt");
  if (!file) return false;  // an artifact that does not say
  std::string line, target;
  if (!std::getline(file, line) || line != "soa-target 1" || !std::getline(file, target) ||
      target.find('/') == std::string::npos) {
    fail(SOA_OPEN_FAILED, "%s/target.txt: not a target", folder.c_str());
  }
  const bool for_cpu = target.compare(0, 4, "cpu/") == 0;
  if (for_cpu != (std::strncmp(device, "cpu", 3) == 0)) {
    fail(SOA_OPEN_FAILED, "the artifact was built for %s: it cannot be opened on %s", target.c_str(), device);
  }
  const std::string lacking = for_cpu ? soa_cpu::missing_here(target.substr(4)) : "";
  if (!lacking.empty()) {
    fail(SOA_OPEN_FAILED, "this host cannot run %s: it lacks %s", target.c_str(), lacking.c_str());
  }
  int version = 0;
  if (!std::getline(file, line) || std::sscanf(line.c_str(), "soa-shim %d", &version) != 1) return false;
  load_shim(version);
  return true;
}

// The library of an artifact, loaded for good. folder: null, or the artifact's.
inline void *open_library(const char *library, const char *device, const char *folder) {
  require_whole_library(library);
  int mode = RTLD_NOW | RTLD_LOCAL;
  const bool without_torch = folder != nullptr && require_target(folder, device);
  // Where torch's functions are there for the whole process, the shim's have to be found first.
  if (without_torch && dlsym(RTLD_DEFAULT, "aoti_torch_get_data_ptr") != nullptr) mode |= RTLD_DEEPBIND;
  void *handle = dlopen(library, mode);
  if (handle == nullptr) fail(SOA_OPEN_FAILED, "%s", dlerror());
  return handle;
}

}  // namespace soa_runner

#endif
