// soa_model: a bundle in C++17, over the C interfaces of soa_load.h and soa_runner.h; no Python.
//
//   auto model = soa::Model::load("jets-3");      // the folder that `pipeline pull jets@production jets-3` made
//   soa::Collection jets = model.collection("jets", n), tags = model.collection("tags", n);
//   soa::Binding run = model.bind({jets, tags});  // or memory of your own, see below
//   run();                 // writes the columns of tags in place; no copy
//   run.resize(n - 5);     // fewer rows of the same memory
//
// Memory of one's own: {"jets", buffer, n}; model.layout("jets") says where each column lies. Where the layout's
// storage is "columns", as of Arrow's, each has its own memory:
//   model.bind({{"jets", {{"pt", {pt}}, {"dir", {dir_x, dir_y, dir_z}}}, n}, ...})
// Rows first ... first + n of larger memory are a window: {"jets", jets_buffer, n, capacity, first}.
// Memory stays the caller's. Mistakes are soa::Error with one line each.
#ifndef SOA_MODEL_HPP
#define SOA_MODEL_HPP

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "soa_layout.hpp"
#include "soa_load.h"

namespace soa {

// What is asked of a bundle when it is loaded. What is not set is as the version's config says.
struct Loading {
  bool test = false;    // any folder, promoted or not; it is run on its own reference first
  std::string device = "cpu", target, engine;  // on a GPU the target is to be named
  std::string trusted_keys;  // files or folders of PEM, ':' in between: one of them must have signed
  int threads = 0, instances = 0;
  // What a generated header expects: the bundle's digest, or, of any version, the same layouts.
  std::string digest, layouts;
  bool any_version = false;
};

// What was loaded.
struct Origin {
  std::string name, ref, digest, target, engine;
};

namespace detail {

struct Argument {
  std::string kind, rows, dtype, collection, column, role;
  std::size_t component = 0, count = 1;
};

struct Rows {
  std::int64_t min = 0, max = 0;
};

struct State {
  std::map<std::string, Layout> layouts;
  std::map<std::string, Rows> rows;
  std::vector<Argument> arguments;
  std::int64_t tile = 0;  // rows at a time
  std::string kinds;
  int threads = 1;  // which share the tiles
  bool any_first = false;  // whether windows may begin at any row
  std::unique_ptr<soa_model, void (*)(soa_model *)> model{nullptr, soa_model_close};
  Origin origin;
};

[[noreturn]] inline void refuse(int code, const std::string &said) {
  switch (code) {
    case SOA_BAD_BUNDLE: throw BundleError(said);
    case SOA_NOT_PROMOTED: throw PromotionError(said);
    case SOA_NOT_SIGNED: throw TrustError(said);
    case SOA_WRONG_HOST: throw HostError(said);
    case SOA_WRONG_VERSION: throw HeaderError(said);
    case SOA_DEVIATES: throw DeviationError(said);
    default: break;
  }
  const bool torch = code == SOA_OPEN_FAILED && said.find("libtorch") != std::string::npos;
  throw Error(torch ? said + ": link libtorch_cpu, or name its folder in LD_LIBRARY_PATH" : said);
}

// A call of the C interface, `call(message, size)`: what it refuses is thrown.
template <typename Call>
void check(const Call &call) {
  char message[2048];
  message[0] = 0;
  if (const int code = call(message, sizeof message); code != SOA_OK) refuse(code, message);
}

// where: the file, for errors.
inline void read_description(std::istream &stream, const std::string &where, State &state) {
  std::string line, word;
  const bool found = static_cast<bool>(std::getline(stream, line));
  const bool says_storage = found && line == "soa-arguments 2";
  if (!found || (line != "soa-arguments 1" && !says_storage)) {
    throw Error(where + ": not a description of arguments (soa-arguments 1 or 2)");
  }
  while (std::getline(stream, line)) {
    std::istringstream fields(line);
    fields >> word;
    if (word == "rows") {
      Rows rows;
      std::string name;
      fields >> name >> rows.min >> rows.max;
      state.rows[name] = rows;
    } else if (word == "collection") {
      std::string name;
      Layout layout;
      fields >> name >> layout.rows >> layout.alignment;
      if (says_storage) fields >> layout.storage;
      if (layout.alignment == 0 || (layout.alignment & (layout.alignment - 1)) != 0) fields.setstate(std::ios::failbit);
      state.layouts[name] = layout;
    } else if (word == "column") {
      std::string collection;
      Column column;
      fields >> collection >> column.name >> column.dtype >> column.itemsize >> column.kind >> column.components;
      if (column.itemsize == 0 || column.components == 0) fields.setstate(std::ios::failbit);
      state.layouts[collection].columns.push_back(column);
    } else if (word == "argument") {
      Argument argument;
      fields >> argument.kind >> argument.rows >> argument.dtype >> argument.collection >> argument.column >>
          argument.component >> argument.count >> argument.role;
      state.arguments.push_back(argument);
    } else if (word == "tile") {
      std::int64_t limit = 0;
      fields >> state.tile >> state.kinds >> limit;
      for (auto &[name, rows] : state.rows) {
        if (limit > rows.max && 2 * state.tile > rows.max) {
          throw Error(where + ": more rows at a time than it was compiled for: " + line);
        }
        rows.max = limit;
      }
    } else if (word == "windows") {
      state.any_first = true;
    }
    if (fields.fail()) throw Error(where + ": cannot read: " + line);
  }
}

// An opened model as C++ sees it, by the content of its arguments.txt.
inline std::shared_ptr<State> described(soa_model *model, void (*close)(soa_model *), const char *arguments,
                                        const std::string &where, int threads) {
  auto state = std::make_shared<State>();
  state->model = {model, close};
  state->threads = threads;
  std::istringstream text(arguments);
  read_description(text, where, *state);
  return state;
}

inline void require_layouts(const std::string &expected, const State &found) {
  State header;
  std::istringstream text(expected);
  read_description(text, "the generated header", header);
  for (const auto &[name, layout] : header.layouts) {
    const auto there = found.layouts.find(name);
    if (there == found.layouts.end() || !(there->second == layout) || header.layouts.size() != found.layouts.size()) {
      throw HeaderError("the generated header does not fit " + found.origin.name + " (bundle " +
                        found.origin.digest.substr(0, 12) + "): its collection '" + name +
                        "' has other columns there, or it has other collections: run `pipeline cxx` again");
    }
  }
}

}  // namespace detail

// A model tied to memory. One thread at a time may run it; others get soa::Error.
class Binding {
 public:
  // Runs; where there is no output element (n = 0) there is nothing to do.
  void operator()(void *stream = nullptr) {
    if (!writes_) return;
    detail::check([&](char *text, std::size_t size) { return soa_call_run(call_.get(), stream, text, size); });
  }

