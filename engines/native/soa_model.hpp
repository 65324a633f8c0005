// soa_model: a bundle's artifact in C++17, over the C interface of soa_runner.h; no Python.
//
//   auto model = soa::Model::open(bundle + "/targets/cpu/x86-64-v3/aoti", "cpu");
//   soa::Binding run = model.bind({{"jets", jets_buffer, n}, {"tags", tags_buffer, n}});
//   run();                 // writes the columns of tags_buffer in place; no copy
//   run.resize(n - 5);     // fewer rows of the same memory
//
// A buffer is laid out as CMSSW's GENERATE_SOA_LAYOUT lays it out; model.layout("jets") says where
// each column lies. Where the layout's storage is "columns", as of Arrow's, each has its own memory:
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
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "soa_runner.h"

namespace soa {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Column {
  std::string name, dtype, kind;
  std::size_t itemsize = 0, components = 1;

  // Whether no model gets it: a struct, or a std::array. Such an element asks for no alignment.
  bool opaque() const { return dtype.compare(0, 6, "opaque") == 0; }
};

// The byte layout of one collection. storage is "buffer" or "columns"; offset and nbytes are a
// buffer's.
class Layout {
 public:
  std::vector<Column> columns;
  std::size_t alignment = 128;
  std::string rows, storage = "buffer";

  // Bytes that a separate column's address is a multiple of.
  std::size_t alignment_of(const Column &column) const {
    return column.opaque() ? alignment : std::max(alignment, column.itemsize);
  }

  // Rows from one to the next at which every column is aligned as the first row is.
  std::size_t row_step() const {
    std::size_t step = 1;
    for (const Column &column : columns) {
      if (!column.opaque()) step = std::max(step, alignment_of(column) / column.itemsize);
    }
    return step;
  }

  // Bytes from one component of a column to the next.
  std::size_t pitch(const Column &column, std::size_t n) const {
    const std::size_t elements = column.kind == "scalar" ? 1 : n;
    return (elements * column.itemsize + alignment - 1) / alignment * alignment;
  }
  std::size_t offset(const std::string &name, std::size_t n) const {
    require_buffer();
    std::size_t at = 0;
    for (const Column &column : columns) {
      if (column.name == name) return at;
      at += pitch(column, n) * column.components;
    }
    throw Error("no column '" + name + "'");
  }
  const Column &operator[](const std::string &name) const {
    for (const Column &column : columns) {
      if (column.name == name) return column;
    }
    throw Error("no column '" + name + "'");
  }
  std::size_t nbytes(std::size_t n) const {
    require_buffer();
    std::size_t total = 0;
    for (const Column &column : columns) total += pitch(column, n) * column.components;
    return total;
  }

 private:
  void require_buffer() const {
    if (storage != "buffer") throw Error("separate columns have no place in a buffer");
  }
};

// The addresses of separate columns by name: one for each component, those of a matrix column by column.
using Columns = std::map<std::string, std::vector<void *>>;

// A collection's memory, a buffer or separate columns: `capacity` elements (that is what a buffer's
// column pitch follows from; -1: n), of which the n from `first` on are in use.
struct Memory {
  Memory(std::string name, void *buffer, std::int64_t rows, std::int64_t room = -1,
         std::int64_t first_row = 0)
      : collection(std::move(name)), data(buffer), n(rows), capacity(room), first(first_row) {}
  Memory(std::string name, Columns separate, std::int64_t rows, std::int64_t room = -1,
         std::int64_t first_row = 0)
      : collection(std::move(name)), columns(std::move(separate)), n(rows), capacity(room), first(first_row) {}

  std::string collection;
  void *data = nullptr;
  Columns columns;
  std::int64_t n, capacity, first;
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
};

inline void check(int code, const char *message) {
  if (code != SOA_OK) throw Error(message);
}

inline void read_description(const std::filesystem::path &file, State &state) {
  std::ifstream stream(file);
  if (!stream) {
    throw Error(file.string() + ": cannot be read: is this the folder of an aoti artifact? One of separate "
                "columns that was built before they ran in C++ is to be built again");
  }
  std::string line, word;
  const bool found = static_cast<bool>(std::getline(stream, line));
  const bool says_storage = found && line == "soa-arguments 2";
  if (!found || (line != "soa-arguments 1" && !says_storage)) {
    throw Error(file.string() + ": not a description of arguments (soa-arguments 1 or 2)");
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
      state.layouts[name] = layout;
    } else if (word == "column") {
      std::string collection;
      Column column;
      fields >> collection >> column.name >> column.dtype >> column.itemsize >> column.kind >>
          column.components;
      state.layouts[collection].columns.push_back(column);
    } else if (word == "argument") {
      Argument argument;
      fields >> argument.kind >> argument.rows >> argument.dtype >> argument.collection >>
          argument.column >> argument.component >> argument.count >> argument.role;
      state.arguments.push_back(argument);
    } else if (word == "tile") {
      std::int64_t limit = 0;
      fields >> state.tile >> state.kinds >> limit;
      for (auto &[name, rows] : state.rows) {
        if (limit > rows.max && 2 * state.tile > rows.max) {
          throw Error(file.string() + ": more rows at a time than it was compiled for: " + line);
        }
        rows.max = limit;
      }
    } else if (word == "windows") {
      state.any_first = true;
    }
    if (fields.fail()) throw Error(file.string() + ": cannot read: " + line);
  }
}

}  // namespace detail

