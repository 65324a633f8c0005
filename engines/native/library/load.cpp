#include "soa_load.h"

#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <forward_list>
#include <sstream>
#include <thread>

#include "common/artifact.h"
#include "checks.h"
#include "common/cpu_level.h"

using soa_library::Json;
using soa_library::Sealed;
using soa_runner::fail;
namespace refusals = soa::refusals;

namespace {

constexpr char kColumns[] = "reports/columns.json";

// The artifact that is opened. The folder and the library in it are relative to the bundle's folder.
struct Choice {
  std::string target, engine, folder, library;
};

// An origin that owns its strings.
struct Origin : soa_origin {
  Origin(const Sealed &bundle, const std::string &model, const std::string &version, const Choice &choice, int32_t run_threads)
      : soa_origin{} {
    name = stored(model);
    ref = stored(version);
    digest = stored(bundle.digest);
    target = stored(choice.target);
    engine = stored(choice.engine);
    folder = stored(bundle.root + "/" + choice.folder);
    arguments = stored(bundle.content(choice.folder + "/arguments.txt"));
    columns = stored(bundle.files.count(kColumns) > 0 ? bundle.content(kColumns) : std::string());
    threads = run_threads;
  }

 private:
  const char *stored(const std::string &text) { return texts_.emplace_front(text).c_str(); }

