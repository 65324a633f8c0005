// soa_layout: the columns of a model, and where their bytes lie.
//
// A buffer has the layout of CMSSW's GENERATE_SOA_LAYOUT. Errors are thrown as soa::Error with one line each.
#ifndef SOA_LAYOUT_HPP
#define SOA_LAYOUT_HPP

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "soa_error.hpp"

namespace soa {

// `bytes` rounded up to a multiple of `alignment`, which is not 0.
constexpr std::size_t padded(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// count * size + more, in bytes. Throws Error if no memory can be so large.
inline std::size_t bytes_of(std::size_t count, std::size_t size, std::size_t more = 0) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(bytes, more, &bytes) || bytes > PTRDIFF_MAX / 2) {
    throw Error(std::to_string(count) + " times " + std::to_string(size) + " bytes pass the end of memory",
                refusals::collection);
  }
  return bytes;
}

struct Column {
  std::string name, dtype, kind;
  std::size_t itemsize = 0, components = 1;

  // True for structs and arrays, which are never passed to a model. Such an element needs no alignment.
  bool opaque() const { return dtype.compare(0, 6, "opaque") == 0; }
  bool operator==(const Column &other) const {
    return name == other.name && dtype == other.dtype && itemsize == other.itemsize && kind == other.kind &&
           components == other.components;
  }
};

// The byte layout of one collection. storage is "buffer" or "columns"; offset() and nbytes() need a
// buffer.
class Layout {
 public:
  std::vector<Column> columns;
  std::size_t alignment = 128;
  std::string rows, storage = "buffer";

  bool operator==(const Layout &other) const {
    return columns == other.columns && alignment == other.alignment && rows == other.rows && storage == other.storage;
  }

  // The alignment of a separate column's address, in bytes.
  std::size_t alignment_of(const Column &column) const {
    return column.opaque() ? alignment : std::max(alignment, column.itemsize);
  }

  // The distance, in rows, of rows at which every column is aligned as at row 0.
  std::size_t row_step() const {
    std::size_t step = 1;
    for (const Column &column : columns) {
      if (!column.opaque()) step = std::max(step, alignment_of(column) / column.itemsize);
    }
    return step;
  }

  // The distance of two components of a column, in bytes.
  std::size_t pitch(const Column &column, std::size_t n) const {
    return padded(bytes_of(column.kind == "scalar" ? 1 : n, column.itemsize), alignment);
  }
  // Where a column begins in a buffer of n elements, in bytes. Throws Error if there is no such column or buffer.
  std::size_t offset(const std::string &name, std::size_t n) const {
    require_buffer();
    std::size_t bytes = 0;
    for (const Column &column : columns) {
      if (column.name == name) return bytes;
      bytes = bytes_of(pitch(column, n), column.components, bytes);
    }
    throw Error("no column '" + name + "'", refusals::layout);
  }
  // A column; null if there is none of this name.
  const Column *find(const std::string &name) const {
    for (const Column &column : columns) {
      if (column.name == name) return &column;
    }
    return nullptr;
  }
  // A column; throws Error if there is none of this name.
  const Column &operator[](const std::string &name) const {
    if (const Column *column = find(name)) return *column;
    throw Error("no column '" + name + "'", refusals::layout);
  }
  // The size of a buffer of n elements. Throws Error if the columns are separate.
  std::size_t nbytes(std::size_t n) const {
    require_buffer();
    std::size_t total = 0;
    for (const Column &column : columns) total = bytes_of(pitch(column, n), column.components, total);
    return total;
  }

 private:
  void require_buffer() const {
    if (storage != "buffer") throw Error("separate columns have no place in a buffer", refusals::layout);
  }
};

}  // namespace soa

#endif
