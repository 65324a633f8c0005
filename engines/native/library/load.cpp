#include "soa_load.h"

#include <dlfcn.h>

#include <cmath>
#include <cstring>
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

// An origin that owns its strings.
struct Origin : soa_origin {
  std::string texts[8];

  Origin(const std::string &name, const std::string &ref, const Sealed &bundle, const std::string &target,
         const std::string &engine, const std::string &folder, int32_t share)
      : soa_origin{}, texts{name, ref, bundle.digest, target, engine, bundle.root + "/" + folder, "", ""} {
    texts[6] = bundle.content(folder + "/arguments.txt");
    if (bundle.files.count(kColumns) > 0) texts[7] = bundle.content(kColumns);
    const char **fields[] = {&this->name, &this->ref, &digest, &this->target, &this->engine, &this->folder, &arguments, &columns};
    for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = texts[i].c_str();
    threads = share;
  }
};

const char *given(const char *text) { return text == nullptr ? "" : text; }

// The version as which this bundle was promoted. If there is no record of that, production fails, and test mode gets "".
std::string promoted_as(const Sealed &bundle, bool test) {
  const char *root = bundle.root.c_str();
  std::string content;
  const bool there = bundle.beside("PROMOTED.json", &content);
  if (!there && test) return "";
  if (!there) {
    fail(refusals::load_not_promoted, "%s: no promotion vouches for this folder: make one with `pipeline pull NAME@production DIR`, "
                           "or load it in test mode",
         root);
  }
  std::string digest, ref;
  try {
    const Json note = soa_library::read_record(content, "PROMOTED.json");
    digest = note["digest"].text();
    ref = note["ref"].text();
  } catch (const std::exception &error) {
    if (test) return "";
    fail(refusals::bundle, "%s: not the record of a promotion: %s", root, error.what());
  }
  if (digest == bundle.digest) return ref;
  if (test) return "";
  fail(refusals::load_altered, "%s: not the bundle that was promoted as %s: its digest is %.12s, promoted was %.12s", root,
       ref.c_str(), bundle.digest.c_str(), digest.c_str());
}

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

// The wanted target, or the highest verified level that this CPU can run.
std::string choose_target(const Sealed &bundle, const Json &targets, const soa_loading &loading) {
  const std::string wanted = given(loading.target), root = bundle.root;
  if (wanted.empty() && std::strncmp(given(loading.device), "cuda", 4) == 0) {
    fail(refusals::load_target, "%s: on a GPU the target is to be named, as cuda/sm_90", root.c_str());
  }
  std::string lacking, best;
  soa::Refusal refusal = wanted.empty() ? refusals::target : refusals::load_target;
  for (const std::string &target : targets.keys) {
    if (!wanted.empty() ? target != wanted : target.compare(0, 4, "cpu/") != 0) continue;
    const bool for_cpu = target.compare(0, 4, "cpu/") == 0;
    const std::string lacks = for_cpu ? soa_cpu::missing_here(target.substr(4)) : "";
    if (!lacks.empty()) {
      lacking += "; this CPU cannot run " + target + ": it lacks " + lacks;
      if (!wanted.empty()) refusal = refusals::target;
    } else if ((loading.test == 0 || wanted.empty()) && targets[target]["status"].text() != "verified") {
      lacking += "; " + target + " is " + targets[target]["status"].text() + ", not verified";
      refusal = refusals::load_not_verified;
    } else {
      best = std::max(best, target);  // x86-64-v4 after v3
    }
  }
  if (best.empty()) {
    fail(refusal, "%s: no artifact for %s%s", root.c_str(), wanted.empty() ? "the CPU" : wanted.c_str(), lacking.c_str());
  }
  return best;
}

std::string folder_of(const Json &candidate) {
  const std::string &file = candidate["files"].at(0).text();
  return file.substr(0, file.rfind('/'));
}

