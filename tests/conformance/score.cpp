// score ARTIFACT FILE in:NAME=N ... out:NAME=N ...: reads the columns of the inputs from FILE, runs the model ten times,
// and writes the columns of the outputs to FILE.out.
#include <cstdio>
#include <iostream>
#include <vector>

#include "soa_model.hpp"

namespace {

template <class Move>
bool each_column(const soa::Collection &event, const Move &move) {
  for (const soa::Column &column : event.layout().columns) {
    const auto rows = column.kind == "scalar" ? 1 : static_cast<std::size_t>(event.size());
    for (std::size_t k = 0; k < column.components; ++k) {
      if (move(event.column<char>(column.name, k), column.itemsize, rows) != rows) return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    const soa::Model model = soa::Model::open(argv[1]);
    const std::string file = argv[2];
    std::vector<soa::Collection> events;
    std::vector<soa::Memory> memory;
    for (int k = 3; k < argc; ++k) {
      const std::string word = argv[k];
      const auto from = word.find(':') + 1, to = word.find('=');
      events.push_back(model.collection(word.substr(from, to - from), std::stoll(word.substr(to + 1))));
    }
    std::FILE *const in = std::fopen(file.c_str(), "rb"), *const out = std::fopen((file + ".out").c_str(), "wb");
    if (in == nullptr || out == nullptr) return 2;
    for (std::size_t k = 0; k < events.size(); ++k) {
      const auto read = [&](char *to, std::size_t size, std::size_t rows) { return std::fread(to, size, rows, in); };
      if (argv[k + 3][0] == 'i' && !each_column(events[k], read)) return 3;
      memory.push_back(events[k]);
    }
    soa::Binding run = model.bind(memory);
    for (int call = 0; call < 10; ++call) run();
    for (std::size_t k = 0; k < events.size(); ++k) {
      const auto write = [&](char *from, std::size_t size, std::size_t rows) { return std::fwrite(from, size, rows, out); };
      if (argv[k + 3][0] == 'o' && !each_column(events[k], write)) return 3;
    }
    return std::fclose(in) + std::fclose(out);
  } catch (const soa::Error &error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
