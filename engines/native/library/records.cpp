// Reads the records of a bundle, and refuses what Python's reader (registry/bundle) refuses. Their fields are described in
// schemas.h, which is generated from Python's classes; this file has the rules that a schema cannot express.
#include <regex.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include "artifact.h"
#include "checks.h"
#include "schemas.h"
#include "soa_load.h"

namespace fs = std::filesystem;
using soa_runner::fail;
namespace refusals = soa::refusals;

namespace soa_library {

namespace {

// The part of JSON Schema that schemas.h needs.
class Schemas {
 public:
  // The first mistake in a record of this kind, and its place; "" if there is none.
  std::string mistake(const Json &value, const std::string &kind) const { return mistake(value, kinds_[kind], "(top level)"); }

 private:
  std::string mistake(const Json &value, const Json &schema, const std::string &where) const {
    if (const Json *ref = schema.find("$ref")) {
      return mistake(value, kinds_[ref->text().substr(std::strlen("#/$defs/"))], where);
    }
    if (const Json *any = schema.find("anyOf")) {
      std::string last;
      for (const Json &each : any->list()) {
        last = mistake(value, each, where);
        if (last.empty()) return "";
      }
      return last;
    }
    if (const Json *type = schema.find("type"); type != nullptr && !is(value, type->text())) return where + ": not of type " + type->text();
    if (value.kind == Json::string) return mistake_in_text(value.text(), schema, where);
    if (value.kind == Json::number) return mistake_in_number(value.real(), schema, where);
    if (value.kind == Json::object) return mistake_in_object(value, schema, where);
    if (value.kind != Json::array) return "";
    for (const Json &item : value.list()) {
      if (const std::string found = mistake(item, schema["items"], where + "[]"); !found.empty()) return found;
    }
    return "";
  }

  static bool is(const Json &value, const std::string &type) {
    const std::map<std::string, Json::Kind> kinds = {{"null", Json::null},     {"boolean", Json::boolean}, {"integer", Json::number},
                                                     {"number", Json::number}, {"string", Json::string},   {"array", Json::array},
                                                     {"object", Json::object}};
    return value.kind == kinds.at(type) && (type != "integer" || value.integral);
  }

  static bool matches(const std::string &text, const std::string &pattern) {
    regex_t compiled;
    const bool known = ::regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB) == 0;
    if (!known) throw std::runtime_error("schemas.h has a pattern that is none: " + pattern);
    const std::unique_ptr<regex_t, void (*)(regex_t *)> freed(&compiled, ::regfree);
    return text.find('\0') == std::string::npos && ::regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
  }

  static std::string mistake_in_text(const std::string &text, const Json &schema, const std::string &where) {
    const Json *only = schema.find("const"), *among = schema.find("enum"), *pattern = schema.find("pattern"),
               *format = schema.find("format");
    const auto is_it = [&](const Json &each) { return each.text() == text; };
    const bool good = (only == nullptr || is_it(*only)) && (pattern == nullptr || matches(text, pattern->text())) &&
                      (among == nullptr || std::any_of(among->list().begin(), among->list().end(), is_it)) &&
                      (format == nullptr || format->text() != "path-inside" || is_safe(text));
    return good ? "" : where + ": unexpected '" + text.substr(0, 100) + "'";
  }

  static std::string mistake_in_number(double value, const Json &schema, const std::string &where) {
    const Json *least = schema.find("minimum"), *most = schema.find("maximum");
    const bool good = (least == nullptr || value >= least->real()) && (most == nullptr || value <= most->real());
    return good ? "" : where + ": " + std::to_string(value) + " is out of range";
  }

  std::string mistake_in_object(const Json &value, const Json &schema, const std::string &where) const {
    if (const Json *required = schema.find("required")) {
      for (const Json &key : required->list()) {
        if (value.find(key.text()) == nullptr) return where + "." + key.text() + ": missing";
      }
    }
    for (std::size_t i = 0; i < value.keys.size(); ++i) {
      const std::string inner = where + "." + value.keys[i].substr(0, 100);
      const Json *of_it = schema_of(value.keys[i], schema);
      if (of_it == nullptr || (of_it->kind == Json::boolean && !of_it->truth())) return inner + ": unknown";
      if (of_it->kind == Json::boolean) continue;
      if (const std::string found = mistake(value.items[i], *of_it, inner); !found.empty()) return found;
    }
    return "";
  }