// Why C++ cannot run an engine's artifact; empty if it can.
struct WhyNot {
  std::string said;
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
  const bool torch = library.find("libtorch_cpu.so") == std::string::npos || dlopen("libtorch_cpu.so", RTLD_LAZY) != nullptr;
  return {torch ? "" : "needs libtorch_cpu.so: link it, or name its folder in LD_LIBRARY_PATH", refusals::load_without_torch};
}

// The wanted engine; else the one that was chosen for the target or, if C++ cannot run that, the fastest that it can run.
std::string choose_engine(const Sealed &bundle, const std::string &target, const Json &record, const soa_loading &loading) {
  const std::string wanted = given(loading.engine);
  const Json &candidates = record.get("candidates"), &chosen = record.get("chosen");
  std::multimap<double, std::string> order;  // by the sum of the logarithms of the benchmark's times
  for (const std::string &engine : candidates.keys) {
    const std::vector<Json> &sizes = candidates[engine].get("benchmark").items;
    double taken = sizes.empty() ? INFINITY : 0;
    for (const Json &size : sizes) taken += std::log(size["median_us"].real());
    order.emplace(chosen.kind == Json::string && engine == chosen.text() ? -INFINITY : taken, engine);
  }
  std::string reasons;
  soa::Refusal refusal = refusals::load_target;  // becomes the refusal of the first engine, which is the chosen one
  for (const auto &[taken, engine] : order) {
    if (!wanted.empty() && engine != wanted) continue;
    const WhyNot why = why_not(bundle, candidates[engine], loading.test != 0);
    if (why.said.empty()) return engine;
    if (reasons.empty()) refusal = why.refusal;
    reasons += "; " + engine + " " + why.said;
  }
  fail(refusal, "%s: no artifact%s for %s that C++ can run%s", bundle.root.c_str(),
       wanted.empty() ? "" : (" of " + wanted).c_str(), target.c_str(), reasons.c_str());
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
  const std::string target = choose_target(bundle, manifest.get("targets"), loading);
  const Json &record = manifest["targets"][target];
  const std::string engine = choose_engine(bundle, target, record, loading);
  const Json &candidate = record["candidates"][engine], &session = manifest.get("session");
  const auto setting = [&](int32_t asked, const char *key, std::int64_t otherwise) {
    const Json *said = session.kind == Json::null ? nullptr : session.find(key);
    const bool known = said != nullptr && said->kind == Json::number;
    return asked > 0 ? asked : static_cast<int32_t>(known ? said->integer() : otherwise);
  };
  const int32_t threads = setting(loading.threads, "threads", 1);
  const int32_t instances = setting(loading.instances, "instances", std::max(1u, std::thread::hardware_concurrency()));
  const std::string place = folder_of(candidate);
  auto found = std::make_unique<Origin>(manifest["name"].text(), ref, bundle, target, engine, place, threads);
  const auto state = soa::detail::described(nullptr, soa_model_close, found->arguments, std::string(found->folder) + "/arguments.txt", threads);
  const char *device = loading.device == nullptr ? "cpu" : loading.device;
  const std::string library = bundle.root + "/" + candidate["files"].at(0).text();
  soa_model *opened = nullptr;
  char message[2048] = "";
  const int code = soa_model_open(library.c_str(), device, found->folder, instances, threads, &opened, message, sizeof message);
  if (code != SOA_OK) fail(soa::Refusal{soa_refusal(), code}, "%s", message);
  std::unique_ptr<soa_model, void (*)(soa_model *)> closed(opened, soa_model_close);
  bundle.require_unchanged(place + "/");
  if (test) {
    const auto borrowed = [](soa_model *) {};
    state->model = {opened, borrowed};
    const Json &reference = manifest.get("reference");
    const std::string file = reference.kind == Json::null ? "reference.safetensors" : reference.text();
    soa_library::check_reference(manifest, bundle.content(file), soa::Model(state));
  }
  *model = closed.release();
  *origin = found.release();
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
