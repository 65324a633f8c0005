#include "checks.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include "common/artifact.h"
#include "soa_load.h"

namespace fs = std::filesystem;
using soa_runner::fail;
namespace refusals = soa::refusals;

namespace soa_library {

namespace {

// A plain file, mapped into memory.
class Mapped {
 public:
  Mapped(const std::string &root, const std::string &name) {
    const auto refuse = [&](const soa::Refusal &refusal, const char *why) {
      fail(refusal, "%s: cannot read %s: %s", root.c_str(), name.c_str(), why);
    };
    const int file = ::open((root + "/" + name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (file < 0) refuse(errno == ENOENT ? refusals::bundle_altered : refusals::bundle, std::strerror(errno));
    struct stat status {};
    const bool plain = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    size = static_cast<std::size_t>(status.st_size);
    void *mapped = plain && size > 0 ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    ::close(file);
    if (!plain) refuse(refusals::bundle, "it is not a plain file");
    if (mapped == MAP_FAILED) refuse(refusals::bundle, "it cannot be mapped");
    data = static_cast<const char *>(mapped);
    identity = identity_of(status);
  }
  Mapped(const Mapped &) = delete;
  Mapped &operator=(const Mapped &) = delete;
  ~Mapped() {
    if (data != nullptr) ::munmap(const_cast<char *>(data), size);
  }

  // Changes if the file is replaced or written.
  static std::array<long, 7> identity_of(const struct stat &file) {
    return {static_cast<long>(file.st_dev), static_cast<long>(file.st_ino), file.st_size, file.st_mtim.tv_sec,
            file.st_mtim.tv_nsec, file.st_ctim.tv_sec, file.st_ctim.tv_nsec};
  }

  const char *data = nullptr;  // null for an empty file
  std::size_t size = 0;
  std::array<long, 7> identity{};
};

// True for valid UTF-8.
bool is_text(const std::string &content) {
  const char *at = content.data(), *end = at + content.size();
  while (at != end && next_character(at, end) >= 0) continue;
  return at == end;
}

// The digests in SHA256SUMS by the name of the file. A line is the digest, a space, ' ' or '*', and the name.
std::map<std::string, std::string> read_sums(const std::string &root, const std::string &text) {
  constexpr std::size_t kDigits = 64, kName = kDigits + 2;  // the length of a digest, and where the name begins
  if (!is_text(text)) fail(refusals::bundle, "%s: SHA256SUMS is not text", root.c_str());
  if (text.empty() || text.back() != '\n') fail(refusals::bundle_altered, "%s: SHA256SUMS is cut off", root.c_str());
  std::map<std::string, std::string> listed;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string name = line.size() > kName ? line.substr(kName) : "";
    const bool good = line.find_first_not_of("0123456789abcdef") == kDigits && line[kDigits] == ' ' && !name.empty() &&
                      (line[kDigits + 1] == ' ' || line[kDigits + 1] == '*') && is_safe(name);
    if (!good || !listed.emplace(name, line.substr(0, kDigits)).second) {
      fail(refusals::bundle, "%s: SHA256SUMS, line %zu: not '<sha256>  <file>', or listed twice", root.c_str(), listed.size() + 1);
    }
  }
  if (listed.count("manifest.json") == 0) fail(refusals::bundle, "%s: SHA256SUMS does not list manifest.json", root.c_str());
  return listed;
}

// The names of the files of a bundle, without those that are not sealed. Fails unless all are plain files.
std::set<std::string> listing(const std::string &root) {
  const std::set<std::string> not_sealed = {"SHA256SUMS", "bundle.sig", "PROMOTED.json", "registered_model_meta"};
  std::set<std::string> names;
  std::error_code error;
  fs::recursive_directory_iterator entry(root, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().lexically_relative(root).generic_string();
    const fs::file_type type = entry->symlink_status().type();
    if (type == fs::file_type::directory) {
      if (name == "annexes") entry.disable_recursion_pending();
      continue;
    }
    if (type != fs::file_type::regular || !is_safe(name)) {
      fail(refusals::bundle, "%s: %s is a link or no plain file, or has an odd name", root.c_str(), name.c_str());
    }
    if (not_sealed.count(name) == 0) names.insert(name);
  }
  if (error) fail(refusals::bundle, "%s: cannot be read: %s", root.c_str(), error.message().c_str());
  return names;
}

}  // namespace

std::string sha256(const void *data, std::size_t size) {
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_Digest(data, size, bytes, &length, EVP_sha256(), nullptr);
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    for (const int half : {bytes[i] >> 4, bytes[i] & 15}) text += "0123456789abcdef"[half];
  }
  return text;
}

Sealed::Sealed(const std::string &folder) : root(folder) {
  std::string sums;
  if (!beside("SHA256SUMS", &sums)) fail(refusals::bundle, "%s: not the folder of a bundle: it has no SHA256SUMS", root.c_str());
  digest = sha256(sums.data(), sums.size());
  files = read_sums(root, sums);
  std::set<std::string> not_listed = listing(root);
  for (const auto &[name, listed] : files) {
    if (not_listed.erase(name) == 0) fail(refusals::bundle_altered, "%s: %s is missing", root.c_str(), name.c_str());
    const Mapped file(root, name);
    const std::string actual = sha256(file.data, file.size);
    if (actual != listed) {
      fail(refusals::bundle_altered, "%s: %s is truncated or altered (%zu bytes with sha256 %.12s, SHA256SUMS says %.12s)",
           root.c_str(), name.c_str(), file.size, actual.c_str(), listed.c_str());
    }
    hashed_[name] = file.identity;
  }
  if (!not_listed.empty()) {
    fail(refusals::bundle_altered, "%s: %s does not belong to the bundle", root.c_str(), not_listed.begin()->c_str());
  }
}

std::string Sealed::content(const std::string &name) const {
  const auto listed = files.find(name);
  if (listed == files.end()) fail(refusals::bundle, "%s: the bundle has no file %s", root.c_str(), name.c_str());
  const Mapped file(root, name);
  std::string text(file.data, file.size);
  if (sha256(text.data(), text.size()) != listed->second) {
    fail(refusals::bundle_altered, "%s: %s was changed after its digest was checked", root.c_str(), name.c_str());
  }
  return text;
}

bool Sealed::beside(const std::string &name, std::string *content) const {
  if (fs::symlink_status(root + "/" + name).type() == fs::file_type::not_found) return false;
  const Mapped file(root, name);
  if (file.size > kLargestRecord) fail(refusals::bundle, "%s: %s is larger than any of ours", root.c_str(), name.c_str());
  content->assign(file.data, file.size);
  return true;
}

void Sealed::require_unchanged(const std::string &prefix) const {
  for (const auto &[name, identity] : hashed_) {
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    struct stat now {};
    if (::lstat((root + "/" + name).c_str(), &now) != 0 || Mapped::identity_of(now) != identity) {
      fail(refusals::bundle_altered, "%s: %s was changed after its digest was checked", root.c_str(), name.c_str());
    }
  }
}

}  // namespace soa_library
