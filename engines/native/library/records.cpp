// Reads the records of a bundle. Python proves their fields when it seals a bundle and when it verifies one
// (registry/bundle); here a field that is used and is missing, or of another type, is refused where it is read.
#include <algorithm>
#include <sstream>

#include "common/artifact.h"
#include "checks.h"

namespace soa_library {

// -- text ------------------------------------------------------------------------------------------------------------

// True for characters that Unicode classifies as control, format, separator, surrogate or private, for unassigned planes, and
// for invalid UTF-8 (-1). For Python all unassigned characters are not printable; most of these are not in this table.
static bool is_odd(std::int32_t code) {
  static const std::int32_t ranges[][2] = {
      {-1, 0x1f},         {0x7f, 0xa0},       {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},
      {0x70f, 0x70f},     {0x890, 0x891},     {0x8e2, 0x8e2},     {0x1680, 0x1680},   {0x180e, 0x180e},   {0x2000, 0x200f},
      {0x2028, 0x202f},   {0x205f, 0x2064},   {0x2066, 0x206f},   {0x3000, 0x3000},   {0xd800, 0xf8ff},   {0xfeff, 0xfeff},
      {0xfff9, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x13438}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a},
      {0x323b0, 0xe00ff}, {0xe01f0, 0x10ffff}};
  return std::any_of(std::begin(ranges), std::end(ranges),
                     [&](const std::int32_t *range) { return code >= range[0] && code <= range[1]; });
}

std::string plain(const std::string &text) {
  std::string shown;
  for (const char *at = text.data(), *end = at + text.size(); at != end;) {
    const char *begin = at;
    const bool odd = is_odd(next_character(at, end));
    if (at == begin) ++at;  // an invalid byte
    if (odd) {
      shown += '?';
    } else {
      shown.append(begin, at);
    }
  }
  return shown;
}

bool is_safe(const std::string &name) {
  std::istringstream parts(name + "/");
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return name.find('\\') == std::string::npos && plain(name) == name;
}

// -- records ---------------------------------------------------------------------------------------------------------

Json read_record(const std::string &content, const char *where) {
  Json record;
  try {
    if (content.size() > kLargestRecord) throw std::runtime_error("larger than any of ours");
    record = Json::parse(content);
    if (record.kind != Json::object) throw std::runtime_error("not an object");
  } catch (const std::runtime_error &error) {
    throw std::runtime_error(std::string(where) + ": " + error.what());
  }
  const Json *version = record.find("schema_version");
  if (version != nullptr && version->integer() > 1) {
    soa_runner::fail(soa::refusals::bundle_newer, "%s: it has a later format: install a newer soa-pipeline", where);
  }
  return record;
}

}  // namespace soa_library
