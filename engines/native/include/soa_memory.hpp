// soa_memory: the memory of a collection that is bound to a model.
//
// Errors are thrown as soa::Error with one line each.
#ifndef SOA_MEMORY_HPP
#define SOA_MEMORY_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "soa_layout.hpp"

namespace soa {

// The addresses of separate columns, by name: one for each component. For a matrix, its entries column by column.
using Columns = std::map<std::string, std::vector<void *>>;
using ConstColumns = std::map<std::string, std::vector<const void *>>;

// The memory of a collection, a buffer or separate columns: it has `capacity` elements (-1: just enough), of which n are in
// use. The capacity determines the offsets in a buffer. With `first` it is a window: only the n rows from `first` on may be
// used. Without `first`, a call may use up to `capacity` rows. Const memory can be bound as an input only.
struct Memory {
  Memory(std::string name, void *buffer, std::int64_t rows, std::int64_t room = -1, std::int64_t first_row = -1)
      : Memory(std::move(name), rows, room, first_row) {
    data = buffer;
  }
  Memory(std::string name, Columns separate, std::int64_t rows, std::int64_t room = -1, std::int64_t first_row = -1)
      : Memory(std::move(name), rows, room, first_row) {
    columns = std::move(separate);
  }
  template <typename T, typename = std::enable_if_t<std::is_const_v<T>>>
  Memory(std::string name, T *buffer, std::int64_t rows, std::int64_t room = -1, std::int64_t first_row = -1)
      : Memory(std::move(name), rows, room, first_row) {
    data = const_cast<std::remove_const_t<T> *>(buffer);
    readonly = true;
  }
  template <typename Given, typename = std::enable_if_t<std::is_same_v<Given, ConstColumns>>>
  Memory(std::string name, const Given &separate, std::int64_t rows, std::int64_t room = -1, std::int64_t first_row = -1)
      : Memory(std::move(name), rows, room, first_row) {
    for (const auto &[column, addresses] : separate) {
      for (const void *address : addresses) columns[column].push_back(const_cast<void *>(address));
    }
    readonly = true;
  }

  std::string collection;
  void *data = nullptr;
  Columns columns;
  std::int64_t n, capacity, first;
  bool window, readonly = false;

  // The largest number of rows that a call may use.
  std::int64_t most() const { return window ? n : capacity; }

  // The address of the first row in use, for a component of a column.
  char *address(const Layout &layout, const Column &column, std::size_t component) const {
    const auto room = static_cast<std::size_t>(capacity);
    char *start = nullptr;
    if (layout.storage == "buffer") {
      start = static_cast<char *>(data);
      if (start != nullptr) start += layout.offset(column.name, room) + component * layout.pitch(column, room);
    } else {
      start = static_cast<char *>(columns.at(column.name).at(component));
    }
    if (start == nullptr || column.kind == "scalar") return start;
    return start + static_cast<std::size_t>(first) * column.itemsize;
  }

  // The address ranges of the memory: the buffer with its padding, or the rows of each column.
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> pieces(const Layout &layout) const {
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
    const auto add = [&ranges](const void *address, std::size_t size) {
      const auto begin = reinterpret_cast<std::uintptr_t>(address);
      if (size > 0) ranges.emplace_back(begin, begin + size);
    };
    if (layout.storage == "buffer" && !window) {
      add(data, layout.nbytes(static_cast<std::size_t>(capacity)));
      return ranges;
    }
    for (const Column &column : layout.columns) {
      const auto rows = static_cast<std::size_t>(column.kind == "scalar" ? 1 : most());
      for (std::size_t k = 0; k < column.components; ++k) add(address(layout, column, k), rows * column.itemsize);
    }
    return ranges;
  }

  // Throws Error if the addresses do not fit the layout.
  void require(const Layout &layout) const {
    require_counts();
    if (layout.storage != "buffer") return require_columns(layout);
    if (!columns.empty()) throw Error(quoted() + " lies in one buffer: give its address", refusals::bind_layout);
    check_address(quoted(), data, layout.nbytes(static_cast<std::size_t>(capacity)), layout.alignment);
  }

 private:
  Memory(std::string name, std::int64_t rows, std::int64_t room, std::int64_t first_row)
      : collection(std::move(name)), n(rows), capacity(room), first(first_row), window(first_row != -1) {
    if (!window) first = 0;
    if (capacity == -1 && __builtin_add_overflow(first, n, &capacity)) capacity = INT64_MAX;
    require_counts();
  }

  std::string quoted() const { return "'" + collection + "'"; }

  // As `require`, for a layout of separate columns.
  void require_columns(const Layout &layout) const {
    if (data != nullptr) throw Error(quoted() + " has separate columns: give the address of each", refusals::bind_layout);
    for (const auto &[name, addresses] : columns) {
      if (layout.find(name) == nullptr) throw Error(quoted() + " has no column '" + name + "'", refusals::collection);
    }
    for (const Column &column : layout.columns) {
      const auto found = columns.find(column.name);
      const std::string where = quoted() + ", column '" + column.name + "'";
      const std::size_t count = found == columns.end() ? 0 : found->second.size();
      if (count != column.components) {
        throw Error(where + ": " + std::to_string(column.components) + " addresses are needed, found " + std::to_string(count),
                    refusals::collection);
      }
      const std::size_t rows = column.kind == "scalar" ? 1 : static_cast<std::size_t>(capacity);
      const std::size_t size = bytes_of(rows, column.itemsize);
      for (const void *address : found->second) check_address(where, address, size, layout.alignment_of(column));
    }
  }

