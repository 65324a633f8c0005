// Counts the values of a share of the calls, for `pipeline drift`, as runtime/watch does in Python.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <random>

#include "checks.h"
#include "common/counting.h"
#include "soa_load.h"

namespace soa_library {

constexpr std::chrono::seconds kApart{10};  // between two writes of the file

static std::string json_text(const std::string &text) {
  std::string found = "\"";
  for (const char c : text) {
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(c));
    const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\';
    found += plain ? std::string(1, c) : code;
  }
  return found + '"';
}

static std::string unique_name(const std::string &label) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::string name = label + "-" + host + "-" + std::to_string(getpid()) + "-";
  for (char &c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-') c = '_';
  }
  char token[16];
  std::snprintf(token, sizeof token, "%08x", std::random_device()());
  return name + token + ".json";
}

// The counts of one model in this process. A child of a fork begins with nothing, in a file of its own.
class Watch {
 public:
  Watch(const Json &profile, std::string name, const std::string &ref, std::string digest, double share)
      : share_(share), name_(std::move(name)), digest_(std::move(digest)) {
    const std::size_t slash = ref.rfind('/');
    if (slash != std::string::npos) version_ = ref.substr(slash + 1);
    const char *folder = std::getenv("PIPELINE_COUNTS");
    folder_ = std::filesystem::absolute(folder == nullptr ? "pipeline-counts" : folder);
    const Json &columns = profile["columns"];
    for (const std::string &key : columns.keys) {
      Tally &tally = tallies_[key];
      for (const Json &edge : columns[key]["edges"].items) tally.edges.push_back(edge.real());
      tally.raw.resize(soa_runner::kEdges + tally.edges.size());
    }
    begin();
  }

  bool draws() const {
    thread_local std::mt19937 random{std::random_device()()};
    return std::uniform_real_distribution<>()(random) < share_;
  }

  void count(const soa_values *values, std::size_t size) {
    const std::lock_guard<std::mutex> alone(lock_);
    if (process_ != getpid()) begin();
    for (const soa_values *each = values; each != values + size; ++each) {
      const auto found = tallies_.find(each->key);
      if (found == tallies_.end()) continue;
      Tally &tally = found->second;
      const auto most = static_cast<std::int32_t>(tally.edges.size());
      const bool counted = soa_runner::count_between(each->dtype, each->data, each->n, tally.edges.data(), most, tally.raw.data());
      if (counted) tally.all += each->n;
    }
    ++calls_;
    if (std::chrono::steady_clock::now() - written_ > kApart) write();
  }

  void close() {
    const std::lock_guard<std::mutex> alone(lock_);
    if (process_ == getpid() && calls_ > 0) write();
  }

 private:
  // The counts of one column.
  struct Tally {
    std::vector<double> edges;
    std::vector<std::int64_t> raw;  // as in counting.h
    std::int64_t all = 0;

    // The numbers of values: NaN, -infinity, infinity, zero, below and above all bins, then one for each bin.
    std::vector<std::int64_t> counts() const {
      using namespace soa_runner;
      const std::int64_t finite = all - raw[kNaN] - raw[kMinusInfinity] - raw[kInfinity] - raw[kZero];
      std::vector<std::int64_t> below;  // each edge, without -infinity and zeros
      for (std::size_t k = 0; k < edges.size(); ++k) {
        below.push_back(raw[kEdges + k] - raw[kMinusInfinity] - (edges[k] > 0 ? raw[kZero] : 0));
      }
      std::vector<std::int64_t> found(raw.begin(), raw.begin() + kEdges);
      found.push_back(below.empty() ? 0 : below.front());
      found.push_back(below.empty() ? finite : finite - below.back());
      for (std::size_t k = 1; k < below.size(); ++k) found.push_back(below[k] - below[k - 1]);
      return found;
    }
  };

  void begin() {
    process_ = getpid();
    calls_ = 0;
    for (auto &[key, tally] : tallies_) {
      tally.raw.assign(tally.raw.size(), 0);
      tally.all = 0;
    }
    file_ = folder_ / unique_name(version_.empty() ? name_ : name_ + "/" + version_);
    written_ = std::chrono::steady_clock::now();
  }

  // Writes the file again. Throws if that is not possible.
  void write() {
    written_ = std::chrono::steady_clock::now();
    std::string columns;
    for (const auto &[key, tally] : tallies_) {
      std::string numbers;
      for (const std::int64_t number : tally.counts()) numbers += (numbers.empty() ? "" : ", ") + std::to_string(number);
      columns += (columns.empty() ? "" : ", ") + json_text(key) + ": [" + numbers + "]";
    }
    std::filesystem::create_directories(folder_);
    const std::filesystem::path part = folder_ / ("." + file_.filename().string() + ".part");
    std::ofstream stream(part, std::ios::binary);
    stream.exceptions(std::ios::failbit | std::ios::badbit);
    stream << "{\"schema_version\": 1, \"model\": " << json_text(name_)
           << ", \"version\": " << (version_.empty() ? "null" : json_text(version_)) << ", \"digest\": " << json_text(digest_)
           << ", \"calls\": " << calls_ << ", \"columns\": {" << columns << "}}\n";
    stream.close();
    std::filesystem::rename(part, file_);
  }

  double share_;
  std::string name_, version_, digest_;
  std::filesystem::path folder_, file_;
  std::map<std::string, Tally> tallies_;
  std::mutex lock_;
  pid_t process_ = 0;
  std::int64_t calls_ = 0;
  std::chrono::steady_clock::time_point written_;
};

static double share_to_watch() {
  const char *asked = std::getenv("PIPELINE_WATCH");
  if (asked == nullptr || *asked == 0) return 0;
  char *end = nullptr;
  const double share = std::strtod(asked, &end);
  if (*end != 0 || !(share >= 0 && share <= 1)) {
    soa_runner::fail(soa::refusals::load, "PIPELINE_WATCH=%s: give the share of calls to count, from 0 to 1", asked);
  }
  return share;
}

}  // namespace soa_library

struct soa_watch : soa_library::Watch {
  using Watch::Watch;
};

extern "C" {

int soa_watch_open(const soa_origin *origin, soa_watch **watch, char *message, size_t size) {
  try {
    *watch = nullptr;
    const double share = soa_library::share_to_watch();
    if (share == 0 || *origin->columns == 0) return SOA_OK;
    const soa_library::Json profile = soa_library::read_record(origin->columns, "reports/columns.json");
    *watch = new soa_watch(profile, origin->name, origin->ref, origin->digest, share);
    return SOA_OK;
  } catch (const soa::Error &error) {
    return soa_runner::told(error.refusal(), soa_library::plain(error.message()), message, size);
  } catch (const std::exception &error) {
    return soa_runner::told(soa::refusals::bundle, soa_library::plain(error.what()), message, size);
  }
}

int soa_watch_draws(const soa_watch *watch) { return watch->draws(); }

void soa_watch_count(soa_watch *watch, const soa_values *values, size_t count) {
  try {
    watch->count(values, count);
  } catch (const std::exception &) {  // the file cannot be written: the next write may succeed
  }
}

void soa_watch_close(soa_watch *watch) {
  if (watch == nullptr) return;
  try {
    watch->close();
  } catch (const std::exception &) {  // the counts since the last write are lost
  }
  delete watch;
}

}  // extern "C"
