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

using Buffer = std::unique_ptr<void, void (*)(void *)>;

Buffer allocate(const soa::Layout &layout, std::size_t n) {
  const std::size_t bytes = std::max(layout.nbytes(n), layout.alignment);
  Buffer buffer(std::aligned_alloc(layout.alignment, bytes), std::free);
  std::memset(buffer.get(), 0, bytes);
  return buffer;
}

void fill(const soa::Layout &layout, void *buffer, std::size_t n) {
  for (std::size_t j = 0; j < layout.columns.size(); ++j) {
    const soa::Column &column = layout.columns[j];
    if (column.dtype != "float32") continue;
    for (std::size_t k = 0; k < column.components; ++k) {
      auto *values = reinterpret_cast<float *>(static_cast<char *>(buffer) +
                                               layout.offset(column.name, n) +
                                               k * layout.pitch(column, n));
      const std::size_t count = column.kind == "scalar" ? 1 : n;
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>((7 * i + 13 * j + 3 * k) % 101) / 101.0f + 1.0f;
      }
    }
  }
}

void print(const soa::Layout &layout, const void *buffer, std::size_t n) {
  for (const soa::Column &column : layout.columns) {
    const char *values = static_cast<const char *>(buffer) + layout.offset(column.name, n);
    for (std::size_t i = 0; i < n; ++i) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, values + i * column.itemsize, column.itemsize);
      std::printf("%s %zu %0*" PRIx64 "\n", column.name.c_str(), i, static_cast<int>(2 * column.itemsize),
                  bits);
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
    const Buffer inputs = allocate(in, n), outputs = allocate(out, n);
    fill(in, inputs.get(), n);
    const auto rows = static_cast<std::int64_t>(n);
    soa::Binding run = model.bind({{argv[3], inputs.get(), rows}, {argv[4], outputs.get(), rows}});
    run();
    print(out, outputs.get(), n);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "run_bundle: " << error.what() << '\n';
    return 1;
  }
}