  // Use n rows of the same memory, in every collection whose rows are `dim`.
  void resize(std::int64_t n, const std::string &dim = "n") {
    for (Memory &memory : memory_) {
      if (state_->layouts.at(memory.collection).rows == dim) {
        if (n > memory.capacity - memory.first) throw Error("'" + memory.collection + "' has no room for that n");
      }
    }
    check_rows(dim, n);
    std::map<std::string, std::int64_t> rows = rows_;
    rows[dim] = n;
    std::vector<std::size_t> indices;
    std::vector<soa_tensor> tensors;
    for (std::size_t i = 0; i < state_->arguments.size(); ++i) {
      const auto &argument = state_->arguments[i];
      if (argument.rows != dim || (argument.kind != "carrier" && argument.kind != "column")) continue;
      indices.push_back(i);
      tensors.push_back(describe(argument, rows));
    }
    detail::check([&](char *text, std::size_t size) {
      return soa_call_update(call_.get(), indices.data(), tensors.data(), indices.size(), text, size);
    });
    rows_ = std::move(rows);
    writes_ = writes();
  }

 private:
  friend class Model;

  Binding(std::shared_ptr<detail::State> state, std::vector<Memory> memory)
      : state_(std::move(state)), memory_(std::move(memory)) {
    for (Memory &given : memory_) {
      const auto found = state_->layouts.find(given.collection);
      if (found == state_->layouts.end()) throw Error("no collection '" + given.collection + "'");
      if (given.capacity < 0) given.capacity = given.first + given.n;
      if (given.first < 0 || given.n > given.capacity - given.first) {
        throw Error("'" + given.collection + "': n above its capacity");
      }
      const Layout &layout = found->second;
      const auto step = static_cast<std::int64_t>(layout.row_step());
      if (given.first % step != 0 && !state_->any_first) {
        throw Error("'" + given.collection + "' is a window from row " + std::to_string(given.first) + " on, and the "
                    "artifact was not validated on such: begin at a multiple of " + std::to_string(step));
      }
      given.require(layout);
      const auto [rows, first] = rows_.emplace(layout.rows, given.n);
      if (!first && rows->second != given.n) {
        throw Error("collections disagree on the number of rows '" + layout.rows + "'");
      }
      check_rows(layout.rows, given.n);
    }
    for (const auto &[name, layout] : state_->layouts) {
      if (std::none_of(memory_.begin(), memory_.end(), [&name = name](const Memory &m) { return m.collection == name; })) {
        throw Error("no memory for collection '" + name + "'");
      }
    }
    std::vector<soa_tensor> tensors;
    for (const auto &argument : state_->arguments) tensors.push_back(describe(argument, rows_));
    soa_call *call = nullptr;
    detail::check([&](char *text, std::size_t size) {
      return soa_call_create(state_->model.get(), tensors.data(), tensors.size(), &call, text, size);
    });
    call_.reset(call);
    if (state_->tile > 0) {
      detail::check([&](char *text, std::size_t size) {
        return soa_call_tile(call, state_->kinds.c_str(), state_->tile, state_->threads, text, size);
      });
    }
    writes_ = writes();
  }

