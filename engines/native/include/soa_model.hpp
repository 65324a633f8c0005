// soa_model: a bundle in C++17, over the C interfaces of soa_load.h and soa_runner.h; no Python.
//
//   auto model = soa::Model::load("jets-3");      // the folder that `pipeline pull jets@production jets-3` made
//   soa::Collection jets = model.collection("jets", n), tags = model.collection("tags", n);
//   soa::Binding run = model.bind({jets, tags});  // or your own memory, see below
//   run();                 // writes the columns of tags in place; no copy
//   run(n - 5);            // one run on fewer rows of the same memory; after run.resize(n - 5), all runs are on these rows
//
// Your own memory: {"jets", buffer, n}; model.layout("jets") gives the offset of each column. If the layout's storage
// is "columns", as for Arrow, each column has its own memory:
//   model.bind({{"jets", {{"pt", {pt}}, {"dir", {dir_x, dir_y, dir_z}}}, n}, ...})
// A window is the rows `first` to `first + n - 1` of larger memory: {"jets", jets_buffer, n, capacity, first}. Without
// `first` it is memory for up to `capacity` rows. An output must not overlap with any other bound memory.
// The caller keeps owning the memory. Errors are thrown as soa::Error with one line and a code each.
#ifndef SOA_MODEL_HPP
#define SOA_MODEL_HPP

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "soa_arguments.hpp"
#include "soa_memory.hpp"

namespace soa {

// The options for loading a bundle. An option that is not set has the value of the version's config.
struct Loading {
  bool test = false;    // any folder, promoted or not; the model is first run on its reference
  std::string device = "cpu", target, engine;  // for a GPU, the target is needed
  std::string trusted_keys;  // PEM files or folders, separated by ':': one of these keys must have signed
  int threads = 0, instances = 0;
  // What a generated header expects: the bundle's digest or, for any version, the same layouts.
  std::string digest, layouts;
  bool any_version = false;
};

// Rows by dimension, such as {{"nodes", 40}, {"edges", 310}}.
using Counts = std::map<std::string, std::int64_t>;

// A model tied to memory. Only one thread at a time may run it; other threads get soa::Error.
class Binding {
 public:
  // Runs on all bound rows. If the outputs have no elements (n = 0), it does nothing.
  void operator()(void *stream = nullptr) { run(bound_, stream); }

  // Runs once on the first rows of the same memory.
  void operator()(const Counts &rows, void *stream = nullptr) { run(rows, stream); }

  // The same n in every dimension.
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  void operator()(Integer n, void *stream = nullptr) {
    Counts rows = bound_;
    for (auto &[dim, count] : rows) count = static_cast<std::int64_t>(n);
    run(rows, stream);
  }

  // From now on, n rows of the same memory are bound, in every collection with the row dimension `dim`.
  void resize(std::int64_t n, const std::string &dim = "n") {
    Counts rows = bound_;
    if (rows.count(dim) == 0) throw Error("no rows '" + dim + "', this model has " + detail::listed(rows), refusals::bind_rows);
    rows[dim] = n;
    use(rows);
    bound_ = rows_;
  }

 private:
  friend class Model;

