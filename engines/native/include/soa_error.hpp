// soa_error: the errors, each with a code such as "bind-rows".
#ifndef SOA_ERROR_HPP
#define SOA_ERROR_HPP

#include <stdexcept>
#include <string>

#include "soa_load.h"

namespace soa {

// A kind of error: its code, which Python uses, too (see docs/reference/refusals.md), and the value that functions of the C
// interface return for it.
struct Refusal {
  const char *code;
  int returned;
};

namespace refusals {

inline constexpr Refusal error{"error", SOA_BAD_ARGUMENT}, layout{"layout", SOA_BAD_ARGUMENT},
    collection{"collection", SOA_BAD_ARGUMENT}, bind{"bind", SOA_BAD_ARGUMENT}, bind_layout{"bind-layout", SOA_BAD_ARGUMENT},
    bind_device{"bind-device", SOA_BAD_ARGUMENT}, bind_read_only{"bind-read-only", SOA_BAD_ARGUMENT},
    bind_overlap{"bind-overlap", SOA_BAD_ARGUMENT}, bind_rows{"bind-rows", SOA_BAD_ARGUMENT}, run{"run", SOA_RUN_FAILED},
    load{"load", SOA_OPEN_FAILED}, bundle{"bundle", SOA_BAD_BUNDLE}, bundle_altered{"bundle-altered", SOA_BAD_BUNDLE},
    bundle_newer{"bundle-newer", SOA_BAD_BUNDLE},
    load_not_promoted{"load-not-promoted", SOA_NOT_PROMOTED}, load_altered{"load-altered", SOA_NOT_PROMOTED},
    trust{"trust", SOA_NOT_SIGNED}, target{"target", SOA_WRONG_HOST}, load_target{"load-target", SOA_WRONG_HOST},
    load_not_verified{"load-not-verified", SOA_WRONG_HOST}, load_without_torch{"load-without-torch", SOA_WRONG_HOST},
    header{"header", SOA_WRONG_VERSION}, deviation{"deviation", SOA_DEVIATES}, deviation_memory{"deviation-memory", SOA_DEVIATES};

}  // namespace refusals

// An error. what() is one line with the code in brackets at the end; message() is the line without the code.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string &text, const Refusal &refusal = refusals::error)
      : std::runtime_error(text + " [" + refusal.code + "]"), refusal_(refusal), length_(text.size()) {}

  const char *code() const noexcept { return refusal_.code; }
  std::string message() const { return std::string(what(), length_); }
  const Refusal &refusal() const noexcept { return refusal_; }

 private:
  Refusal refusal_;
  std::size_t length_;  // of the message, in bytes
};
// The folder is not the sealed bundle: a file is missing, altered, truncated or does not belong to it.
class BundleError : public Error {
  using Error::Error;
};
// The bundle was not promoted, and production needs a promotion.
class PromotionError : public Error {
  using Error::Error;
};
// No trusted key has signed the bundle.
class TrustError : public Error {
  using Error::Error;
};
// This host can run none of the bundle's artifacts.
class HostError : public Error {
  using Error::Error;
};
// A generated header belongs to another version, or has other layouts.
class HeaderError : public Error {
  using Error::Error;
};
// Test mode: an answer differs from the reference.
class DeviationError : public Error {
  using Error::Error;
};

}  // namespace soa

#endif
