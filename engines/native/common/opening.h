// Opens a library. Before its code is loaded, the file and this host are checked.
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

// The address of a function, which converts to any type of function.
struct Symbol {
  void *address;

  template <typename Function>
  operator Function() const {
    return reinterpret_cast<Function>(address);
  }
};

// A symbol of a library; fails if there is none of this name.
inline Symbol find(void *library, const std::string &name) {
  void *address = dlsym(library, name.c_str());
  if (address == nullptr) {
    fail(SOA_OPEN_FAILED, "no symbol %s: not the library of an artifact, or torch is not there", name.c_str());
  }
  return {address};
}

// Fails unless every byte that the ELF headers name is in the file. The dynamic loader does not check this:
// it maps a truncated library, and an access to a missing page kills the process.
inline void require_whole_library(const char *path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(SOA_OPEN_FAILED, "%s: cannot be read: %s", path, std::strerror(errno));
  const auto length = static_cast<uint64_t>(file.tellg());
  const auto inside = [length](uint64_t offset, uint64_t size) { return offset <= length && size <= length - offset; };
  Elf64_Ehdr header;
  file.seekg(0);
  bool whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&header), sizeof header)) &&
               std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
               header.e_ident[EI_CLASS] == ELFCLASS64 &&
               header.e_phentsize == sizeof(Elf64_Phdr) &&
               inside(header.e_shoff, static_cast<uint64_t>(header.e_shnum) * header.e_shentsize);
  for (int i = 0; whole && i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    file.seekg(static_cast<std::streamoff>(header.e_phoff + static_cast<uint64_t>(i) * sizeof segment));
    whole = static_cast<bool>(file.read(reinterpret_cast<char *>(&segment), sizeof segment)) &&
            inside(segment.p_offset, segment.p_filesz);
  }
  if (!whole) fail(SOA_OPEN_FAILED, "%s: not a whole 64-bit ELF library", path);
}

// Loads the library that replaces torch, from the folder of this code or else from the loader's search path.
// It stays loaded, and the artifact finds it by its name. version: the least that the artifact needs.
inline void load_shim(int version) {
  Dl_info this_code;
  const std::string name = "libsoa_shim.so";
  std::string path = name;
  if (dladdr(reinterpret_cast<void *>(&load_shim), &this_code) != 0) {
    const std::string file = this_code.dli_fname, beside = file.substr(0, file.rfind('/') + 1) + name;
    if (::access(beside.c_str(), F_OK) == 0) {
      require_whole_library(beside.c_str());
      path = beside;
    }
  }
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(SOA_OPEN_FAILED, "an artifact that runs without torch needs %s", dlerror());
  const auto shim_version = reinterpret_cast<int32_t (*)()>(dlsym(handle, "soa_shim_version"));
  const int found = shim_version != nullptr ? shim_version() : 0;
  if (shim_version == nullptr || found < version) {
    fail(SOA_OPEN_FAILED, "the artifact needs version %d of %s, this one is %d: install a newer soa-pipeline", version,
         name.c_str(), found);
  }
}

// Fails unless this host runs the target that folder/target.txt names. This is checked before the library is
// loaded, because code for a higher CPU level would end the process with SIGILL. Returns true if the library
// runs without torch; then the shim has been loaded.
inline bool require_target(const std::string &folder, const char *device) {
  std::ifstream file(folder + "/target.txt");
  if (!file) return false;  // an artifact that does not name its target
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

// Loads the library of an artifact; it is never unloaded. folder: that of the artifact, or null.
inline void *open_library(const char *library, const char *device, const char *folder) {
  require_whole_library(library);
  int mode = RTLD_NOW | RTLD_LOCAL;
  const bool without_torch = folder != nullptr && require_target(folder, device);
  // If torch's functions are global symbols of the process, the library must find those of the shim first.
  if (without_torch && dlsym(RTLD_DEFAULT, "aoti_torch_get_data_ptr") != nullptr) mode |= RTLD_DEEPBIND;
  void *handle = dlopen(library, mode);
  if (handle == nullptr) fail(SOA_OPEN_FAILED, "%s", dlerror());
  return handle;
}

}  // namespace soa_runner

#endif
