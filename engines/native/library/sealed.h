// A bundle's folder as it was sealed, and whose signature it has. What is refused is thrown as soa_runner::Failure.
#ifndef SOA_SEALED_H
#define SOA_SEALED_H

#include <array>
#include <map>
#include <string>
#include <vector>

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

}  // namespace soa_library

#endif
