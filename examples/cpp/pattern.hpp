// Inputs from a simple formula, and outputs printed as bits, so that the results of the examples can be compared.
#ifndef PATTERN_HPP
#define PATTERN_HPP

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "soa_model.hpp"

namespace pattern {

inline std::size_t rows(const soa::Collection &event, const soa::Column &column) {
  return column.kind == "scalar" ? 1 : static_cast<std::size_t>(event.size());
}

// Element i of component k of the j-th column is 1 + ((7 i + 13 j + 3 k) mod 101) / 101 as float32; other dtypes stay zero.
inline void fill(const soa::Collection &event) {
  const auto &columns = event.layout().columns;
  for (std::size_t j = 0; j < columns.size(); ++j) {
    if (columns[j].dtype != "float32") continue;
    for (std::size_t k = 0; k < columns[j].components; ++k) {
      auto *values = event.column<float>(columns[j].name, k);
      for (std::size_t i = 0; i < rows(event, columns[j]); ++i) {
        values[i] = static_cast<float>((7 * i + 13 * j + 3 * k) % 101) / 101.0f + 1.0f;
      }
    }
  }
}

inline void print(const soa::Collection &event) {
  for (const soa::Column &column : event.layout().columns) {
    for (std::size_t k = 0; k < column.components; ++k) {
      const std::string name = column.kind == "eigen" ? column.name + "." + std::to_string(k) : column.name;
      const auto *values = event.column<char>(column.name, k);
      for (std::size_t i = 0; i < rows(event, column); ++i) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, values + i * column.itemsize, column.itemsize);
        std::printf("%s %zu %0*" PRIx64 "\n", name.c_str(), i, static_cast<int>(2 * column.itemsize), bits);
      }
    }
  }
}

}  // namespace pattern

#endif
