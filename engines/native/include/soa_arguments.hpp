// soa_arguments: reads arguments.txt, which describes the arguments of an artifact (soa/signature_lines.py has the format), and
// turns errors of the C interface into exceptions.
#ifndef SOA_ARGUMENTS_HPP
#define SOA_ARGUMENTS_HPP

#include <algorithm>
#include <cstdint>
#include <istream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "soa_layout.hpp"
#include "soa_load.h"

namespace soa {

// The bundle, target and engine of a loaded model.
struct Origin {
  std::string name, ref, digest, target, engine;
};

namespace detail {

// One argument of the artifact: a carrier of a number of rows, a matrix of columns, a column, or a scalar.
struct Argument {
  std::string kind, rows, dtype, collection, column, role;
  std::size_t component = 0, count = 1;
};

// The numbers of rows that a row dimension may have.
struct Rows {
  std::int64_t min = 0, max = 0;
};

// What counts calls, and the functions of soa_load.h for it: a program that loads no bundle does not link them.
struct Watch {
  soa_watch *watch;
  int (*draws)(const soa_watch *);
  void (*count)(soa_watch *, const soa_values *, std::size_t);
  void (*close)(soa_watch *);
  ~Watch() { close(watch); }
};

// An opened model and its description.
struct State {
  std::map<std::string, Layout> layouts;
  std::set<std::string> written;  // the names of the collections with outputs
  std::map<std::string, Rows> rows;
  std::vector<Argument> arguments;
  std::int64_t tile = 0;  // rows of a tile; 0: no tiles
  std::string kinds;
  int threads = 1;  // the number of threads that share the tiles
  bool any_first = false;  // true if windows may begin at any row
  std::unique_ptr<soa_model, void (*)(soa_model *)> model{nullptr, soa_model_close};
  Origin origin;
  std::unique_ptr<Watch> watch;  // null if no call is counted
};

// Throws an error of the C interface, of the class for its kind.
[[noreturn]] inline void refuse(const Refusal &refusal, const std::string &text) {
  switch (refusal.returned) {
    case SOA_BAD_BUNDLE: throw BundleError(text, refusal);
    case SOA_NOT_PROMOTED: throw PromotionError(text, refusal);
    case SOA_NOT_SIGNED: throw TrustError(text, refusal);
    case SOA_WRONG_HOST: throw HostError(text, refusal);
    case SOA_WRONG_VERSION: throw HeaderError(text, refusal);
    case SOA_DEVIATES: throw DeviationError(text, refusal);
    default: break;
  }
  const bool lacks_torch = refusal.returned == SOA_OPEN_FAILED && text.find("libtorch") != std::string::npos;
  if (!lacks_torch) throw Error(text, refusal);
  throw Error(text + ": link libtorch_cpu, or name its folder in LD_LIBRARY_PATH", refusals::load_without_torch);
}

// Calls a function of the C interface, `call(message, size)`, and throws its error as an exception.
template <typename Call>
void check(const Call &call) {
  char message[2048];
  message[0] = 0;
  if (const int code = call(message, sizeof message); code != SOA_OK) refuse({soa_refusal(), code}, message);
}

// The keys of a map, for errors.
template <typename Map>
std::string listed(const Map &map) {
  std::string names;
  for (const auto &each : map) names += (names.empty() ? "'" : ", '") + each.first + "'";
  return names.empty() ? "none" : names;
}

// The layout of a collection; throws Error if the model has none of this name.
inline const Layout &layout_of(const State &state, const std::string &collection) {
  const auto found = state.layouts.find(collection);
  if (found == state.layouts.end()) throw Error("no collection '" + collection + "'", refusals::bind);
  return found->second;
}

// True if an argument fits its kind, and its columns and rows exist.
inline bool makes_sense(const Argument &argument, const State &state) {
  if (argument.kind == "carrier") return state.rows.count(argument.rows) > 0;
  const auto found = state.layouts.find(argument.collection);
  if (found == state.layouts.end() || found->second.rows != argument.rows) return false;
  const Layout &layout = found->second;
  const bool matrix = argument.kind == "matrix", scalar = argument.kind == "scalar";
  if (!matrix && !scalar && argument.kind != "column") return false;
  if (matrix && (argument.count == 0 || layout.storage != "buffer")) return false;
  // The argument's components, which follow each other in the order of the buffer, perhaps in several columns.
  std::size_t remaining = matrix ? argument.count : 1;
  bool begun = false;
  for (const Column &column : layout.columns) {
    const bool first = column.name == argument.column;
    begun = begun || first;
    if (!begun || remaining == 0) continue;
    const std::size_t component = first ? argument.component : 0;
    if (component >= column.components || column.dtype != argument.dtype || (column.kind == "scalar") != scalar) return false;
    remaining -= std::min(remaining, column.components - component);
  }
  return begun && remaining == 0;
}

// Each of these reads the rest of a line, after its first word. They return false if the line is not valid.
inline bool read_rows(std::istream &fields, State &state) {
  std::string name;
  Rows rows;
  fields >> name >> rows.min >> rows.max;
  state.rows[name] = rows;
  return true;
}

inline bool read_collection(std::istream &fields, bool says_storage, State &state) {
  std::string name;
  Layout layout;
  fields >> name >> layout.rows >> layout.alignment;
  if (says_storage) fields >> layout.storage;
  state.layouts[name] = layout;
  const bool aligned = layout.alignment > 0 && layout.alignment <= std::size_t{1} << 30 &&
                       (layout.alignment & (layout.alignment - 1)) == 0;
  return aligned && state.rows.count(layout.rows) > 0;
}

inline bool read_column(std::istream &fields, State &state) {
  std::string collection;
  Column column;
  fields >> collection >> column.name >> column.dtype >> column.itemsize >> column.kind >> column.components;
  const auto found = state.layouts.find(collection);
  if (found == state.layouts.end() || column.itemsize == 0 || column.components == 0) return false;
  found->second.columns.push_back(column);
  return true;
}

inline bool read_argument(std::istream &fields, State &state) {
  Argument argument;
  fields >> argument.kind >> argument.rows >> argument.dtype >> argument.collection >> argument.column >>
      argument.component >> argument.count >> argument.role;
  if (argument.role == "output") state.written.insert(argument.collection);
  state.arguments.push_back(argument);
  return makes_sense(argument, state);
}

// A tile with more rows than the artifact was compiled for is not valid.
inline bool read_tile(std::istream &fields, State &state) {
  std::int64_t limit = 0;
  fields >> state.tile >> state.kinds >> limit;
  bool fits = state.tile > 0;
  for (auto &[name, rows] : state.rows) {
    fits = fits && (limit <= rows.max || state.tile <= rows.max / 2);
    rows.max = limit;
  }
  return fits;
}

// Reads arguments.txt. where: the name of the file, for error messages. Lines with other words are left out.
inline void read_description(std::istream &stream, const std::string &where, State &state) {
  std::string line, word;
  std::getline(stream, line);  // stays empty if there is no line
  const bool says_storage = line == "soa-arguments 2";
  if (line != "soa-arguments 1" && !says_storage) {
    throw Error(where + ": not a description of arguments (soa-arguments 1 or 2)", refusals::bundle);
  }
  while (std::getline(stream, line)) {
    std::istringstream fields(line);
    fields >> word;
    bool good = true;
    if (word == "rows") good = read_rows(fields, state);
    if (word == "collection") good = read_collection(fields, says_storage, state);
    if (word == "column") good = read_column(fields, state);
    if (word == "argument") good = read_argument(fields, state);
    if (word == "tile") good = read_tile(fields, state);
    if (word == "windows") state.any_first = true;
    if (fields.fail() || !good) throw Error(where + ": makes no sense: " + line, refusals::bundle);
  }
}

// The state of an opened model, from the content of its arguments.txt.
inline std::shared_ptr<State> described(soa_model *model, void (*close)(soa_model *), const char *arguments,
                                        const std::string &where, int threads) {
  auto state = std::make_shared<State>();
  state->model = {model, close};
  state->threads = threads;
  std::istringstream text(arguments);
  read_description(text, where, *state);
  return state;
}

// Throws HeaderError unless a model has the layouts that a generated header expects.
inline void require_layouts(const std::string &expected, const State &model) {
  State header;
  std::istringstream text(expected);
  read_description(text, "the generated header", header);
  for (const auto &[name, layout] : header.layouts) {
    const auto found = model.layouts.find(name);
    const bool same = found != model.layouts.end() && found->second == layout;
    if (!same || header.layouts.size() != model.layouts.size()) {
      throw HeaderError("the generated header does not fit " + model.origin.name + " (bundle " +
                        model.origin.digest.substr(0, 12) + "): its collection '" + name +
                        "' has other columns there, or it has other collections: run `pipeline cxx` again",
                        refusals::header);
    }
  }
}

}  // namespace detail

}  // namespace soa

#endif