  // Ties the memory of all collections. Throws Error if it does not fit the model.
  Binding(std::shared_ptr<detail::State> state, const std::vector<Memory> &collections) : state_(std::move(state)) {
    for (const Memory &memory : collections) {
      check_memory(memory);
      if (!memory_.emplace(memory.collection, memory).second) {
        throw Error("collection '" + memory.collection + "' is given twice", refusals::bind);
      }
    }
    check_whole();
    bound_ = rows_;
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

  // Runs once on these numbers of rows, and counts the call if it is drawn.
  void run(const Counts &rows, void *stream) {
    use(rows);
    if (!writes_) return;
    detail::check([&](char *text, std::size_t size) { return soa_call_run(call_.get(), stream, text, size); });
    if (state_->watch && state_->watch->draws(state_->watch->watch)) count();
  }

  // Counts the values of the last run.
  void count() const {
    std::vector<std::string> keys;
    std::vector<soa_values> values;
    for (const auto &[name, memory] : memory_) {
      const Layout &layout = state_->layouts.at(name);
      for (const Column &column : layout.columns) {
        for (std::size_t k = 0; k < column.components; ++k) {
          keys.push_back(name + "/" + column.name + (column.components > 1 ? "[" + std::to_string(k) + "]" : ""));
          const std::int64_t n = column.kind == "scalar" ? 1 : rows_.at(layout.rows);
          values.push_back({nullptr, column.dtype.c_str(), memory.address(layout, column, k), n});
        }
      }
    }
    for (std::size_t i = 0; i < keys.size(); ++i) values[i].key = keys[i].c_str();
    state_->watch->count(state_->watch->watch, values.data(), values.size());
  }

  // Ties the arguments to these numbers of rows.
  void use(const Counts &rows) {
    if (rows == rows_) return;
    const auto same_dim = [](const auto &a, const auto &b) { return a.first == b.first; };
    if (!std::equal(rows.begin(), rows.end(), rows_.begin(), rows_.end(), same_dim)) {
      throw Error("rows for " + detail::listed(rows) + ", this model has " + detail::listed(rows_), refusals::bind_rows);
    }
    for (const auto &[dim, n] : rows) check_range(dim, n);
    for (const auto &[name, memory] : memory_) {
      const std::string &dim = state_->layouts.at(name).rows;
      if (rows.at(dim) <= memory.most()) continue;
      throw Error("'" + name + "' has no room for " + dim + " = " + std::to_string(rows.at(dim)), refusals::bind_rows);
    }
    std::vector<std::size_t> indices;
    std::vector<soa_tensor> tensors;
    for (std::size_t i = 0; i < state_->arguments.size(); ++i) {
      const auto &argument = state_->arguments[i];
      if (argument.kind != "carrier" && argument.kind != "column") continue;
      if (rows.at(argument.rows) == rows_.at(argument.rows)) continue;
      indices.push_back(i);
      tensors.push_back(describe(argument, rows));
    }
    detail::check([&](char *text, std::size_t size) {
      return soa_call_update(call_.get(), indices.data(), tensors.data(), indices.size(), text, size);
    });
    rows_ = rows;
    writes_ = writes();
  }

  // Checks the memory of one collection.
  void check_memory(const Memory &memory) {
    const Layout &layout = detail::layout_of(*state_, memory.collection);
    const auto step = static_cast<std::int64_t>(layout.row_step());
    if (memory.first % step != 0 && !state_->any_first) {
      throw Error("'" + memory.collection + "' is a window from row " + std::to_string(memory.first) + " on, and the "
                  "artifact was not validated on such: begin at a multiple of " + std::to_string(step),
                  refusals::bind_rows);
    }
    memory.require(layout);
    if (memory.readonly && state_->written.count(memory.collection) > 0) {
      throw Error("'" + memory.collection + "' is an output, and its memory is const", refusals::bind_read_only);
    }
    if (rows_.emplace(layout.rows, memory.n).first->second != memory.n) {
      throw Error("collections disagree on the number of rows '" + layout.rows + "'", refusals::bind_rows);
    }
    check_range(layout.rows, memory.n);
  }

  // Checks that every collection is given, and that no output overlaps with other memory.
  void check_whole() const {
    struct Piece {
      std::uintptr_t begin, end;
      const std::string *collection;
    };
    std::vector<Piece> pieces;
    for (const auto &[name, layout] : state_->layouts) {
      const auto found = memory_.find(name);
      if (found == memory_.end()) throw Error("no memory for collection '" + name + "'", refusals::bind);
      for (const auto &[begin, end] : found->second.pieces(layout)) pieces.push_back({begin, end, &name});
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece &a, const Piece &b) { return a.begin < b.begin; });
    const Piece *last = nullptr;  // the earlier piece with the largest end
    for (const Piece &piece : pieces) {
      const auto written = [this](const Piece &each) { return state_->written.count(*each.collection) > 0; };
      if (last != nullptr && piece.begin < last->end && (written(piece) || written(*last))) {
        throw Error("collections '" + *last->collection + "' and '" + *piece.collection + "' overlap in memory",
                    refusals::bind_overlap);
      }
      if (last == nullptr || piece.end > last->end) last = &piece;
    }
  }

  // True if an output has elements for the present numbers of rows.
  bool writes() const {
    return std::any_of(state_->arguments.begin(), state_->arguments.end(), [&](const auto &argument) {
      return argument.role == "output" && (argument.kind == "scalar" || rows_.at(argument.rows) > 0);
    });
  }

  // Throws Error if a row dimension cannot have n rows.
  void check_range(const std::string &dim, std::int64_t n) const {
    const auto &range = state_->rows.at(dim);
    if (n < range.min || n > range.max) {
      throw Error(dim + " = " + std::to_string(n) + " is outside the compiled range " +
                      std::to_string(range.min) + " ... " + std::to_string(range.max),
                  refusals::bind_rows);
    }
  }