  // Throws Error unless the rows in use are among those of the memory.
  void require_counts() const {
    if (n >= 0 && first >= 0 && capacity >= first && n <= capacity - first) return;
    throw Error(quoted() + ": " + std::to_string(n) + " rows from row " + std::to_string(first) + " on are not among " +
                    std::to_string(capacity),
                refusals::collection);
  }

  // Throws Error unless `size` bytes can lie at an address with this alignment.
  static void check_address(const std::string &where, const void *address, std::size_t size, std::size_t alignment) {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    if (size == 0) return;
    const auto refuse = [&](const std::string &why) { throw Error(where + ": " + why, refusals::collection); };
    if (begin == 0) refuse("null pointer");
    if (begin % alignment != 0) refuse("not aligned to " + std::to_string(alignment));
    if (size > UINTPTR_MAX - begin) refuse(std::to_string(size) + " bytes pass the end of memory");
  }
};

// Owns zeroed memory for n elements of a layout: one buffer, or separate columns. It corresponds to a PortableCollection on
// a host, and converts to Memory. The layout must outlive it.
class Collection {
 public:
  Collection(std::string name, const Layout &layout, std::int64_t n)
      : layout_(&layout), memory_(std::move(name), Columns{}, n) {
    const auto rows = static_cast<std::size_t>(n);
    if (layout.storage == "buffer") {
      memory_.data = allocate(layout.nbytes(rows), layout.alignment);
      return;
    }
    for (const Column &column : layout.columns) {
      const std::size_t size = bytes_of(column.kind == "scalar" ? 1 : rows, column.itemsize);
      for (std::size_t k = 0; k < column.components; ++k) {
        memory_.columns[column.name].push_back(allocate(size, layout.alignment_of(column)));
      }
    }
  }

  std::int64_t size() const { return memory_.n; }
  const Layout &layout() const { return *layout_; }

  // The address of the buffer. Throws Error if the columns are separate.
  void *data() const {
    if (layout_->storage != "buffer") {
      throw Error("'" + memory_.collection + "' has separate columns: column(name) is the address of one", refusals::collection);
    }
    return memory_.data;
  }

  // A component of a column (for an Eigen matrix: column * rows + row). T must have the size of an element, or one byte.
  template <typename T>
  T *column(const std::string &name, std::size_t component = 0) const {
    const Column &column = (*layout_)[name];
    if (sizeof(T) != 1 && sizeof(T) != column.itemsize) {
      throw Error("column '" + name + "' is " + column.dtype + ": its elements have " + std::to_string(column.itemsize) +
                  " bytes, not " + std::to_string(sizeof(T)),
                  refusals::collection);
    }
    if (component >= column.components) {
      throw Error("column '" + name + "' has no component " + std::to_string(component), refusals::collection);
    }
    return reinterpret_cast<T *>(memory_.address(*layout_, column, component));
  }

  Memory memory() const { return memory_; }
  operator Memory() const { return memory_; }

  // Each piece of memory with its size in bytes, padding included.
  using Piece = std::pair<std::unique_ptr<void, void (*)(void *)>, std::size_t>;
  const std::vector<Piece> &pieces() const { return pieces_; }

 private:
  // Zeroed memory, which this object owns; at least one byte, so that each column has an address.
  void *allocate(std::size_t size, std::size_t alignment) {
    const std::size_t least = std::max(alignment, sizeof(void *));
    const std::size_t bytes = padded(std::max<std::size_t>(size, 1), least);
    std::unique_ptr<void, void (*)(void *)> memory(std::aligned_alloc(least, bytes), std::free);
    if (memory == nullptr) {
      throw Error("collection '" + memory_.collection + "': no memory for " + std::to_string(bytes) + " bytes", refusals::collection);
    }
    pieces_.emplace_back(std::move(memory), bytes);
    return std::memset(pieces_.back().first.get(), 0, bytes);
  }

  const Layout *layout_;
  Memory memory_;
  std::vector<Piece> pieces_;
};

// Walks through a buffer column by column, and sets each pointer to row `first` of its column.
class Cursor {
 public:
  Cursor(void *buffer, std::int64_t capacity, std::int64_t first, std::size_t alignment)
      : at_(static_cast<char *>(buffer)), capacity_(capacity), first_(first), alignment_(alignment) {}

  // Sets the pointer of a column with one component.
  template <typename T>
  void column(T *&pointer) {
    const std::size_t pitch = padded(bytes_of(static_cast<std::size_t>(capacity_), sizeof(T)), alignment_);
    pointer = reinterpret_cast<T *>(at_) + first_;
    at_ += pitch;
  }
  // Sets the pointers of a column with several components.
  template <typename T, std::size_t N>
  void column(std::array<T *, N> &components) {
    for (T *&component : components) column(component);
  }
  // Sets the pointer of a scalar, which has one element for all rows.
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
