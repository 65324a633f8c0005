// Checks a signature of OpenSSF model-signing, as made by registry/trust/signing.py: a Sigstore bundle with a DSSE envelope
// around an in-toto statement that lists the sha256 of every file. Only keys are supported; certificates are refused.
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <filesystem>

#include "common/artifact.h"
#include "checks.h"
#include "soa_load.h"

namespace fs = std::filesystem;
using soa_runner::fail;

namespace soa_library {

namespace {

const std::string kPayloadType = "application/vnd.in-toto+json";

using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY *)>;

// The digest function for a key's curve; null if this is no EC key on P-256, P-384 or P-521.
const EVP_MD *digest_of(EVP_PKEY *key) {
  if (key == nullptr || EVP_PKEY_base_id(key) != EVP_PKEY_EC) return nullptr;
  switch (EVP_PKEY_bits(key)) {
    case 256: return EVP_sha256();
    case 384: return EVP_sha384();
    case 521: return EVP_sha512();
    default: return nullptr;
  }
}

Key read_key(const std::string &path) {
  Key key(nullptr, EVP_PKEY_free);
  if (std::FILE *file = std::fopen(path.c_str(), "rb")) {
    key.reset(PEM_read_PUBKEY(file, nullptr, nullptr, nullptr));
    std::fclose(file);
  }
  if (digest_of(key.get()) == nullptr) {
    fail(soa::refusals::trust, "%s: not a public EC key on P-256, P-384 or P-521 in PEM format, which C++ needs", path.c_str());
  }
  return key;
}

// The files of a group of keys: paths of files, and the keys in the paths that are folders. Fails if there is none.
std::vector<std::string> key_files(const std::vector<std::string> &paths) {
  std::vector<std::string> files;
  for (const std::string &path : paths) {
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const auto &entry : fs::directory_iterator(path)) {
      const fs::path suffix = entry.path().extension();
      if (suffix == ".pem" || suffix == ".pub") files.push_back(entry.path().string());
    }
  }
  if (files.empty()) fail(soa::refusals::trust, "a signature is asked for, and there is no key that could be trusted");
  return files;
}

// The bytes of a text in base64, which has four characters for three bytes. OpenSSL decodes a padding of = as zeros.
std::string decoded(const std::string &base64) {
  std::string bytes(base64.size() / 4 * 3 + 3, '\0');
  auto *to = reinterpret_cast<unsigned char *>(&bytes[0]);
  const auto *from = reinterpret_cast<const unsigned char *>(base64.data());
  const int size = EVP_DecodeBlock(to, from, static_cast<int>(base64.size()));
  if (size < 3) throw std::runtime_error("not base64");
  const std::size_t padding = base64.size() - 1 - base64.find_last_not_of('=');
  bytes.resize(static_cast<std::size_t>(size) - padding);
  return bytes;
}

// True if the key made this signature of a payload, in the encoding of DSSE: https://github.com/secure-systems-lab/dsse.
bool made_by(EVP_PKEY *key, const std::string &payload, const std::string &signature) {
  const std::string message = "DSSEv1 " + std::to_string(kPayloadType.size()) + " " + kPayloadType + " " +
                              std::to_string(payload.size()) + " " + payload;
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX *)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  return EVP_DigestVerifyInit(context.get(), nullptr, digest_of(key), nullptr, key) == 1 &&
         EVP_DigestVerify(context.get(), reinterpret_cast<const unsigned char *>(signature.data()), signature.size(),
                          reinterpret_cast<const unsigned char *>(message.data()), message.size()) == 1;
}

// True if a statement belongs to the bundle with this digest. It is the digest of SHA256SUMS, which lists all other files.
bool belongs_to(const Json &statement, const std::string &digest) {
  for (const Json &file : statement["predicate"]["resources"].list()) {
    if (file["name"].text() == "SHA256SUMS") return file["algorithm"].text() == "sha256" && file["digest"].text() == digest;
  }
  return false;
}

}  // namespace

void Sealed::require_signature(const std::vector<std::vector<std::string>> &groups) const {
  if (groups.empty()) return;
  std::string content, payload, signature;
  if (!beside("bundle.sig", &content)) fail(soa::refusals::trust, "%s: not signed, and a signature is asked for", root.c_str());
  bool of_this_bundle = false;
  try {
    const Json stored = Json::parse(content);
    const Json &envelope = stored["dsseEnvelope"];
    payload = decoded(envelope["payload"].text());
    signature = decoded(envelope["signatures"].at(0)["sig"].text());
    const Json statement = Json::parse(payload);
    of_this_bundle =
        statement["predicateType"].text() == "https://model_signing/signature/v1.0" && belongs_to(statement, digest);
    if (stored["verificationMaterial"].find("publicKey") == nullptr) throw std::runtime_error("C++ takes no certificate");
  } catch (const std::exception &error) {
    fail(soa::refusals::trust, "%s: bundle.sig is not a signature made with a key: %s", root.c_str(), error.what());
  }
  for (const std::vector<std::string> &paths : groups) {
    bool signed_here = false;  // by a key of this group. All keys are read, so that a bad one is always reported
    for (const std::string &file : key_files(paths)) {
      if (made_by(read_key(file).get(), payload, signature)) signed_here = true;
    }
    if (of_this_bundle && signed_here) continue;
    fail(soa::refusals::trust, "%s: bundle.sig is no signature of exactly these files by a key in %s: it is by somebody else, "
                         "forged, damaged or of another bundle",
         root.c_str(), paths[0].c_str());
  }
}

}  // namespace soa_library