  // An argument for the C interface, with these numbers of rows.
  soa_tensor describe(const detail::Argument &argument, const Counts &rows) const {
    const std::int64_t n = rows.at(argument.rows);
    soa_tensor tensor{nullptr, argument.dtype.c_str(), 2, {n, 0}};
    if (argument.kind == "carrier") return tensor;
    const Memory &memory = memory_.at(argument.collection);
    const Layout &layout = state_->layouts.at(argument.collection);
    const Column &column = layout[argument.column];
    tensor.data = memory.address(layout, column, argument.component);
    if (argument.kind == "matrix") {
      const std::size_t pitch = layout.pitch(column, static_cast<std::size_t>(memory.capacity));
      tensor.sizes[0] = static_cast<std::int64_t>(argument.count);
      tensor.sizes[1] = static_cast<std::int64_t>(pitch / column.itemsize);
    } else {
      tensor.ndim = 1;
      tensor.sizes[0] = argument.kind == "scalar" ? 1 : n;
    }
    return tensor;
  }

  std::shared_ptr<detail::State> state_;
  std::map<std::string, Memory> memory_;  // by collection
  Counts rows_, bound_;  // rows_: of the tied arguments; bound_: of a run that gives no number of rows
  bool writes_ = true;
  std::unique_ptr<soa_call, void (*)(soa_call *)> call_{nullptr, soa_call_delete};
};

// An opened artifact. Any number of threads may bind and run it at the same time.
class Model {
 public:
  // folder: a bundle. Its digests are checked; in production also its promotion and its signature: see soa_load.h.
  static Model load(const std::filesystem::path &folder, const Loading &loading = {}) {
    const auto text_or_null = [](const std::string &text) { return text.empty() ? nullptr : text.c_str(); };
    soa_loading options{};
    options.test = loading.test ? 1 : 0;
    options.threads = loading.threads;
    options.instances = loading.instances;
    options.device = text_or_null(loading.device);
    options.target = text_or_null(loading.target);
    options.engine = text_or_null(loading.engine);
    options.digest = loading.any_version ? nullptr : text_or_null(loading.digest);
    options.trusted_keys = text_or_null(loading.trusted_keys);
    soa_model *model = nullptr;
    soa_origin *opened = nullptr;
    detail::check([&](char *text, std::size_t size) { return soa_load(folder.c_str(), &options, &model, &opened, text, size); });
    const std::unique_ptr<soa_origin, void (*)(soa_origin *)> description(opened, soa_origin_delete);
    auto state = detail::described(model, soa_model_close, description->arguments,
                                   std::string(description->folder) + "/arguments.txt", description->threads);
    state->origin = {description->name, description->ref, description->digest, description->target, description->engine};
    if (!loading.layouts.empty()) detail::require_layouts(loading.layouts, *state);
    soa_watch *watch = nullptr;
    if (loading.device == "cpu") {
      detail::check([&](char *text, std::size_t size) { return soa_watch_open(description.get(), &watch, text, size); });
    }
    if (watch != nullptr) {
      state->watch.reset(new detail::Watch{watch, soa_watch_draws, soa_watch_count, soa_watch_close});
    }
    return Model(std::move(state));
  }

  // folder: the unpacked artifact of one target, with its library and arguments.txt. No digest is checked.
  static Model open(const std::filesystem::path &folder, const std::string &device = "cpu", int instances = 1,
                    int threads = 1) {
    const std::string described_in = (folder / "arguments.txt").string();
    std::ifstream stream(described_in);
    if (!stream) {
      throw Error(described_in + ": cannot be read: is this the folder of an aoti artifact? One "
                  "of separate columns that was built before they ran in C++ is to be built again",
                  refusals::load);
    }
    const std::string arguments{std::istreambuf_iterator<char>(stream), {}};
    auto state = detail::described(nullptr, soa_model_close, arguments.c_str(), described_in, threads);
    std::vector<std::filesystem::path> libraries;
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".so" || entry.path().extension() == ".kernel") libraries.push_back(entry.path());
    }
    if (libraries.size() != 1) {
      throw Error(folder.string() + ": one library is needed, found " + std::to_string(libraries.size()), refusals::load);
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

  const Layout &layout(const std::string &collection) const { return detail::layout_of(*state_, collection); }

  // Memory for n elements of a collection. It must not outlive the model.
  Collection collection(const std::string &name, std::int64_t n) const { return Collection(name, layout(name), n); }

  Binding bind(const std::vector<Memory> &memory) const { return Binding(state_, memory); }

 private:
  std::shared_ptr<detail::State> state_;
};

}  // namespace soa

#endif
