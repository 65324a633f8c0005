// Run an artifact without Python: fill every input column with a known pattern, run, and print the bits of every output
// value.
//
//   run_bundle BUNDLE/targets/cpu/x86-64-v3/aoti N INPUT_COLLECTION OUTPUT_COLLECTION
#include <cstdlib>
#include <iostream>

#include "pattern.hpp"

int main(int argc, char **argv) {
  if (argc != 5) {
    std::cerr << "usage: run_bundle ARTIFACT_FOLDER N INPUT_COLLECTION OUTPUT_COLLECTION\n";
    return 2;
  }
  try {
    const auto n = std::strtoll(argv[2], nullptr, 10);
    const soa::Model model = soa::Model::open(argv[1]);
    const soa::Collection inputs = model.collection(argv[3], n), outputs = model.collection(argv[4], n);
    pattern::fill(inputs);
    model.bind({inputs, outputs})();
    pattern::print(outputs);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "run_bundle: " << error.what() << '\n';
    return 1;
  }
}
