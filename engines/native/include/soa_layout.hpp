// soa_layout: what a model's columns are, where each of their bytes lies, and memory for them.
//
// A buffer is laid out as CMSSW's GENERATE_SOA_LAYOUT lays it out. Mistakes are soa::Error with one line each.
#ifndef SOA_LAYOUT_HPP
#define SOA_LAYOUT_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace soa {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// The folder is not the sealed bundle: something is missing, altered, truncated or too many.
class BundleError : public Error {
  using Error::Error;
};
// No promotion vouches for it, and production asks for one.
class PromotionError : public Error {
  using Error::Error;
};
// No trusted key has signed it.
class TrustError : public Error {
  using Error::Error;
};
// This host runs none of its artifacts.
class HostError : public Error {
  using Error::Error;
};
// A generated header is of another version, or of other layouts.
class HeaderError : public Error {
  using Error::Error;
};
// Test mode: an answer is not the reference's.
class DeviationError : public Error {
  using Error::Error;
};

// `bytes` up to the next multiple of `alignment`.
constexpr std::size_t padded(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct Column {
  std::string name, dtype, kind;
  std::size_t itemsize = 0, components = 1;

  // Whether no model gets it: a struct, or a std::array. Such an element asks for no alignment.
  bool opaque() const { return dtype.compare(0, 6, "opaque") == 0; }
  bool operator==(const Column &other) const {
    return name == other.name && dtype == other.dtype && kind == other.kind && components == other.components;
  }
};

// The byte layout of one collection. storage is "buffer" or "columns"; offset and nbytes are a
// buffer's.
class Layout {
 public:
  std::vector<Column> columns;
  std::size_t alignment = 128;
  std::string rows, storage = "buffer";

  bool operator==(const Layout &other) const {
    return columns == other.columns && alignment == other.alignment && rows == other.rows && storage == other.storage;
  }

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

  // Throws Error where the addresses are not what the layout asks for.
  void require(const Layout &layout) const {
    const std::string name = "'" + collection + "'";
    const auto room = static_cast<std::size_t>(capacity);
    if (layout.storage == "buffer") {
      if (!columns.empty()) throw Error(name + " lies in one buffer: give its address");
      check_address(name, data, layout.nbytes(room), layout.alignment);
      return;
    }
    if (data != nullptr) throw Error(name + " has separate columns: give the address of each");
    for (const auto &[column, addresses] : columns) {
      if (addresses.size() != layout[column].components) {
        throw Error(name + ", column '" + column + "': " + std::to_string(layout[column].components) +
                    " addresses are needed, found " + std::to_string(addresses.size()));
      }
    }
    for (const Column &column : layout.columns) {
      const auto found = columns.find(column.name);
      const std::string where = name + ", column '" + column.name + "'";
      if (found == columns.end()) throw Error(where + ": no address");
      for (const void *address : found->second) {
        check_address(where, address, column.kind == "scalar" ? 1 : room, layout.alignment_of(column));
      }
    }
  }

 private:
  static void check_address(const std::string &where, const void *address, std::size_t size,
                            std::size_t alignment) {
    if (address == nullptr && size > 0) throw Error(where + ": null pointer");
    if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
      throw Error(where + ": not aligned to " + std::to_string(alignment));
    }
  }
};

// n elements of a layout in zeroed memory of its own: one buffer, or each column by itself. It is what a framework's
// PortableCollection is on a host, and a Memory wherever one is asked for. The layout has to outlive it.
class Collection {
 public:
  Collection(std::string name, const Layout &layout, std::int64_t n) : name_(std::move(name)), layout_(&layout), n_(n) {
    const auto rows = static_cast<std::size_t>(n);
    if (layout.storage == "buffer") {
      allocate(layout.nbytes(rows), layout.alignment);
      return;
    }
    for (const Column &column : layout.columns) {
      for (std::size_t k = 0; k < column.components; ++k) {
        const std::size_t elements = column.kind == "scalar" ? 1 : rows;
        columns_[column.name].push_back(allocate(elements * column.itemsize, layout.alignment_of(column)));
      }
    }
  }

  std::int64_t size() const { return n_; }
  const Layout &layout() const { return *layout_; }

  // A component of a column (of an Eigen matrix: column * rows + row). T is as large as an element, or one byte.
  template <typename T>
  T *column(const std::string &name, std::size_t component = 0) const {
    const Column &found = (*layout_)[name];
    if (sizeof(T) != 1 && sizeof(T) != found.itemsize) {
      throw Error("column '" + name + "' is " + found.dtype + ": its elements have " + std::to_string(found.itemsize) +
                  " bytes, not " + std::to_string(sizeof(T)));
    }
    if (component >= found.components) throw Error("column '" + name + "' has no component " + std::to_string(component));
    if (layout_->storage != "buffer") return static_cast<T *>(columns_.at(name)[component]);
    const auto rows = static_cast<std::size_t>(n_);
    char *buffer = static_cast<char *>(pieces_[0].first.get());
    return reinterpret_cast<T *>(buffer + layout_->offset(name, rows) + component * layout_->pitch(found, rows));
  }

  Memory memory() const {
    if (layout_->storage == "buffer") return Memory(name_, pieces_[0].first.get(), n_);
    return Memory(name_, columns_, n_);
  }
  operator Memory() const { return memory(); }

  // Each piece of memory with its bytes, padding included.
  using Piece = std::pair<std::unique_ptr<void, void (*)(void *)>, std::size_t>;
  const std::vector<Piece> &pieces() const { return pieces_; }

 private:
  void *allocate(std::size_t size, std::size_t alignment) {
    const std::size_t least = std::max(alignment, sizeof(void *));
    const std::size_t bytes = padded(std::max<std::size_t>(size, 1), least);
    std::unique_ptr<void, void (*)(void *)> memory(std::aligned_alloc(least, bytes), std::free);
    if (memory == nullptr) throw std::bad_alloc();
    pieces_.emplace_back(std::move(memory), bytes);
    return std::memset(pieces_.back().first.get(), 0, bytes);
  }

  std::string name_;
  const Layout *layout_;
  std::int64_t n_;
  std::vector<Piece> pieces_;
  Columns columns_;
};

// Goes over a buffer, column by column, and gives each pointer its place: of row `first`.
class Cursor {
 public:
  Cursor(void *buffer, std::int64_t capacity, std::int64_t first, std::size_t alignment)
      : at_(static_cast<char *>(buffer)), capacity_(capacity), first_(first), alignment_(alignment) {}

  template <typename T>
  void column(T *&pointer) {
    pointer = reinterpret_cast<T *>(at_) + first_;
    at_ += padded(static_cast<std::size_t>(capacity_) * sizeof(T), alignment_);
  }
  template <typename T, std::size_t N>
  void column(std::array<T *, N> &components) {
    for (T *&component : components) column(component);
  }
  template <typename T>
  void scalar(T *&pointer) {
    pointer = reinterpret_cast<T *>(at_);
    at_ += padded(sizeof(T), alignment_);
  }

 private:
  char *at_;
  std::int64_t capacity_, first_;
  std::size_t alignment_;
};

}  // namespace soa

#endif