  std::forward_list<std::string> texts_;  // a list, whose strings stay where they are
};

const char *text_or_empty(const char *text) { return text == nullptr ? "" : text; }

// The version as which this bundle was promoted. If there is no record of that, production fails, and test mode gets "".
std::string promoted_as(const Sealed &bundle, bool test) {
  const char *root = bundle.root.c_str();
  std::string content;
  const bool promoted = bundle.beside("PROMOTED.json", &content);
  if (!promoted && test) return "";
  if (!promoted) {
    fail(refusals::load_not_promoted, "%s: no promotion vouches for this folder: make one with `pipeline pull NAME@production DIR`, "
                           "or load it in test mode",
         root);
  }
  std::string digest, ref;  // of the promotion
  try {
    const Json promotion = soa_library::read_record(content, "PROMOTED.json");
    digest = promotion["digest"].text();
    ref = promotion["ref"].text();
  } catch (const std::exception &error) {
    if (test) return "";
    fail(refusals::bundle, "%s: not the record of a promotion: %s", root, error.what());
  }
  if (digest == bundle.digest) return ref;
  if (test) return "";
  fail(refusals::load_altered, "%s: not the bundle that was promoted as %s: its digest is %.12s, promoted was %.12s", root,
       ref.c_str(), bundle.digest.c_str(), digest.c_str());
}

// Groups of files or folders of keys, see Sealed::require_signature: those of the host, and those of the caller.
std::vector<std::vector<std::string>> keys_asked_for(const soa_loading &loading) {
  std::vector<std::vector<std::string>> groups;
  const char *host = std::getenv("PIPELINE_TRUSTED_KEYS");
  for (const char *paths : {host, loading.trusted_keys}) {
    if (paths == nullptr) continue;
    groups.emplace_back();
    std::istringstream parts(paths);
    for (std::string part; std::getline(parts, part, ':');) {
      if (!part.empty()) groups.back().push_back(part);
    }
  }
  return groups;
}

bool for_cpu(const std::string &target) { return target.compare(0, 4, "cpu/") == 0; }

// The wanted target, or the highest verified level that this CPU can run.
std::string choose_target(const Sealed &bundle, const Json &targets, const soa_loading &loading) {
  const std::string wanted = text_or_empty(loading.target), root = bundle.root;
  if (wanted.empty() && std::strncmp(text_or_empty(loading.device), "cuda", 4) == 0) {
    fail(refusals::load_target, "%s: on a GPU the target is to be named, as cuda/sm_90", root.c_str());
  }
  std::string reasons, best;
  soa::Refusal refusal = wanted.empty() ? refusals::target : refusals::load_target;
  for (const std::string &target : targets.keys) {
    const bool candidate = wanted.empty() ? for_cpu(target) : target == wanted;
    if (!candidate) continue;
    const std::string lacking = for_cpu(target) ? soa_cpu::missing_here(target.substr(4)) : "";
    if (!lacking.empty()) {
      reasons += "; this CPU cannot run " + target + ": it lacks " + lacking;
      if (!wanted.empty()) refusal = refusals::target;
    } else if ((loading.test == 0 || wanted.empty()) && targets[target]["status"].text() != "verified") {
      reasons += "; " + target + " is " + targets[target]["status"].text() + ", not verified";
      refusal = refusals::load_not_verified;
    } else {
      best = std::max(best, target);  // x86-64-v4 after v3
    }
  }
  if (best.empty()) {
    fail(refusal, "%s: no artifact for %s%s", root.c_str(), wanted.empty() ? "the CPU" : wanted.c_str(), reasons.c_str());
  }
  return best;
}

// The folder of an artifact, relative to the bundle's: that of its first file, which is the library.
std::string folder_of(const Json &candidate) {
  const std::string &file = candidate["files"].at(0).text();
  return file.substr(0, file.rfind('/'));
}

// Why C++ cannot run an engine's artifact; `text` is empty if it can.
struct WhyNot {
  std::string text;
  soa::Refusal refusal;
};

WhyNot why_not(const Sealed &bundle, const Json &candidate, bool test) {
  if (candidate.get("files").items.empty()) return {"has no artifact", refusals::load_target};
  if (!test && candidate["status"].text() != "valid") {
    return {"is " + candidate["status"].text(), refusals::load_not_verified};
  }
  if (bundle.files.count(folder_of(candidate) + "/arguments.txt") == 0) return {"is no native library", refusals::load_target};
  const std::string library = bundle.content(candidate["files"].at(0).text());
  if (library.find("aoti_torch_proxy_executor_call_function") != std::string::npos) {
    return {"needs an operation that torch has in Python's process alone", refusals::load_target};
  }
  // torch's library is loaded by the name that the artifact uses. It stays loaded, as it does if the artifact loads it.
  const bool needs_torch = library.find("libtorch_cpu.so") != std::string::npos;
  if (!needs_torch || dlopen("libtorch_cpu.so", RTLD_LAZY) != nullptr) return {"", refusals::run};
  return {"needs libtorch_cpu.so: link it, or name its folder in LD_LIBRARY_PATH", refusals::load_without_torch};
}

// The sum of the logarithms of the benchmark's times, by which engines are compared; infinite without a benchmark.
double benchmark_time(const Json &candidate) {
  const std::vector<Json> &sizes = candidate.get("benchmark").items;
  double sum = sizes.empty() ? INFINITY : 0;
  for (const Json &size : sizes) sum += std::log(size["median_us"].real());
  return sum;
}

// The wanted engine; else the one that was chosen for the target or, if C++ cannot run that, the fastest that it can run.
std::string choose_engine(const Sealed &bundle, const std::string &target, const Json &record, const soa_loading &loading) {
  const std::string wanted = text_or_empty(loading.engine);
  const Json &candidates = record.get("candidates"), &chosen = record.get("chosen");
  std::multimap<double, std::string> order;  // by benchmark_time; the chosen engine is the first
  for (const std::string &engine : candidates.keys) {
    const double time = benchmark_time(candidates[engine]);
    order.emplace(chosen.kind == Json::string && engine == chosen.text() ? -INFINITY : time, engine);
  }
  std::string reasons;
  soa::Refusal refusal = refusals::load_target;  // becomes the refusal of the first engine, which is the chosen one
  for (const auto &[time, engine] : order) {
    if (!wanted.empty() && engine != wanted) continue;
    const WhyNot why = why_not(bundle, candidates[engine], loading.test != 0);
    if (why.text.empty()) return engine;
    if (reasons.empty()) refusal = why.refusal;
    reasons += "; " + engine + " " + why.text;
  }
  fail(refusal, "%s: no artifact%s for %s that C++ can run%s", bundle.root.c_str(),
       wanted.empty() ? "" : (" of " + wanted).c_str(), target.c_str(), reasons.c_str());
}

// A setting of the caller, if it gave one, else of the version's config, else `otherwise`.
int32_t setting(int32_t asked, const Json &session, const char *key, std::int64_t otherwise) {
  const Json *configured = session.kind == Json::null ? nullptr : session.find(key);
  if (asked > 0) return asked;
  const bool known = configured != nullptr && configured->kind == Json::number;
  return static_cast<int32_t>(known ? configured->integer() : otherwise);
}

Choice choose(const Sealed &bundle, const Json &manifest, const soa_loading &loading) {
  Choice choice;
  choice.target = choose_target(bundle, manifest.get("targets"), loading);
  const Json &record = manifest["targets"][choice.target];
  choice.engine = choose_engine(bundle, choice.target, record, loading);
  const Json &candidate = record["candidates"][choice.engine];
  choice.folder = folder_of(candidate);
  choice.library = candidate["files"].at(0).text();
  return choice;
}

using OwnedModel = std::unique_ptr<soa_model, void (*)(soa_model *)>;

// Opens an artifact, and fails if its files have changed after they were hashed.
OwnedModel open_model(const Sealed &bundle, const Choice &choice, const char *device, int32_t instances, int32_t threads) {
  const std::string library = bundle.root + "/" + choice.library, folder = bundle.root + "/" + choice.folder;
  soa_model *opened = nullptr;
  char message[2048] = "";
  const int code = soa_model_open(library.c_str(), device == nullptr ? "cpu" : device, folder.c_str(), instances, threads, &opened,
                                  message, sizeof message);
  if (code != SOA_OK) fail(soa::Refusal{soa_refusal(), code}, "%s", message);
  OwnedModel model(opened, soa_model_close);
  bundle.require_unchanged(choice.folder + "/");
  return model;
}

void load(const std::string &folder, const soa_loading &loading, soa_model **model, soa_origin **origin) {
  const bool test = loading.test != 0;
  const Sealed bundle(folder);
  const Json manifest = soa_library::read_record(bundle.content("manifest.json"), "manifest.json");
  const std::string ref = promoted_as(bundle, test);
  if (loading.digest != nullptr && bundle.digest != loading.digest) {
    fail(refusals::header, "%s: this is bundle %.12s, and %.12s is asked for: take that one, or run `pipeline cxx` again",
         bundle.root.c_str(), bundle.digest.c_str(), loading.digest);
  }
  if (!test) bundle.require_signature(keys_asked_for(loading));
  const Choice choice = choose(bundle, manifest, loading);
  const Json &session = manifest.get("session");
  const int32_t threads = setting(loading.threads, session, "threads", 1);
  const int32_t instances = setting(loading.instances, session, "instances", std::max(1u, std::thread::hardware_concurrency()));
  auto described = std::make_unique<Origin>(bundle, manifest["name"].text(), ref, choice, threads);
  const auto state = soa::detail::described(nullptr, soa_model_close, described->arguments,
                                            std::string(described->folder) + "/arguments.txt", threads);
  OwnedModel opened = open_model(bundle, choice, loading.device, instances, threads);
  if (test) {
    state->model = {opened.get(), [](soa_model *) {}};  // borrowed
    const Json &reference = manifest.get("reference");
    const std::string file = reference.kind == Json::null ? "reference.safetensors" : reference.text();
    soa_library::check_reference(manifest, bundle.content(file), soa::Model(state));
  }
  *model = opened.release();
  *origin = described.release();
}

}  // namespace

extern "C" {

int soa_load(const char *folder, const soa_loading *loading, soa_model **model, soa_origin **origin, char *message,
             size_t size) {
  const auto told = [&](const soa::Refusal &refusal, const std::string &text) {
    return soa_runner::told(refusal, soa_library::plain(text), message, size);
  };
  try {
    if (folder == nullptr || model == nullptr || origin == nullptr) fail(SOA_BAD_ARGUMENT, "a folder is needed");
    load(folder, loading == nullptr ? soa_loading{} : *loading, model, origin);
    return SOA_OK;
  } catch (const soa::Error &error) {
    return told(error.refusal(), error.message());
  } catch (const std::exception &error) {  // the manifest or the reference is not valid
    return told(refusals::bundle, std::string(folder) + ": " + error.what());
  }
}

void soa_origin_delete(soa_origin *origin) { delete static_cast<Origin *>(origin); }

}  // extern "C"
