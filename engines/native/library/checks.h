// The checks of a bundle: its digests, records, signature and answers. Errors are thrown as soa::Error, or as another
// std::exception if a record is not valid.
#ifndef SOA_CHECKS_H
#define SOA_CHECKS_H

#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "json.h"
#include "soa_model.hpp"

namespace soa_library {

constexpr std::size_t kLargestRecord = 64 << 20;

// SHA-256, in hexadecimal digits.
std::string sha256(const void *data, std::size_t size);

// The text with ? for each character that is not printable, as Python's str.isprintable says.
std::string plain(const std::string &text);

// True for a relative path that stays inside its folder and has printable characters only.
bool is_safe(const std::string &path);

// A bundle's folder, sealed by SHA256SUMS. The constructor reads every listed file and checks its digest, that the manifest
// is listed, and that there is no other file. It leaves out annexes/: these are folders with seals of their own, of targets
// that were built later, which are not opened here.
class Sealed {
 public:
  explicit Sealed(const std::string &folder);

  // The content of a listed file. Fails if it does not have the listed digest.
  std::string content(const std::string &name) const;

  // Reads a file that is not sealed; false if it does not exist.
  bool beside(const std::string &name, std::string *content) const;

  // Fails if a file whose name begins with `prefix` has changed after it was hashed.
  void require_unchanged(const std::string &prefix) const;

  // Fails unless bundle.sig is a signature of exactly these files, by a public key of each group. A group lists PEM
  // files, or folders with *.pem and *.pub files.
  void require_signature(const std::vector<std::vector<std::string>> &groups) const;

  std::string root, digest;
  std::map<std::string, std::string> files;  // names, with digests

 private:
  // For each file: its identity, size and times, which change if the file is replaced or written.
  std::map<std::string, std::array<long, 7>> hashed_;
};

// Reads a record as JSON. Throws for another format, and for a later one. where: the name of its file.
Json read_record(const std::string &content, const char *where);

// The deviation of an output from the reference: the numbers of values, and the largest differences.
struct Worst {
  std::size_t elements = 0, outside = 0;
  double gap = 0, relative = 0;
};
using Collections = std::map<std::string, soa::Collection>;
// The place of a model's memory, such as a device. For each case, bound() copies the filled collections there and returns
// the memory to bind. After the run, answered() copies the results back. By default the collections themselves are bound.
struct Place {
  std::function<std::vector<soa::Memory>(const Collections &)> bound;
  std::function<void(std::size_t number, const Collections &)> answered;
  void *stream = nullptr;
};
// Test mode: runs `model` on every case of the reference (stored: safetensors), in memory that was filled with 0xff before.
// Fails with `deviation` if more values of an output are outside its tolerance than the version allows, with
// `deviation-memory` if a byte outside the outputs has changed, with std::exception if the reference does not fit the manifest.
std::map<std::string, Worst> check_reference(const Json &manifest, const std::string &stored, const soa::Model &model,
                                             const Place &place = {});

}  // namespace soa_library

#endif
