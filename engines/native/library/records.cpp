// Reads the records of a bundle. Python proves their fields when it seals a bundle and when it verifies one
// (registry/bundle); here a field that is used and is missing, or of another type, is refused where it is read.
#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "common/artifact.h"
#include "checks.h"
#include "soa_load.h"

namespace fs = std::filesystem;
using soa_runner::fail;
namespace refusals = soa::refusals;

namespace soa_library {

namespace {

Json read_record(const std::string &content, const char *where) {
  const auto refuse = [&](const std::string &why) { throw std::runtime_error(std::string(where) + ": " + why); };
  if (content.size() > kLargestRecord) refuse("larger than any of ours");
  Json found;
  try {
    found = Json::parse(content);
  } catch (const std::runtime_error &error) {
    refuse(error.what());
  }
  if (found.kind != Json::object) refuse("not an object");
  const Json *version = found.find("schema_version");
  if (version != nullptr && version->integer() > 1) {
    fail(refusals::bundle_newer, "%s: it has a later format: install a newer soa-pipeline", where);
  }
  return found;
}

// All files that the candidates of a target name.
std::vector<std::string> files_of(const Json &record) {
  std::vector<std::string> found;
  for (const Json &candidate : record.get("candidates").items) {
    for (const Json &file : candidate.get("files").items) found.push_back(file.text());
  }
  return found;
}

std::string text_or(const Json &found, const std::string &otherwise) { return found.kind == Json::null ? otherwise : found.text(); }

void check_annex(const Sealed &bundle, const Json &manifest, const std::string &target, const std::string *digest) {
  const std::string prefix = "annexes/" + target + "/", place = bundle.root + "/annexes/" + target;
  const Sealed annex(place, "annex.json");
  if (digest != nullptr && annex.digest != *digest) fail(refusals::bundle_altered, "%s: another annex than the promoted one", place.c_str());
  const Json read = read_annex(annex.content("annex.json")), &record = read["record"];
  for (const std::string &name : files_of(record)) {
    const bool own = name.compare(0, prefix.size(), prefix) == 0 && annex.files.count(name.substr(prefix.size())) > 0;
    const bool portable = name == text_or(manifest.get("program"), "program.pt2") || name == text_or(manifest.get("torchscript"), "");
    if (!own && !portable) fail(refusals::bundle, "%s: annex.json names %s, which is not there", place.c_str(), name.c_str());
  }
  const Json &targets = manifest.get("targets");
  const Json *there = targets.kind == Json::null ? nullptr : targets.find(target);
  const bool known = there != nullptr && (*there)["status"].text() == "verified";
  const bool fits = read["base"].text() == bundle.digest && read["name"].text() == manifest["name"].text() &&
                    read["target"].text() == target;
  if (!fits || known) fail(refusals::bundle, "%s: not an annex of this bundle", place.c_str());
}

}  // namespace

// -- text ------------------------------------------------------------------------------------------------------------

// True for characters that Unicode classifies as control, format, separator, surrogate or private, for unassigned planes, and
// for invalid UTF-8 (-1). For Python all unassigned characters are not printable; most of these are not in this table.
static bool is_odd(std::int32_t code) {
  static const std::int32_t odd[][2] = {
      {-1, 0x1f},         {0x7f, 0xa0},       {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},
      {0x70f, 0x70f},     {0x890, 0x891},     {0x8e2, 0x8e2},     {0x1680, 0x1680},   {0x180e, 0x180e},   {0x2000, 0x200f},
      {0x2028, 0x202f},   {0x205f, 0x2064},   {0x2066, 0x206f},   {0x3000, 0x3000},   {0xd800, 0xf8ff},   {0xfeff, 0xfeff},
      {0xfff9, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x13438}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a},
      {0x323b0, 0xe00ff}, {0xe01f0, 0x10ffff}};
  return std::any_of(std::begin(odd), std::end(odd), [&](const std::int32_t *range) { return code >= range[0] && code <= range[1]; });
}

bool is_printable(const std::string &text) { return plain(text) == text; }

std::string plain(const std::string &text) {
  std::string shown;
  for (const char *at = text.data(), *end = at + text.size(); at != end;) {
    const char *begin = at;
    const bool odd = is_odd(next_character(at, end));
    if (at == begin) ++at;
    odd ? shown += '?' : shown.append(begin, at);
  }
  return shown;
}

bool is_safe(const std::string &name) {
  std::istringstream parts(name + "/");
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return name.find('\\') == std::string::npos && is_printable(name);
}

// -- records ---------------------------------------------------------------------------------------------------------

Json read_manifest(const std::string &content) { return read_record(content, "manifest.json"); }

Json read_annex(const std::string &content) {
  const Json found = read_record(content, "annex.json");
  if (found["record"]["status"].text() != "verified") throw std::runtime_error("annex.json: not of a verified target");
  return found;
}

Json read_note(const std::string &content) {
  const Json found = read_record(content, "PROMOTED.json");
  found["digest"].text();
  found["ref"].text();
  return found;
}

std::string reference_of(const Json &manifest) { return text_or(manifest.get("reference"), "reference.safetensors"); }

void check_annexes(const Sealed &bundle, const Json &manifest, const Json *only) {
  const fs::path root = bundle.root + "/annexes";
  std::set<std::string> found;
  if (fs::exists(root) && !fs::is_directory(root)) fail(refusals::bundle, "%s: not a folder", root.c_str());
  for (const auto &device : fs::exists(root) ? fs::directory_iterator(root) : fs::directory_iterator()) {
    if (!device.is_directory()) fail(refusals::bundle, "%s: not an annex", device.path().c_str());
    for (const auto &place : fs::directory_iterator(device)) {
      if (!place.is_directory()) fail(refusals::bundle, "%s: not an annex", place.path().c_str());
      found.insert(place.path().lexically_relative(root).generic_string());
    }
  }
  if (only == nullptr) {
    for (const std::string &target : found) check_annex(bundle, manifest, target, nullptr);
    return;
  }
  for (const std::string &target : only->keys) {
    if (found.count(target) == 0) fail(refusals::bundle_altered, "%s: annexes/%s is missing", bundle.root.c_str(), target.c_str());
    check_annex(bundle, manifest, target, &(*only)[target].text());
  }
}

}  // namespace soa_library