  bool writes() const {
    return std::any_of(state_->arguments.begin(), state_->arguments.end(), [&](const auto &argument) {
      return argument.role == "output" && (argument.kind == "scalar" || rows_.at(argument.rows) > 0);
    });
  }

  void check_rows(const std::string &dim, std::int64_t n) const {
    const auto &range = state_->rows.at(dim);
    if (n < range.min || n > range.max) {
      throw Error(dim + " = " + std::to_string(n) + " is outside the compiled range " +
                  std::to_string(range.min) + " ... " + std::to_string(range.max));
    }
  }

  soa_tensor describe(const detail::Argument &argument,
                      const std::map<std::string, std::int64_t> &rows) const {
    const std::int64_t n = rows.at(argument.rows);
    soa_tensor tensor{nullptr, argument.dtype.c_str(), 2, {n, 0}};
    if (argument.kind == "carrier") return tensor;
    const Memory &memory = *std::find_if(memory_.begin(), memory_.end(), [&](const Memory &m) {
      return m.collection == argument.collection;
    });
    const Layout &layout = state_->layouts.at(argument.collection);
    const Column &column = layout[argument.column];
    const auto capacity = static_cast<std::size_t>(memory.capacity);
    const std::size_t pitch = layout.pitch(column, capacity);
    if (layout.storage == "buffer") {
      tensor.data = static_cast<char *>(memory.data) + layout.offset(argument.column, capacity) +
                    argument.component * pitch;
    } else {
      tensor.data = memory.columns.at(argument.column).at(argument.component);
    }
    if (argument.kind != "scalar" && tensor.data != nullptr) {
      tensor.data = static_cast<char *>(tensor.data) + memory.first * static_cast<std::int64_t>(column.itemsize);
    }
    if (argument.kind == "matrix") {
      tensor.sizes[0] = static_cast<std::int64_t>(argument.count);
      tensor.sizes[1] = static_cast<std::int64_t>(pitch / column.itemsize);
    } else {
      tensor.ndim = 1;
      tensor.sizes[0] = argument.kind == "scalar" ? 1 : n;
    }
    return tensor;
  }

