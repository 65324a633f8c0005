// What is asked of a bundle: its digests, its records, its signature, its answers. What is refused is thrown as
// soa_runner::Failure, or as std::exception where a record is not what it should be.
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

// Whether all of a text can be shown, as Python's str.isprintable says; and str.isidentifier, but that every character
// beyond ASCII counts as a letter.
bool is_printable(const std::string &text);
std::string plain(const std::string &text);  // with ? for what cannot be shown
bool is_identifier(const std::string &text);

// Whether it is a plain path inside a folder, with plain characters.
bool is_safe(const std::string &path);

// Every file that SHA256SUMS lists has been read and has its digest, and there is no other; `main` is among them.
class Sealed {
 public:
  explicit Sealed(const std::string &folder, const std::string &main = "manifest.json");

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

// Records as JSON, once they are what Python takes for one.
Json read_manifest(const std::string &content);
Json read_annex(const std::string &content);
Json read_note(const std::string &content);

// The file of the reference.
std::string reference_of(const Json &manifest);

// That the files which a manifest names are in the bundle.
void require_files(const Sealed &bundle, const Json &manifest);

// That what was built later for more targets, in folders below annexes/, is of this bundle. only: of these targets, by
// their digests; null: of all.
void check_annexes(const Sealed &bundle, const Json &manifest, const Json *only);

// A signature: what a model asks of memory.
struct Contract {
  explicit Contract(const Json &stored);

  // That what arguments.txt says of a candidate follows from this.
  void require_described(const soa::detail::State &found, const Json &candidate) const;

  std::map<std::string, soa::Layout> layouts;
  std::map<std::string, soa::detail::Rows> rows;
  std::vector<soa::detail::Argument> arguments;
  std::string tile_kinds;    // empty where the rows cannot be cut
  std::int64_t limit = 0;  // the largest n
};

// Test mode: run `model` on every case of the reference (stored: safetensors), in memory that was filled with 0xff before.
// Fails with `deviation` where more values of an output are outside its tolerance than the version allows, with
// `deviation-memory` where a byte has changed that is no output; with std::exception where the reference is not of this manifest.
struct Worst {
  std::size_t elements = 0, outside = 0;
  double gap = 0, relative = 0;
};
using Collections = std::map<std::string, soa::Collection>;
// Where a model's memory is. Both are called for each case: `bound` is what to bind for collections that are filled, and
// `answered`, after the run, puts what is there now back into them. By default a collection is bound itself.
struct Place {
  std::function<std::vector<soa::Memory>(const Collections &)> bound;
  std::function<void(std::size_t number, const Collections &)> answered;
  void *stream = nullptr;
};
std::map<std::string, Worst> check_reference(const Json &manifest, const std::string &stored, const soa::Model &model,
                                             const Place &place = {});

}  // namespace soa_library

#endif
