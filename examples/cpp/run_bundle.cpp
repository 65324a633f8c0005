// Run an artifact without Python: fill every input column with a known pattern, run, print every output value as its
// bits.
//
//   run_bundle BUNDLE/targets/cpu/x86-64-v3/aoti N INPUT_COLLECTION OUTPUT_COLLECTION
//
// Input element i of component k of the j-th column is 1 + ((7 i + 13 j + 3 k) mod 101) / 101 as float32
// (other dtypes stay zero).
#include <cinttypes>
#include <cstdio>
#include <iostream>

#include "soa_model.hpp"

namespace {

std::size_t rows(const soa::Collection &event, const soa::Column &column) {
  return column.kind == "scalar" ? 1 : static_cast<std::size_t>(event.size());
}

void fill(const soa::Collection &event) {
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

void print(const soa::Collection &event) {
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

}  // namespace

int main(int argc, char **argv) {
  if (argc != 5) {
    std::cerr << "usage: run_bundle ARTIFACT_FOLDER N INPUT_COLLECTION OUTPUT_COLLECTION\n";
    return 2;
  }
  try {
    const auto n = std::strtoll(argv[2], nullptr, 10);
    const soa::Model model = soa::Model::open(argv[1]);
    const soa::Collection inputs = model.collection(argv[3], n), outputs = model.collection(argv[4], n);
    fill(inputs);
    model.bind({inputs, outputs})();
    print(outputs);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "run_bundle: " << error.what() << '\n';
    return 1;
  }
}
