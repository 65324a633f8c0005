// A model's output as a column of an RDataFrame, computed for a cluster of entries at a time.
//
//   dataframe BUNDLE FILE TREE INPUT_COLLECTION OUTPUT_COLLECTION COLUMN
//
// The tree must have a branch of floats with the name of each input column. The program prints the mean of COLUMN and
// the number of entries. Only one file is possible: with several, RDataFrame's entry numbers are not those of a file.
#include <ROOT/RDataFrame.hxx>
#include <TFile.h>
#include <TTree.h>
#include <TTreeReader.h>
#include <TTreeReaderValue.h>

#include <cstdio>
#include <iostream>
#include <memory>

#include "cluster_scores.hpp"

namespace {

// The first entry of each cluster of a tree, and the tree's end. Clusters of more than `most` entries are divided.
std::vector<std::int64_t> clusters_of(TTree &tree, std::int64_t most) {
  std::vector<std::int64_t> found;
  TTree::TClusterIterator each = tree.GetClusterIterator(0);
  for (Long64_t begin = each(); begin < tree.GetEntries(); begin = each()) {
    for (Long64_t at = begin; at < each.GetNextEntry(); at += most) found.push_back(at);
  }
  found.push_back(tree.GetEntries());
  return found;
}

// Each slot opens the file separately, because a ROOT reader must stay in one thread.
struct Reader {
  TFile file;
  TTreeReader tree;
  std::vector<std::unique_ptr<TTreeReaderValue<float>>> values;

  Reader(const char *path, const char *name, const soa::Layout &layout) : file(path), tree(name, &file) {
    for (const soa::Column &column : layout.columns) {
      values.push_back(std::make_unique<TTreeReaderValue<float>>(tree, column.name.c_str()));
    }
  }

  void fill(std::int64_t begin, const soa::Collection &inputs) {
    tree.SetEntriesRange(begin, begin + inputs.size());
    for (std::int64_t i = 0; tree.Next(); ++i) {
      for (std::size_t j = 0; j < values.size(); ++j) inputs.column<float>(inputs.layout().columns[j].name)[i] = **values[j];
    }
  }
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 7) {
    std::cerr << "usage: dataframe BUNDLE FILE TREE INPUT_COLLECTION OUTPUT_COLLECTION COLUMN\n";
    return 2;
  }
  try {
    soa::Loading loading;
    loading.test = true;
    const soa::Model model = soa::Model::load(argv[1], loading);
    ROOT::RDataFrame frame(argv[3], argv[2]);
    const unsigned slots = frame.GetNSlots();
    const auto readers = std::make_shared<std::vector<std::unique_ptr<Reader>>>();
    for (unsigned slot = 0; slot < slots; ++slot) {
      readers->push_back(std::make_unique<Reader>(argv[2], argv[3], model.layout(argv[4])));
    }
    TFile file(argv[2]);
    const ClusterScores scores(
        model, slots, clusters_of(*file.Get<TTree>(argv[3]), 1000),
        [readers](unsigned slot, std::int64_t begin, const soa::Collection &inputs) {
          (*readers)[slot]->fill(begin, inputs);
        },
        argv[4], argv[5], argv[6]);
    auto scored = frame.DefineSlotEntry("score", [scores](unsigned slot, ULong64_t entry) { return scores(slot, entry); });
    auto mean = scored.Mean<float>("score");
    auto count = scored.Count();
    std::printf("%llu entries, mean %s %.6f\n", static_cast<unsigned long long>(*count), argv[6], *mean);
    return 0;
  } catch (const std::exception &error) {
    std::cerr << "dataframe: " << error.what() << '\n';
    return 1;
  }
}
