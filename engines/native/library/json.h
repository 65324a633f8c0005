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

// Reads the code point at `at`, which is not `end`, and moves `at` behind it. For invalid UTF-8 it returns -1.
inline std::int32_t next_character(const char *&at, const char *end) {
  const auto byte = [&](int i) { return static_cast<unsigned char>(at[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return *at++;
  // A continuation, the first byte of too long a form of ASCII, or beyond Unicode.
  if (first < 0xc2 || first > 0xf4) return -1;
  const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
  if (end - at <= more) return -1;
  std::int32_t code = first & (0x3f >> more);
  for (int i = 1; i <= more; ++i) {
    if (byte(i) >> 6 != 2) return -1;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool too_long = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (too_long || surrogate || code > 0x10ffff) return -1;
  at += more + 1;
  return code;
}

// Appends a code point in UTF-8: six bits in each byte but the first.
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
    Json value;
    const char *at = text.data(), *end = at + text.size();
    const bool good = value.read(at, end, 0);
    if (good) skip(at, end);
    if (!good || at != end) throw std::runtime_error("not JSON at byte " + std::to_string(at - text.data()));
    return value;
  }

  // The value of a key; null if there is no such key.
  const Json *find(const std::string &key) const {
    require(object);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == key) return &items[i];
    }
    return nullptr;
  }
  const Json &operator[](const std::string &key) const {
    if (const Json *value = find(key)) return *value;
    throw std::runtime_error("no \"" + key + "\"");
  }
  // The value of a key; a null value if there is no such key.
  const Json &get(const std::string &key) const {
    static const Json nothing;
    const Json *value = find(key);
    return value != nullptr ? *value : nothing;
  }
  const Json &at(std::size_t i) const {
    require(array);
    return items.at(i);
  }
  const std::vector<Json> &list() const { return require(array).items; }
  const std::string &text() const { return require(string).text_; }
  bool truth() const { return require(boolean).number_ != 0; }
  double real() const { return require(number).number_; }
  // Doubles hold all integers up to 2^53, which is more than 9e15. The comparison is false for NaN.
  std::int64_t integer() const {
    if (!(real() >= -9e15 && real() <= 9e15) || !integral) throw std::runtime_error("a number is no integer");
    return static_cast<std::int64_t>(number_);
  }

 private:
  static constexpr int kDeepest = 200;

  const Json &require(Kind wanted) const {
    const char *names[] = {"null", "true or false", "a number", "a text", "a list", "an object"};
    if (kind != wanted) throw std::runtime_error(std::string("found ") + names[kind] + " in place of " + names[wanted]);
    return *this;
  }

  // Moves `at` behind white space.
  static void skip(const char *&at, const char *end) {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
  }
  // Moves `at` behind white space and, if it comes next, behind the wanted text; else returns false.
  static bool take(const char *&at, const char *end, const std::string &wanted) {
    skip(at, end);
    if (static_cast<std::size_t>(end - at) < wanted.size() || wanted.compare(0, wanted.size(), at, wanted.size()) != 0) {
      return false;
    }
    at += wanted.size();
    return true;
  }

  // Each of these reads a part of the text from `at` on and moves `at` behind it. They return false if it is not valid.
  bool read(const char *&at, const char *end, int depth) {
    struct Word {
      const char *text;
      Kind kind;
      double value;
    };
    static const Word words[] = {{"null", null, 0},       {"true", boolean, 1},         {"false", boolean, 0},
                                 {"NaN", number, NAN}, {"Infinity", number, INFINITY}, {"-Infinity", number, -INFINITY}};
    if (depth > kDeepest) return false;
    if (take(at, end, "{")) return read_object(at, end, depth);
    if (take(at, end, "[")) return read_array(at, end, depth);
    if (take(at, end, "\"")) {
      kind = string;
      return read_text(at, end, text_);
    }
    for (const Word &word : words) {
      if (!take(at, end, word.text)) continue;
      kind = word.kind;
      number_ = word.value;
      return true;
    }
    kind = number;
    return read_number(at, end);
  }

  bool read_number(const char *&at, const char *end) {
    const char *begin = at;
    const auto digits = [&] {
      const char *first = at;
      while (at != end && *at >= '0' && *at <= '9') ++at;
      return at != first;
    };
    const auto one_of = [&](char a, char b) {
      if (at == end || (*at != a && *at != b)) return false;
      ++at;
      return true;
    };
    one_of('-', '-');
    const char *first = at;
    if (!digits() || (*first == '0' && at != first + 1)) return false;
    const bool fraction = one_of('.', '.');
    if (fraction && !digits()) return false;
    const bool exponent = one_of('e', 'E'), negative_exponent = exponent && at != end && *at == '-';
    if (exponent) {
      one_of('+', '-');
      if (!digits()) return false;
    }
    integral = !fraction && !exponent;
    if (std::from_chars(begin, at, number_).ec != std::errc()) {  // beyond the range of double
      const bool tiny = negative_exponent || (fraction && *first == '0');
      number_ = tiny ? 0 : *begin == '-' ? -INFINITY : INFINITY;
    }
    return true;
  }

  bool read_array(const char *&at, const char *end, int depth) {
    kind = array;
    if (take(at, end, "]")) return true;
    do {
      Json value;
      if (!value.read(at, end, depth + 1)) return false;
      items.push_back(std::move(value));
    } while (take(at, end, ","));
    return take(at, end, "]");
  }

  bool read_object(const char *&at, const char *end, int depth) {
    kind = object;
    if (take(at, end, "}")) return true;
    std::map<std::string, std::size_t> places;
    do {
      std::string key;
      Json value;
      if (!take(at, end, "\"") || !read_text(at, end, key) || !take(at, end, ":")) return false;
      if (!value.read(at, end, depth + 1)) return false;
      const auto [place, is_new] = places.emplace(key, keys.size());
      if (is_new) {
        keys.push_back(std::move(key));
        items.push_back(std::move(value));
      } else {
        items[place->second] = std::move(value);
      }
    } while (take(at, end, ","));
    return take(at, end, "}");
  }

  // Reads a string, after its opening quote.
  static bool read_text(const char *&at, const char *end, std::string &text) {
    while (at != end && *at != '"') {
      if (*at == '\\') {
        ++at;
        if (!read_escape(at, end, text)) return false;
        continue;
      }
      const char *begin = at;
      const std::int32_t code = next_character(at, end);
      if (code < 0x20) return false;  // a control character, or invalid
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
      if (which == std::string::npos) return false;
      text += meant[which];
      return true;
    }
    ++at;
    std::int32_t code = read_hex(at, end);
    if (code >= 0xd800 && code < 0xdc00) {  // the first half of a surrogate pair
      if (end - at < 2 || at[0] != '\\' || at[1] != 'u') return false;
      at += 2;
      const std::int32_t low = read_hex(at, end);
      if (low < 0xdc00 || low >= 0xe000) return false;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code < 0 || (code >= 0xdc00 && code < 0xe000)) {
      return false;
    }
    append_character(text, code);
    return true;
  }

  // Four hexadecimal digits as a number; -1 if they are none.
  static std::int32_t read_hex(const char *&at, const char *end) {
    std::int32_t code = -1;
    if (end - at < 4 || std::from_chars(at, at + 4, code, 16).ptr != at + 4 || *at == '-') return -1;
    at += 4;
    return code;
  }

  std::string text_;
  double number_ = 0;  // a number, or 1 for true
};

}  // namespace soa_library

#endif