  // The schema of the value with this key. `true` allows any value, `false` or null allows none.
  static const Json *schema_of(const std::string &key, const Json &schema) {
    const Json *properties = schema.find("properties");
    if (const Json *own = properties != nullptr ? properties->find(key) : nullptr) return own;
    const Json *patterns = schema.find("patternProperties");
    for (std::size_t i = 0; patterns != nullptr && i < patterns->keys.size(); ++i) {
      if (matches(key, patterns->keys[i])) return &patterns->items[i];
    }
    return schema.find("additionalProperties");
  }

  const Json kinds_ = Json::parse(kSchemas)["$defs"];
};

Json read_record(const std::string &content, const char *kind, const std::string &where) {
  const auto refuse = [&](const std::string &why) { throw std::runtime_error(where + ": " + why); };
  if (content.size() > kLargestRecord) refuse("larger than any of ours");
  Json found;
  try {
    found = Json::parse(content);
  } catch (const std::runtime_error &error) {
    refuse(error.what());
  }
  const Json *version = found.kind == Json::object ? found.find("schema_version") : nullptr;
  if (version != nullptr && version->kind == Json::number && version->integral && version->real() > 1) {
    fail(refusals::bundle_newer, "%s: it has a later format: install a newer soa-pipeline", where.c_str());
  }
  if (const std::string mistake = Schemas().mistake(found, kind); !mistake.empty()) refuse(mistake);
  return found;
}

// Checks the engines that a TargetRecord names.
void require_chosen(const Json &record, const std::string &where) {
  const auto require = [&](bool good, const std::string &why) {
    if (!good) throw std::runtime_error(where + ": " + why);
  };
  const bool verified = record["status"].text() == "verified";
  const Json &chosen = record.get("chosen"), &candidates = record.get("candidates");
  require(chosen.kind != Json::null || !verified, "a verified target names the chosen engine");
  if (chosen.kind == Json::null) return;
  std::vector<std::string> engines = {chosen.text()};
  double last = 0;
  for (const Json &below : record.get("below").items) {
    engines.push_back(below["engine"].text());
    require(below["rows"].real() > last, "the row counts under 'below' do not ascend");
    last = below["rows"].real();
  }
  for (const std::string &engine : engines) {
    const Json *candidate = candidates.kind == Json::null ? nullptr : candidates.find(engine);
    require(candidate != nullptr, "engine '" + engine + "' is not among the candidates");
    require(!candidate->get("files").items.empty(), "engine '" + engine + "' has no files");
    require(!verified || (*candidate)["status"].text() == "valid", "engine '" + engine + "' is not valid");
  }
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

bool is_identifier(const std::string &text) {
  const auto letter = [](unsigned char c) { return c >= 0x80 || c == '_' || std::isalpha(c) != 0; };
  const auto inside = [&](unsigned char c) { return letter(c) || std::isdigit(c) != 0; };
  return !text.empty() && letter(static_cast<unsigned char>(text[0])) && std::all_of(text.begin(), text.end(), inside) &&
         is_printable(text);
}

// -- records ---------------------------------------------------------------------------------------------------------

Json read_manifest(const std::string &content) {
  const Json found = read_record(content, "Manifest", "manifest.json");
  const Json &targets = found.get("targets");
  for (std::size_t i = 0; i < targets.keys.size(); ++i) require_chosen(targets.items[i], "manifest.json, " + targets.keys[i]);
  return found;
}

Json read_annex(const std::string &content) {
  const Json found = read_record(content, "AnnexRecord", "annex.json");
  require_chosen(found["record"], "annex.json");
  if (found["record"]["status"].text() != "verified") throw std::runtime_error("annex.json: not of a verified target");
  return found;
}

Json read_note(const std::string &content) { return read_record(content, "PulledNote", "PROMOTED.json"); }

std::string reference_of(const Json &manifest) { return text_or(manifest.get("reference"), "reference.safetensors"); }

void require_files(const Sealed &bundle, const Json &manifest) {
  std::vector<std::string> named = {text_or(manifest.get("program"), "program.pt2"), reference_of(manifest)};
  if (const Json &script = manifest.get("torchscript"); script.kind != Json::null) named.push_back(script.text());
  if (const Json &labelled = manifest.get("labelled"); labelled.kind != Json::null) {
    named.push_back(labelled["file"].text());
    for (const Json &code : labelled.get("code").items) named.push_back(code.text());
  }
  for (const Json &record : manifest.get("targets").items) {
    for (const std::string &name : files_of(record)) named.push_back(name);
  }
  for (const std::string &name : named) {
    if (bundle.files.count(name) > 0) continue;
    fail(refusals::bundle, "%s: manifest.json names %s, which is not there", bundle.root.c_str(), name.c_str());
  }
}

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
