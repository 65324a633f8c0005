// Selects tracks with one launch (select_tracks.hpp), and compares its time with that of separate passes over columns.
//
//   pipeline source purity/1 --as cpp --out purity.h     # and vertex.h, in the same way
//   g++ -std=c++17 -O2 -pthread -I . -o select_tracks examples/kernel/main.cpp
//   ./select_tracks TRACKS SELECTED PT PURITY VERTEX [REPETITIONS]
//
// TRACKS: 13 columns of float32, one after the other. SELECTED: a column of int32 and two of float32.
#include "accelerator.hpp"
#define SOA_FN FN_ACC
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
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

Tracks tracks_of(Buffer<float> &of) {
  return {of.n,         of.column(0), of.column(1), of.column(2), of.column(3),  of.column(4),  of.column(5),
          of.column(6), of.column(7), of.column(8), of.column(9), of.column(10), of.column(11), of.column(12)};
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

  bool operator==(const Selection &other) const {
    return count == other.count && index.memory == other.index.memory && scores.memory == other.scores.memory;
  }
};

void launched(const Tracks &tracks, const Cuts &cuts, int blocks, int threads, Selection &out) {
  out.count = 0;
  accelerator::Queue queue;
  accelerator::launch(queue, blocks, threads, SelectTracks{}, tracks, cuts, out.view());
  queue.wait();
}

// The same in passes: features and one network for all tracks, the other network for all tracks, then the cuts.
// `memory`: columns of two features and two scores.
void passes(const Tracks &of, const Cuts &cuts, Buffer<float> &memory, Selection &out) {
  float *of_pt = memory.column(0), *of_dxy = memory.column(1), *purity = memory.column(2), *vertex = memory.column(3);
  for (std::int64_t i = 0; i < of.n; ++i) {
    of_pt[i] = significance(of.pt[i], of.pt_error[i]);
    of_dxy[i] = significance(of.dxy[i], of.dxy_error[i]);
  }
  purity::rows({of.pt, of.eta, of.phi, of.dxy, of.dz, of.pt_error, of.dxy_error, of.dz_error, of.chi2, of.ndof, of.hits,
                of.pixel_hits, of.lost_hits, of_pt, of_dxy, purity}, 0, of.n);
  vertex::rows({of.pt, of.eta, of.dxy, of.dz, of_pt, of_dxy, vertex}, 0, of.n);
  const Selected selected = out.view();
  out.count = 0;
  for (std::int64_t i = 0; i < of.n; ++i) {
    const bool passing = preselected(of.pt[i], of.eta[i], cuts) && purity[i] > cuts.purity && vertex[i] > cuts.vertex;
    if (passing) write(selected, out.count++, i, purity[i], vertex[i]);
  }
}

// The threshold of pt that this share of the tracks passes.
float threshold(const Tracks &tracks, double share) {
  std::vector<float> pts;
  for (std::int64_t i = 0; i < tracks.n; ++i) {
    if (preselected(tracks.pt[i], tracks.eta[i], {0, 0, 0})) pts.push_back(tracks.pt[i]);
  }
  const auto place = std::min(static_cast<std::size_t>(share * static_cast<double>(tracks.n)), pts.size());
  if (place == pts.size()) return 0;
  std::nth_element(pts.begin(), pts.begin() + static_cast<std::ptrdiff_t>(place), pts.end(), std::greater<>());
  return pts[place];
}

// The median of several runs, in milliseconds.
double median_ms(int repetitions, const std::function<void()> &run) {
  std::vector<double> times;
  for (int k = 0; k < repetitions; ++k) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Prints a table of times, all on one CPU thread. Returns whether both ways select the same tracks.
bool timed(const Tracks &tracks, Cuts cuts, int repetitions) {
  bool same = true;
  std::printf("%lld tracks, one CPU thread, median of %d\n", static_cast<long long>(tracks.n), repetitions);
  std::printf("preselected  one launch  separate passes\n");
  for (const double share : {0.05, 0.2, 0.5}) {
    Selection one(tracks.n), many(tracks.n);
    Buffer<float> memory(4, tracks.n);
    cuts.pt = threshold(tracks, share);
    const double launch = median_ms(repetitions, [&] { launched(tracks, cuts, 1, 1, one); });
    const double separate = median_ms(repetitions, [&] { passes(tracks, cuts, memory, many); });
    std::printf("%9.0f %%  %7.2f ms  %12.2f ms\n", 100 * share, launch, separate);
    same = same && one == many;
  }
  return same;
}

int run(int count, char **words) {
  if (count < 6) throw std::runtime_error("select_tracks TRACKS SELECTED PT PURITY VERTEX [REPETITIONS]");
  if (purity::self_test() + vertex::self_test()) throw std::runtime_error("this compiler gives other bits");
  Buffer<float> memory = read(words[1]);
  const Tracks tracks = tracks_of(memory);
  const Cuts cuts = {std::strtof(words[3], nullptr), std::strtof(words[4], nullptr), std::strtof(words[5], nullptr)};
  Selection selection(tracks.n);
  launched(tracks, cuts, 2, 32, selection);
  selection.write(words[2]);
  std::printf("%u of %lld tracks\n", selection.count, static_cast<long long>(tracks.n));
  if (count > 6 && !timed(tracks, cuts, std::max(std::atoi(words[6]), 1))) {
    throw std::runtime_error("the launch and the passes select different tracks");
  }
  return 0;
}

int main(int count, char **words) {
  try {
    return run(count, words);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
