// Run a bundle's artifact without Python: fill every input column with a known pattern, run, print
// every output value as its bits.
//
//   run_bundle BUNDLE/targets/cpu/x86-64-v3/aoti N INPUT_COLLECTION OUTPUT_COLLECTION
//
// Input element i of component k of the j-th column is 1 + ((7 i + 13 j + 3 k) mod 101) / 101 as float32
// (other dtypes stay zero).
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>

#include "soa_model.hpp"

namespace {

// n zeroed elements of a layout: in one buffer, or each column by itself where the layout says so.
class Event {
 public:
  Event(const soa::Layout &layout, std::size_t n) : layout_(layout), n_(n) {
    if (layout.storage == "buffer") {
      allocate(layout.nbytes(n), layout.alignment);
      return;
    }
    for (const soa::Column &column : layout.columns) {
      for (std::size_t k = 0; k < column.components; ++k) {
        columns_[column.name].push_back(allocate(rows(column) * column.itemsize, layout.alignment_of(column)));
      }
    }
  }

  std::size_t rows(const soa::Column &column) const { return column.kind == "scalar" ? 1 : n_; }

  char *address(const soa::Column &column, std::size_t k) const {
    if (layout_.storage == "columns") return static_cast<char *>(columns_.at(column.name)[k]);
    return static_cast<char *>(memory_[0].get()) + layout_.offset(column.name, n_) + k * layout_.pitch(column, n_);
  }

  soa::Memory memory(const std::string &collection) const {
    const auto n = static_cast<std::int64_t>(n_);
    if (layout_.storage == "columns") return {collection, columns_, n};
    return {collection, memory_[0].get(), n};
  }

 private:
  void *allocate(std::size_t size, std::size_t alignment) {
    const std::size_t bytes = std::max<std::size_t>((size + alignment - 1) / alignment, 1) * alignment;
    memory_.emplace_back(std::aligned_alloc(alignment, bytes), std::free);
    return std::memset(memory_.back().get(), 0, bytes);
  }

  const soa::Layout &layout_;
  std::size_t n_;
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
  soa::Columns columns_;
};

void fill(const soa::Layout &layout, const Event &event) {
  for (std::size_t j = 0; j < layout.columns.size(); ++j) {
    const soa::Column &column = layout.columns[j];
    if (column.dtype != "float32") continue;
    for (std::size_t k = 0; k < column.components; ++k) {
      auto *values = reinterpret_cast<float *>(event.address(column, k));
      for (std::size_t i = 0; i < event.rows(column); ++i) {
        values[i] = static_cast<float>((7 * i + 13 * j + 3 * k) % 101) / 101.0f + 1.0f;
      }
    }
  }
}

void print(const soa::Layout &layout, const Event &event) {
  for (const soa::Column &column : layout.columns) {
    for (std::size_t k = 0; k < column.components; ++k) {
      const std::string name = column.kind == "eigen" ? column.name + "." + std::to_string(k) : column.name;
      const char *values = event.address(column, k);
      for (std::size_t i = 0; i < event.rows(column); ++i) {
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
    const auto n = static_cast<std::size_t>(std::strtoull(argv[2], nullptr, 10));
    const soa::Model model = soa::Model::open(argv[1]);
    const soa::Layout &in = model.layout(argv[3]), &out = model.layout(argv[4]);
    const Event inputs(in, n), outputs(out, n);
    fill(in, inputs);
    soa::Binding run = model.bind({inputs.memory(argv[3]), outputs.memory(argv[4])});
    run();
    print(out, outputs);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "run_bundle: " << error.what() << '\n';
    return 1;
  }
}
