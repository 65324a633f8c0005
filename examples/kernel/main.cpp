// Selects tracks with one launch (select_tracks.hpp), on a CPU.
//
//   pipeline source purity/1 --as cpp --out purity.h     # and vertex.h, in the same way
//   g++ -std=c++17 -O2 -pthread -I . -o select_tracks examples/kernel/main.cpp
//   ./select_tracks TRACKS SELECTED PT PURITY VERTEX
//
// With alpaka itself: g++ -std=c++20 -DWITH_ALPAKA and the other words.
// TRACKS: 13 columns of float32, one after the other. SELECTED: a column of int32 and two of float32.
#include "accelerator.hpp"
#define SOA_FN FN_ACC
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>

#include "select_tracks.hpp"

using accelerator::Buffer;

constexpr int COLUMNS = 13;

Buffer<float> read(const char *path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  const std::streamoff bytes = file.tellg();
  const std::streamoff row = COLUMNS * sizeof(float);
  if (bytes % row != 0) throw std::runtime_error("the file does not have 13 columns of float32");
  Buffer<float> columns(COLUMNS, bytes / row);
  file.seekg(0).read(reinterpret_cast<char *>(columns.memory.data()), bytes);
  return columns;
}

Tracks tracks_of(Buffer<float> &columns) {
  const auto at = [&](std::int64_t k) { return columns.column(k); };
  return {columns.n, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12)};
}

// Memory for selected tracks.
struct Selection {
  std::uint32_t count = 0;
  Buffer<std::int32_t> index;
  Buffer<float> scores;

  explicit Selection(std::int64_t n) : index(1, n), scores(2, n) {}

  Selected view() { return {&count, index.column(0), scores.column(0), scores.column(1)}; }

  void write(const char *path) {
    std::ofstream file(path, std::ios::binary);
    for (const void *column : {static_cast<void *>(index.column(0)), static_cast<void *>(scores.column(0)),
                               static_cast<void *>(scores.column(1))}) {
      file.write(static_cast<const char *>(column), std::streamsize{4} * count);
    }
    if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + path);
  }
};

void run(int count, char **words) {
  if (count != 6) throw std::runtime_error("select_tracks TRACKS SELECTED PT PURITY VERTEX");
  if (purity::self_test() + vertex::self_test()) throw std::runtime_error("this compiler gives other bits");
  Buffer<float> memory = read(words[1]);
  const Tracks tracks = tracks_of(memory);
  const Cuts cuts = {std::strtof(words[3], nullptr), std::strtof(words[4], nullptr), std::strtof(words[5], nullptr)};
  Selection selection(tracks.n);
  accelerator::Queue queue;
  accelerator::launch(queue, 2, 32, SelectTracks{}, tracks, cuts, selection.view());
  queue.wait();
  selection.write(words[2]);
  std::printf("%u of %lld tracks\n", selection.count, static_cast<long long>(tracks.n));
}

int main(int count, char **words) {
  try {
    run(count, words);
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
