// threads BUNDLE THREADS EVENTS: all threads run the same events on one model. Printed: how many runs gave other bits
// than the first one of their size did in the main thread; how often weights.bin is mapped, and libtorch; kB of this
// process's memory with the model, and after all runs.
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <thread>

#include "jets.hpp"

namespace {

long resident_kb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, 6, "VmRSS:") == 0) return std::stol(line.substr(6));
  }
  return 0;
}

int mappings_of(const std::string &name) {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find(name) != std::string::npos ? 1 : 0;
  return found;
}

// The answers to event `number`, of a size that follows from it.
std::vector<float> answers(const soa::Model &model, int number) {
  const std::int64_t n = 1 + number * 37 % 900;
  const soa::Collection inputs = model.collection("jets", n), outputs = model.collection("tags", n);
  for (const char *column : {"a", "b", "c", "d", "e", "f"}) {
    for (std::int64_t i = 0; i < n; ++i) inputs.column<float>(column)[i] = static_cast<float>((i * 7 + *column * number) % 101) / 101;
  }
  model.bind({inputs, outputs})();
  std::vector<float> found;
  for (const char *column : {"x", "y", "z"}) found.insert(found.end(), outputs.column<float>(column), outputs.column<float>(column) + n);
  return found;
}

}  // namespace

int main(int, char **argv) {
  try {
    const int threads = std::stoi(argv[2]), events = std::stoi(argv[3]);
    soa::Loading loading;
    loading.test = loading.any_version = true;
    loading.instances = threads;
    const soa::Model model = jets::load(argv[1], loading);
    const long before = resident_kb();
    std::vector<std::vector<float>> expected;
    for (int event = 0; event < events; ++event) expected.push_back(answers(model, event));
    std::atomic<int> different{0};
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t) {
      all.emplace_back([&, t] {
        for (int event = 0; event < events; ++event) {
          const int number = (event + t) % events;
          const std::vector<float> found = answers(model, number);
          const auto &wanted = expected[static_cast<std::size_t>(number)];
          if (found.size() != wanted.size() || std::memcmp(found.data(), wanted.data(), found.size() * sizeof(float)) != 0) ++different;
        }
      });
    }
    for (std::thread &thread : all) thread.join();
    std::printf("%d %d %d %ld %ld\n", different.load(), mappings_of("weights.bin"), mappings_of("libtorch"), before,
                resident_kb());
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
