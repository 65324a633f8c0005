// The structure of a CMSSW producer: the module owns a Model, event data are PortableCollections, and
// each event calls forward() once with a queue. The event loop below replaces the framework, so CMSSW
// is not needed to build it.
//
//   producer BUNDLE EVENTS [--test]
//
// BUNDLE is the folder from `pipeline pull jet-tagger@production BUNDLE`; with --test any bundle is accepted. It is run
// as the demo's jet tagger, on events of varying size. The number of jets and their mean p_top are printed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "soa_model.hpp"

namespace {

// The part of alpaka's queue that a model needs: alpaka::getNativeHandle(queue), null on the host.
struct Queue {
  void *native_handle = nullptr;
};

using PortableCollection = soa::Collection;  // it has CMSSW's layout, too

class JetTagger {
 public:
  JetTagger(const std::string &bundle, const soa::Loading &loading) : model_(soa::Model::load(bundle, loading)) {}

  // Input columns in, output columns out, in the event's own memory.
  void produce(Queue &queue, const PortableCollection &jets, const PortableCollection &tags) const {
    auto forward = model_.bind({{"jets", jets.data(), jets.size()}, {"tags", tags.data(), tags.size()}});
    forward(queue.native_handle);
  }

  PortableCollection collection(const std::string &name, std::int64_t n) const { return model_.collection(name, n); }

 private:
  soa::Model model_;
};

void simulate(const PortableCollection &jets, std::size_t event) {
  for (std::int64_t i = 0; i < jets.size(); ++i) {
    jets.column<float>("pt")[i] = 100.0f + static_cast<float>((event * 31 + static_cast<std::size_t>(i) * 17) % 400);
    jets.column<float>("mass")[i] = 5.0f + static_cast<float>((event + static_cast<std::size_t>(i)) % 170);
    for (std::size_t k = 0; k < 16; ++k) {
      const float share = 1.0f / static_cast<float>(2 + k);
      jets.column<float>("part_pt", k)[i] = jets.column<float>("pt")[i] * share;
      jets.column<float>("part_energy", k)[i] = jets.column<float>("pt")[i] * share * 1.1f;
      jets.column<float>("part_deta", k)[i] = 0.02f * static_cast<float>(k % 5);
      jets.column<float>("part_dphi", k)[i] = -0.03f * static_cast<float>(k % 7);
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 3) {
    std::cerr << "usage: producer BUNDLE EVENTS [--test]\n";
    return 2;
  }
  try {
    soa::Loading loading;
    loading.test = argc > 3 && std::strcmp(argv[3], "--test") == 0;
    const JetTagger tagger(argv[1], loading);
    const auto events = std::strtoull(argv[2], nullptr, 10);
    Queue queue;
    double sum = 0.0;
    std::size_t count = 0;
    for (std::size_t event = 0; event < events; ++event) {
      const auto n = static_cast<std::int64_t>(event % 12);  // an event may have no jets
      const PortableCollection jets = tagger.collection("jets", n), tags = tagger.collection("tags", n);
      simulate(jets, event);
      tagger.produce(queue, jets, tags);
      for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(tags.column<float>("p_top")[i]);
      count += static_cast<std::size_t>(n);
    }
    std::printf("%zu jets, mean p_top %.6f\n", count, count > 0 ? sum / static_cast<double>(count) : 0.0);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "producer: " << error.what() << '\n';
    return 1;
  }
}
