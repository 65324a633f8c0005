// A reader for the JSON in a bundle: the manifest, the record of a promotion, a signature, the header of safetensors. It
// accepts the same texts as Python's reader (soa/records.py): of equal keys the last one counts, NaN and Infinity are
// numbers, and values are nested at most 200 deep.
#ifndef SOA_JSON_H
#define SOA_JSON_H

#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace soa_library {

// Reads the code point at `at` and moves `at` behind it. For invalid UTF-8 it returns -1.
inline std::int32_t next_character(const char *&at, const char *end) {
  const auto byte = [&](int i) { return static_cast<unsigned char>(at[i]); };
  if (byte(0) < 0x80) return *at++;
  const int more = byte(0) >= 0xf0 && byte(0) < 0xf5 ? 3 : byte(0) >= 0xe0 ? 2 : byte(0) >= 0xc2 ? 1 : 0;
  if (more == 0 || byte(0) >= 0xf5 || end - at <= more) return -1;
  std::int32_t code = byte(0) & (0x3f >> more);
  for (int i = 1; i <= more; ++i) {
    if (byte(i) >> 6 != 2) return -1;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool too_long = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
  if (too_long || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff) return -1;
  return at += more + 1, code;
}

inline void append_character(std::string &text, std::int32_t code) {
  const auto put = [&](std::int32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3f));
  } else {
    put(0xf0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3f));
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

// One value. Access as a wrong type, or with a key that does not exist, throws std::runtime_error.
class Json {
 public:
  enum Kind { null, boolean, number, string, array, object };
  Kind kind = null;
  bool integral = false;          // true for a number without fraction and exponent
  std::vector<Json> items;        // of an array or an object
  std::vector<std::string> keys;  // of an object

  static Json parse(const std::string &text) {
    Json found;
    const char *at = text.data(), *end = at + text.size();
    if (!found.read(at, end, 0) || (skip(at, end), at != end)) {
      throw std::runtime_error("not JSON at byte " + std::to_string(at - text.data()));
    }
    return found;
  }

  const Json *find(const std::string &key) const {
    require(object);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == key) return &items[i];
    }
    return nullptr;
  }
  const Json &operator[](const std::string &key) const {
    if (const Json *found = find(key)) return *found;
    throw std::runtime_error("no \"" + key + "\"");
  }
  // The value of a key; a null value if there is no such key.
  const Json &get(const std::string &key) const {
    static const Json nothing;
    const Json *found = find(key);
    return found != nullptr ? *found : nothing;
  }
  const Json &at(std::size_t i) const {
    require(array);
    return items.at(i);
  }
  const std::vector<Json> &list() const { return require(array).items; }
  const std::string &text() const { return require(string).text_; }
  bool truth() const { return require(boolean).number_ != 0; }
  double real() const { return require(number).number_; }
  std::int64_t integer() const {
    if (!(real() >= -9e15 && real() <= 9e15) || !integral) throw std::runtime_error("a number is no integer");
    return static_cast<std::int64_t>(number_);
  }

 private:
  const Json &require(Kind wanted) const {
    const char *names[] = {"null", "true or false", "a number", "a text", "a list", "an object"};
    if (kind != wanted) throw std::runtime_error(std::string("found ") + names[kind] + " in place of " + names[wanted]);
    return *this;
  }

  static void skip(const char *&at, const char *end) {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
  }
  static bool take(const char *&at, const char *end, const std::string &wanted) {
    skip(at, end);
    if (static_cast<std::size_t>(end - at) < wanted.size() || wanted.compare(0, wanted.size(), at, wanted.size()) != 0) {
      return false;
    }
    at += wanted.size();
    return true;
  }

  bool read(const char *&at, const char *end, int depth) {
    if (depth > 200) return false;
    if (take(at, end, "{")) return read_items(at, end, depth, object, "}");
    if (take(at, end, "[")) return read_items(at, end, depth, array, "]");
    if (take(at, end, "\"")) return kind = string, read_text(at, end, text_);
    if (take(at, end, "true")) return kind = boolean, number_ = 1, true;
    if (take(at, end, "false")) return kind = boolean, true;
    if (take(at, end, "null")) return true;
    kind = number;
    if (take(at, end, "NaN")) return number_ = NAN, true;
    if (take(at, end, "Infinity")) return number_ = INFINITY, true;
    if (take(at, end, "-Infinity")) return number_ = -INFINITY, true;
    return read_number(at, end);
  }

  bool read_number(const char *&at, const char *end) {
    const char *begin = at;
    const auto digits = [&] {
      const char *first = at;
      while (at != end && *at >= '0' && *at <= '9') ++at;
      return at != first;
    };
    const auto is = [&](char one, char other) { return at != end && (*at == one || *at == other) ? (++at, true) : false; };
    is('-', '-');
    const char *first = at;
    if (!digits() || (*first == '0' && at != first + 1)) return false;
    const bool fraction = is('.', '.');
    if (fraction && !digits()) return false;
    const bool exponent = is('e', 'E'), small = exponent && at != end && *at == '-';
    if (exponent && ((is('+', '-'), false) || !digits())) return false;
    integral = !fraction && !exponent;
    if (std::from_chars(begin, at, number_).ec != std::errc()) {
      number_ = small || (fraction && *first == '0') ? 0 : *begin == '-' ? -INFINITY : INFINITY;
    }
    return true;
  }

  bool read_items(const char *&at, const char *end, int depth, Kind what, const char *closing) {
    kind = what;
    if (take(at, end, closing)) return true;
    std::map<std::string, std::size_t> places;
    do {
      std::string key;
      if (what == object && (!take(at, end, "\"") || !read_text(at, end, key) || !take(at, end, ":"))) return false;
      Json value;
      if (!value.read(at, end, depth + 1)) return false;
      const auto known = what == object ? places.find(key) : places.end();
      if (known != places.end()) {
        items[known->second] = std::move(value);
        continue;
      }
      if (what == object) {
        places[key] = keys.size();
        keys.push_back(std::move(key));
      }
      items.push_back(std::move(value));
    } while (take(at, end, ","));
    return take(at, end, closing);
  }

  static bool read_text(const char *&at, const char *end, std::string &text) {
    while (at != end && *at != '"') {
      if (*at == '\\') {
        if (!read_escape(++at, end, text)) return false;
        continue;
      }
      const char *begin = at;
      const std::int32_t code = next_character(at, end);
      if (code < 0x20) return false;
      text.append(begin, at);
    }
    return at != end && *at++ == '"';
  }

  // Reads an escape sequence, after its backslash.
  static bool read_escape(const char *&at, const char *end, std::string &text) {
    static const std::string escapes = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    if (at == end) return false;
    if (*at != 'u') {
      const std::size_t which = escapes.find(*at++);
      return which != std::string::npos ? text += meant[which], true : false;
    }
    std::int32_t code = read_hex(++at, end);
    if (code >= 0xd800 && code < 0xdc00) {
      if (end - at < 2 || at[0] != '\\' || at[1] != 'u') return false;
      const std::int32_t low = read_hex(at += 2, end);
      if (low < 0xdc00 || low >= 0xe000) return false;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code < 0 || (code >= 0xdc00 && code < 0xe000)) {
      return false;
    }
    return append_character(text, code), true;
  }

  static std::int32_t read_hex(const char *&at, const char *end) {
    std::int32_t code = -1;
    if (end - at < 4 || std::from_chars(at, at + 4, code, 16).ptr != at + 4 || *at == '-') return -1;
    return at += 4, code;
  }

  std::string text_;
  double number_ = 0;
};

}  // namespace soa_library

#endif
