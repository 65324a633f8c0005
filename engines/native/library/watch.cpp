// Counts the values of a share of the calls, for `pipeline drift`, as runtime/watch does in Python.
#include <pthread.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>

#include "checks.h"
#include "common/artifact.h"
#include "common/counting.h"
#include "soa_load.h"

namespace soa_library {

constexpr std::chrono::seconds kApart{10};  // between two writes of the file

// Held while a call is counted. A fork waits for it, so that no child begins with a lock that nobody opens.
static std::mutex counting;
static void lock() { counting.lock(); }
static void unlock() { counting.unlock(); }
[[maybe_unused]] static const int at_fork = pthread_atfork(lock, unlock, unlock);

// A text in UTF-8 as a string of JSON, with its quotes.
static std::string json_text(const std::string &text) {
  std::string quoted = "\"";
  for (const char byte : text) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned char>(byte));
    const bool plain = static_cast<unsigned char>(byte) >= 0x20 && byte != '"' && byte != '\\';
    quoted += plain ? std::string(1, byte) : escape;
  }
  return quoted + '"';
}

// The name of a new file: the label, this host and process, and a random number, so that no two files have one name.
static std::string unique_name(const std::string &label) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::string name = label + "-" + host + "-" + std::to_string(getpid()) + "-";
  for (char &byte : name) {
    if (!std::isalnum(static_cast<unsigned char>(byte)) && byte != '.' && byte != '-') byte = '_';
  }
  char token[16];
  std::snprintf(token, sizeof token, "%08x", std::random_device()());
  return name + token + ".json";
}

// The counts of one model in this process. A child of a fork begins with nothing, in a file of its own.
class Watch {
 public:
  // profile: the edges of each column's bins. ref: the version, such as "jets/3", or "". share: of the calls, from 0 to 1.
  Watch(const Json &profile, std::string name, const std::string &ref, std::string digest, double share)
      : share_(share), name_(std::move(name)), digest_(std::move(digest)) {
    const std::size_t slash = ref.rfind('/');
    if (slash != std::string::npos) version_ = ref.substr(slash + 1);
    const char *folder = std::getenv("PIPELINE_COUNTS");
    folder_ = std::filesystem::absolute(folder == nullptr || *folder == 0 ? "pipeline-counts" : folder);
    const Json &columns = profile["columns"];
    for (const std::string &key : columns.keys) {
      Tally &tally = tallies_[key];
      for (const Json &edge : columns[key]["edges"].items) tally.edges.push_back(edge.real());
      const std::size_t bins = std::max<std::size_t>(tally.edges.size(), 1) - 1;
      tally.counts.resize(soa_runner::kBins + bins);
    }
    begin();
  }

  // True if this call is to be counted.
  bool draws() const {
    thread_local std::mt19937 random{std::random_device()()};
    return std::uniform_real_distribution<>()(random) < share_;
  }

  // Counts a call, and writes the file if the last write is long ago. Throws if it cannot be written.
  void count(const soa_values *values, std::size_t size) {
    const std::lock_guard<std::mutex> held(counting);
    if (process_ != getpid()) begin();
    for (const soa_values *each = values; each != values + size; ++each) {
      const auto known = tallies_.find(each->key);
      if (known == tallies_.end()) continue;
      auto &[edges, counts] = known->second;
      const auto number_of_edges = static_cast<std::int32_t>(edges.size());
      soa_runner::count_between(each->dtype, each->data, each->n, edges.data(), number_of_edges, counts.data());
    }
    ++calls_;
    if (std::chrono::steady_clock::now() - written_ > kApart) write();
  }

  // Writes the last counts. Throws if that is not possible.
  void close() {
    const std::lock_guard<std::mutex> held(counting);
    if (process_ == getpid() && calls_ > 0) write();
  }

 private:
  struct Tally {
    std::vector<double> edges;
    std::vector<std::int64_t> counts;  // as in counting.h
  };

  // Begins with no counts and a new file.
  void begin() {
    process_ = getpid();
    calls_ = 0;
    for (auto &[key, tally] : tallies_) std::fill(tally.counts.begin(), tally.counts.end(), 0);
    file_ = folder_ / unique_name(version_.empty() ? name_ : name_ + "/" + version_);
    written_ = std::chrono::steady_clock::now();
  }

  // Writes the file again. Throws if that is not possible.
  void write() {
    written_ = std::chrono::steady_clock::now();
    std::string columns;
    for (const auto &[key, tally] : tallies_) {
      std::string numbers;
      for (const std::int64_t number : tally.counts) numbers += (numbers.empty() ? "" : ", ") + std::to_string(number);
      columns += (columns.empty() ? "" : ", ") + json_text(key) + ": [" + numbers + "]";
    }
    std::filesystem::create_directories(folder_);
    const std::filesystem::path part = folder_ / ("." + file_.filename().string() + ".part");
    std::ofstream stream(part, std::ios::binary);  // its locale may group digits: numbers go in as texts
    stream.exceptions(std::ios::failbit | std::ios::badbit);
    stream << "{\"schema_version\": 1, \"model\": " << json_text(name_)
           << ", \"version\": " << (version_.empty() ? "null" : json_text(version_)) << ", \"digest\": " << json_text(digest_)
           << ", \"calls\": " << std::to_string(calls_) << ", \"columns\": {" << columns << "}}\n";
    stream.close();
    std::filesystem::rename(part, file_);
  }

  double share_;
  std::string name_, version_, digest_;
  std::filesystem::path folder_, file_;
  std::map<std::string, Tally> tallies_;
  pid_t process_ = 0;
  std::int64_t calls_ = 0;
  std::chrono::steady_clock::time_point written_;
};

// The share of the calls that PIPELINE_WATCH asks to count; 0 if it is not set.
static double share_to_watch() {
  const char *text = std::getenv("PIPELINE_WATCH");
  if (text == nullptr || *text == 0) return 0;
  double share = -1;  // it stays so if the text is no number, or one that no double can hold
  const char *end = text + std::strlen(text);
  if (std::from_chars(text, end, share).ptr != end || !(share >= 0 && share <= 1)) {
    soa_runner::fail(soa::refusals::load, "PIPELINE_WATCH=%s: give the share of calls to count, from 0 to 1", text);
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

int soa_watch_draws(const soa_watch *watch) {
  try {
    return watch->draws();
  } catch (const std::exception &) {  // this host gives no random number
    return 0;
  }
}

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
