// What is asked of a bundle: its digests, its signature, its answers. What is refused is thrown as soa_runner::Failure.
#ifndef SOA_CHECKS_H
#define SOA_CHECKS_H

#include <array>
#include <map>
#include <string>
#include <vector>

#include "json.h"
#include "soa_model.hpp"

namespace soa_library {

// SHA-256, in hexadecimal digits.
std::string sha256(const void *data, std::size_t size);

// Every file that SHA256SUMS lists has been read and has its digest, and there is no other.
class Sealed {
 public:
  explicit Sealed(const std::string &folder);

  // The content of a listed file, by its digest.
  std::string content(const std::string &name) const;

  // The content of a file beside the sealed ones; false where there is none.
  bool beside(const std::string &name, std::string *content) const;

  // That the files whose names begin so are still those that were hashed.
  void require_unchanged(const std::string &prefix) const;

  // That bundle.sig is the signature of exactly these files: of each group of PEM files, or folders of *.pem and
  // *.pub, by one of the public keys.
  void require_signature(const std::vector<std::vector<std::string>> &groups) const;

  std::string root, digest;
  std::map<std::string, std::string> files;  // and their digests

 private:
  // Which file it was, and what changes with whatever is written to it.
  std::map<std::string, std::array<long, 7>> hashed_;
};

// Test mode: run `model` on every case of the reference (stored: safetensors), in memory that was filled with 0xff before.
// Fails with SOA_DEVIATES where more values of an output are outside its tolerance than the version allows, or where a
// byte has changed that is no output; with std::exception where the reference is not of this manifest.
void check_reference(const Json &manifest, const std::string &stored, const soa::Model &model);

}  // namespace soa_library

#endif
