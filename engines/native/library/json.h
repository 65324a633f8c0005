// JSON as the files of a bundle hold it: the manifest, a promotion's note, a signature, the header of safetensors.
#ifndef SOA_JSON_H
#define SOA_JSON_H

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace soa_library {

// One value. Asked for what it is not, for a key or a place that is not there, it throws std::runtime_error.
class Json {
 public:
  enum Kind { null, boolean, number, string, array, object };
  Kind kind = null;
  std::vector<Json> items;        // of an array, and of an object
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
    for (std::size_t i = keys.size(); i > 0; --i) {
      if (keys[i - 1] == key) return &items[i - 1];
    }
    return nullptr;
  }
  const Json &operator[](const std::string &key) const {
    if (const Json *found = find(key)) return *found;
    throw std::runtime_error("no \"" + key + "\"");
  }
  const Json &at(std::size_t i) const {
    require(array);
    return items.at(i);
  }
  const std::vector<Json> &list() const { return require(array).items; }
  const std::string &text() const { return require(string).text_; }
  double real() const { return require(number).number_; }
  std::int64_t integer() const {
    if (!(real() >= -9e15 && real() <= 9e15)) throw std::runtime_error("a number is no integer");
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
    if (take(at, end, "true") || take(at, end, "false")) return kind = boolean, true;
    if (take(at, end, "null")) return true;
    const char *digit = at != end && *at == '-' ? at + 1 : at;
    if (digit == end || *digit < '0' || *digit > '9') return false;
    const auto [rest, error] = std::from_chars(at, end, number_);
    return kind = number, at = rest, error == std::errc();
  }

  bool read_items(const char *&at, const char *end, int depth, Kind what, const char *closing) {
    kind = what;
    if (take(at, end, closing)) return true;
    do {
      if (what == object) {
        keys.emplace_back();
        if (!take(at, end, "\"") || !read_text(at, end, keys.back()) || !take(at, end, ":")) return false;
      }
      items.emplace_back();
      if (!items.back().read(at, end, depth + 1)) return false;
    } while (take(at, end, ","));
    return take(at, end, closing);
  }

  // \u0041 is kept as it is written: no name of ours has such.
  static bool read_text(const char *&at, const char *end, std::string &text) {
    const std::string escapes = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    for (; at != end && *at != '"'; ++at) {
      std::size_t which = 0;
      if (*at != '\\') {
        text += *at;
      } else if (++at == end) {
        return false;
      } else if ((which = escapes.find(*at)) != std::string::npos) {
        text += meant[which];
      } else {
        text += {'\\', *at};
      }
    }
    return at != end && *at++ == '"';
  }

  std::string text_;
  double number_ = 0;
};

}  // namespace soa_library

#endif