// A model tied to memory. One thread at a time may run it; others get soa::Error.
class Binding {
 public:
  // Runs; where there is no output element (n = 0) there is nothing to do.
  void operator()(void *stream = nullptr) {
    if (!writes_) return;
    char message[512] = "";
    detail::check(soa_call_run(call_.get(), stream, message, sizeof message), message);
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
    char message[512] = "";
    detail::check(soa_call_update(call_.get(), indices.data(), tensors.data(), indices.size(), message,
                                  sizeof message),
                  message);
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
        throw Error("'" + given.collection + "' is a window from row " + std::to_string(given.first) +
                    " on, and the artifact was not validated on such: begin at a multiple of " +
                    std::to_string(step));
      }
      check_memory(given, layout);
      const auto [rows, first] = rows_.emplace(layout.rows, given.n);
      if (!first && rows->second != given.n) {
        throw Error("collections disagree on the number of rows '" + layout.rows + "'");
      }
      check_rows(layout.rows, given.n);
    }
    for (const auto &[name, layout] : state_->layouts) {
      if (std::none_of(memory_.begin(), memory_.end(),
                       [&name = name](const Memory &m) { return m.collection == name; })) {
        throw Error("no memory for collection '" + name + "'");
      }
    }
    std::vector<soa_tensor> tensors;
    for (const auto &argument : state_->arguments) tensors.push_back(describe(argument, rows_));
    char message[512] = "";
    soa_call *call = nullptr;
    detail::check(soa_call_create(state_->model.get(), tensors.data(), tensors.size(), &call, message,
                                  sizeof message),
                  message);
    call_.reset(call);
    if (state_->tile > 0) {
      detail::check(soa_call_tile(call, state_->kinds.c_str(), state_->tile, state_->threads, message,
                                  sizeof message),
                    message);
    }
    writes_ = writes();
  }

  static void check_memory(const Memory &given, const Layout &layout) {
    const std::string name = "'" + given.collection + "'";
    const auto capacity = static_cast<std::size_t>(given.capacity);
    if (layout.storage == "buffer") {
      if (!given.columns.empty()) throw Error(name + " lies in one buffer: give its address");
      check_address(name, given.data, layout.nbytes(capacity), layout.alignment);
      return;
    }
    if (given.data != nullptr) throw Error(name + " has separate columns: give the address of each");
    for (const auto &[column, addresses] : given.columns) {
      if (addresses.size() != layout[column].components) {
        throw Error(name + ", column '" + column + "': " + std::to_string(layout[column].components) +
                    " addresses are needed, found " + std::to_string(addresses.size()));
      }
    }
    for (const Column &column : layout.columns) {
      const auto found = given.columns.find(column.name);
      const std::string where = name + ", column '" + column.name + "'";
      if (found == given.columns.end()) throw Error(where + ": no address");
      for (const void *address : found->second) {
        check_address(where, address, column.kind == "scalar" ? 1 : capacity, layout.alignment_of(column));
      }
    }
  }

  static void check_address(const std::string &where, const void *address, std::size_t size,
                            std::size_t alignment) {
    if (address == nullptr && size > 0) throw Error(where + ": null pointer");
    if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
      throw Error(where + ": not aligned to " + std::to_string(alignment));
    }
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
    const Memory &memory = *std::find_if(
        memory_.begin(), memory_.end(),
        [&](const Memory &m) { return m.collection == argument.collection; });
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
  // folder: the unpacked artifact of one target, with its library and arguments.txt.
  static Model open(const std::filesystem::path &folder, const std::string &device = "cpu",
                    int instances = 1, int threads = 1) {
    auto state = std::make_shared<detail::State>();
    state->threads = threads;
    detail::read_description(folder / "arguments.txt", *state);
    std::vector<std::filesystem::path> libraries;
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".so") libraries.push_back(entry.path());
    }
    if (libraries.size() != 1) {
      throw Error(folder.string() + ": one library is needed, found " +
                  std::to_string(libraries.size()));
    }
    char message[512] = "";
    soa_model *model = nullptr;
    detail::check(soa_model_open(libraries[0].c_str(), device.c_str(), folder.c_str(), instances,
                                 threads, &model, message, sizeof message),
                  message);
    state->model.reset(model);
    return Model(std::move(state));
  }

  const Layout &layout(const std::string &collection) const {
    const auto found = state_->layouts.find(collection);
    if (found == state_->layouts.end()) throw Error("no collection '" + collection + "'");
    return found->second;
  }

  Binding bind(std::vector<Memory> memory) const { return Binding(state_, std::move(memory)); }

 private:
  explicit Model(std::shared_ptr<detail::State> state) : state_(std::move(state)) {}
  std::shared_ptr<detail::State> state_;
};

}  // namespace soa

#endif
