// clusters BUNDLE: examples/cpp/cluster_scores.hpp with clusters of its own, entry by entry, against one run on each
// entry alone. Printed: runs of the model, and entries whose score is off by more than 1e-5.
#include <cmath>
#include <cstdio>
#include <iostream>

#include "cluster_scores.hpp"
#include "jets.hpp"

namespace {

void fill(std::int64_t begin, const soa::Collection &inputs) {
  for (const soa::Column &column : inputs.layout().columns) {
    for (std::int64_t i = 0; i < inputs.size(); ++i) {
      inputs.column<float>(column.name)[i] = static_cast<float>(((begin + i) * 7 + column.name[0] * 13) % 101) / 101;
    }
  }
}

}  // namespace

int main(int, char **argv) {
  try {
    soa::Loading loading;
    loading.test = true;
    const soa::Model model = jets::load(argv[1], loading);
    int runs = 0, off = 0;
    const ClusterScores scores(
        model, 2, {0, 10, 11, 300},
        [&](unsigned, std::int64_t begin, const soa::Collection &inputs) {
          ++runs;
          fill(begin, inputs);
        },
        "jets", "tags", "y");
    for (std::uint64_t entry = 0; entry < 300; ++entry) {
      const soa::Collection inputs = model.collection("jets", 1), outputs = model.collection("tags", 1);
      fill(static_cast<std::int64_t>(entry), inputs);
      model.bind({inputs, outputs})();
      off += std::fabs(scores(entry % 2, entry) - outputs.column<float>("y")[0]) > 1e-5f ? 1 : 0;
    }
    std::printf("%d runs, %d off\n", runs, off);
    scores(0, 300);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
