// A function for RDataFrame's DefineSlotEntry: one value for each entry, computed for a cluster of entries at once.
//
// RDataFrame asks for one entry after another. When a slot first asks for an entry of a cluster, the cluster's columns
// are read and the model runs once on all its rows; the other entries take their values from this run. Entries that a
// filter drops are computed too. This file does not need ROOT.
#ifndef CLUSTER_SCORES_HPP
#define CLUSTER_SCORES_HPP

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "soa_model.hpp"

class ClusterScores {
 public:
  // Fills the input collection with inputs.size() entries from `begin` on. Each slot is called in one thread at a time.
  using Read = std::function<void(unsigned slot, std::int64_t begin, const soa::Collection &inputs)>;

  // clusters: the first entry of each, ascending, and the end of the last one. inputs, outputs, column: names of two
  // collections of the model and of an output column, which is float32.
  ClusterScores(const soa::Model &model, unsigned slots, std::vector<std::int64_t> clusters, Read read,
                std::string inputs, std::string outputs, std::string column)
      : shared_(std::make_shared<Shared>(Shared{model, std::move(clusters), std::move(read), std::move(inputs),
                                                std::move(outputs), std::move(column), std::vector<Slot>(slots)})) {}

  float operator()(unsigned slot, std::uint64_t entry) const {
    Slot &mine = shared_->slots.at(slot);
    const auto wanted = static_cast<std::int64_t>(entry);
    if (wanted < mine.begin || wanted >= mine.begin + static_cast<std::int64_t>(mine.scores.size())) run(slot, wanted);
    return mine.scores[static_cast<std::size_t>(wanted - mine.begin)];
  }

 private:
  struct Slot {
    std::int64_t begin = 0;
    std::vector<float> scores;
  };
  struct Shared {
    soa::Model model;
    std::vector<std::int64_t> clusters;
    Read read;
    std::string inputs, outputs, column;
    std::vector<Slot> slots;
  };

  void run(unsigned slot, std::int64_t entry) const {
    const Shared &s = *shared_;
    const auto after = std::upper_bound(s.clusters.begin(), s.clusters.end(), entry);
    if (after == s.clusters.begin() || after == s.clusters.end()) {
      throw soa::Error("entry " + std::to_string(entry) + " is in no cluster");
    }
    const std::int64_t begin = *(after - 1), n = *after - begin;
    const soa::Collection inputs = s.model.collection(s.inputs, n), outputs = s.model.collection(s.outputs, n);
    s.read(slot, begin, inputs);
    s.model.bind({inputs, outputs})();
    const float *scores = outputs.column<float>(s.column);
    shared_->slots[slot] = {begin, std::vector<float>(scores, scores + n)};
  }

  std::shared_ptr<Shared> shared_;
};

#endif