  std::shared_ptr<detail::State> state_;
  std::vector<Memory> memory_;
  std::map<std::string, std::int64_t> rows_;
  bool writes_ = true;
  std::unique_ptr<soa_call, void (*)(soa_call *)> call_{nullptr, soa_call_delete};
};

// An opened artifact; any number of threads may bind and run it at once.
class Model {
 public:
  // folder: a bundle. Its digests are checked; in production its promotion too, and who signed it: see soa_load.h.
  static Model load(const std::filesystem::path &folder, const Loading &loading = {}) {
    const auto given = [](const std::string &text) { return text.empty() ? nullptr : text.c_str(); };
    soa_loading asked{};
    asked.test = loading.test ? 1 : 0;
    asked.threads = loading.threads;
    asked.instances = loading.instances;
    asked.device = given(loading.device);
    asked.target = given(loading.target);
    asked.engine = given(loading.engine);
    asked.digest = loading.any_version ? nullptr : given(loading.digest);
    asked.trusted_keys = given(loading.trusted_keys);
    soa_model *model = nullptr;
    soa_origin *opened = nullptr;
    detail::check([&](char *text, std::size_t size) { return soa_load(folder.c_str(), &asked, &model, &opened, text, size); });
    const std::unique_ptr<soa_origin, void (*)(soa_origin *)> found(opened, soa_origin_delete);
    auto state = detail::described(model, soa_model_close, found->arguments, std::string(found->folder) + "/arguments.txt",
                                   found->threads);
    state->origin = {found->name, found->ref, found->digest, found->target, found->engine};
    if (!loading.layouts.empty()) detail::require_layouts(loading.layouts, *state);
    return Model(std::move(state));
  }

  // folder: the unpacked artifact of one target, with its library and arguments.txt. Nothing of it is checked.
  static Model open(const std::filesystem::path &folder, const std::string &device = "cpu", int instances = 1,
                    int threads = 1) {
    const std::string described_in = (folder / "arguments.txt").string();
    std::ifstream stream(described_in);
    if (!stream) {
      throw Error(described_in + ": cannot be read: is this the folder of an aoti artifact? One "
                  "of separate columns that was built before they ran in C++ is to be built again");
    }
    const std::string arguments{std::istreambuf_iterator<char>(stream), {}};
    auto state = detail::described(nullptr, soa_model_close, arguments.c_str(), described_in, threads);
    std::vector<std::filesystem::path> libraries;
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".so") libraries.push_back(entry.path());
    }
    if (libraries.size() != 1) {
      throw Error(folder.string() + ": one library is needed, found " + std::to_string(libraries.size()));
    }
    soa_model *model = nullptr;
    detail::check([&](char *text, std::size_t size) {
      return soa_model_open(libraries[0].c_str(), device.c_str(), folder.c_str(), instances, threads, &model, text, size);
    });
    state->model.reset(model);
    return Model(std::move(state));
  }

  explicit Model(std::shared_ptr<detail::State> state) : state_(std::move(state)) {}

  const Origin &origin() const { return state_->origin; }

  const Layout &layout(const std::string &collection) const {
    const auto found = state_->layouts.find(collection);
    if (found == state_->layouts.end()) throw Error("no collection '" + collection + "'");
    return found->second;
  }

  // Memory for n elements of a collection; it may not outlive the model.
  Collection collection(const std::string &name, std::int64_t n) const { return Collection(name, layout(name), n); }

  Binding bind(std::vector<Memory> memory) const { return Binding(state_, std::move(memory)); }

 private:
  std::shared_ptr<detail::State> state_;
};

}  // namespace soa

#endif
