// Selects tracks on an NVIDIA GPU with one launch (select_tracks.hpp), and compares it with four launches that pass over
// columns: features, one network, the other network, cuts. Both must select the same tracks with the same bits.
//
//   pipeline source purity/1 --as cuda --out purity.h     # and vertex.h, in the same way
//   nvcc -std=c++17 -O2 -arch=sm_90 -I . -o select_tracks examples/kernel/main.cu
//   ./select_tracks TRACKS SELECTED PT PURITY VERTEX
//
// TRACKS and SELECTED are those of main.cpp.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelerator.hpp"
#include "select_tracks.hpp"

constexpr int COLUMNS = 13, THREADS = 128;

void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

// Columns of n values on the GPU.
template <class T> struct Buffer {
  T *memory = nullptr;
  std::int64_t n;
  Buffer(std::int64_t columns, std::int64_t rows) : n(rows) { check(cudaMalloc(&memory, std::max<std::int64_t>(columns * rows, 1) * sizeof(T))); }
  Buffer(const Buffer &) = delete;
  ~Buffer() { cudaFree(memory); }
  T *column(std::int64_t k) const { return memory + k * n; }
};

__device__ std::int64_t own_row() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__global__ void select(Tracks tracks, Cuts cuts, Selected out) {
  const accelerator::Accelerator acc{own_row(), static_cast<std::int64_t>(gridDim.x) * blockDim.x};
  SelectTracks{}(acc, tracks, cuts, out);
}

__global__ void features(Tracks tracks, float *pt, float *dxy) {
  const std::int64_t i = own_row();
  if (i >= tracks.n) return;
  pt[i] = significance(tracks.pt[i], tracks.pt_error[i]);
  dxy[i] = significance(tracks.dxy[i], tracks.dxy_error[i]);
}

__global__ void cut(Tracks tracks, Cuts cuts, const float *purity, const float *vertex, Selected out) {
  const std::int64_t i = own_row();
  if (i >= tracks.n || !preselected(tracks.pt[i], tracks.eta[i], cuts)) return;
  if (!(purity[i] > cuts.purity && vertex[i] > cuts.vertex)) return;
  write(out, atomicAdd(out.count, 1u), i, purity[i], vertex[i]);
}

__global__ void self_tests(int *failed) { *failed = purity::self_test() + vertex::self_test(); }

// The selected tracks in the order of their index: a column of int32 and the bits of two of float32.
std::vector<std::uint32_t> selected(const Buffer<std::uint32_t> &count, const Buffer<std::uint32_t> &columns) {
  std::uint32_t n = 0;
  check(cudaMemcpy(&n, count.memory, sizeof n, cudaMemcpyDeviceToHost));
  std::vector<std::uint32_t> all(3 * n), order(n), sorted(3 * n);
  for (int k = 0; k < 3; ++k) check(cudaMemcpy(all.data() + k * n, columns.column(k), 4 * n, cudaMemcpyDeviceToHost));
  for (std::uint32_t i = 0; i < n; ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return all[a] < all[b]; });
  for (std::size_t i = 0; i < sorted.size(); ++i) sorted[i] = all[i / n * n + order[i % n]];
  return sorted;
}

// The shortest of some runs, in milliseconds.
template <class Run> float best_ms(const Run &run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float best = 1e9f;
  for (int k = 0; k < 10; ++k) {
    float ms = 0;
    check(cudaEventRecord(begin));
    run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  check(cudaGetLastError());
  return best;
}

void run(char **words) {
  std::ifstream file(words[1], std::ios::binary);
  const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  if (!file || content.size() % (COLUMNS * sizeof(float)) != 0) {
    throw std::runtime_error(std::string(words[1]) + " does not have 13 columns of float32");
  }
  const std::int64_t n = content.size() / (COLUMNS * sizeof(float));
  const Buffer<float> given(COLUMNS, n), passes(4, n);
  const Buffer<std::uint32_t> count(1, 1), out(3, n);
  check(cudaMemcpy(given.memory, content.data(), content.size(), cudaMemcpyHostToDevice));
  const auto c = [&](int k) { return given.column(k); };
  const Tracks tracks{n, c(0), c(1), c(2), c(3), c(4), c(5), c(6), c(7), c(8), c(9), c(10), c(11), c(12)};
  const Cuts cuts{std::strtof(words[3], nullptr), std::strtof(words[4], nullptr), std::strtof(words[5], nullptr)};
  const Selected to{count.memory, reinterpret_cast<std::int32_t *>(out.column(0)), reinterpret_cast<float *>(out.column(1)),
                    reinterpret_cast<float *>(out.column(2))};
  const int blocks = std::max<int>((n + THREADS - 1) / THREADS, 1);
  int failed = 0;
  self_tests<<<1, 1>>>(reinterpret_cast<int *>(count.memory));
  check(cudaMemcpy(&failed, count.memory, sizeof failed, cudaMemcpyDeviceToHost));
  if (failed != 0) throw std::runtime_error("this compiler gives other bits");
  const float one = best_ms([&] {
    cudaMemsetAsync(count.memory, 0, 4);
    select<<<blocks, THREADS>>>(tracks, cuts, to);
  });
  const std::vector<std::uint32_t> found = selected(count, out);
  float *const pt = passes.column(0), *const dxy = passes.column(1), *const p = passes.column(2), *const v = passes.column(3);
  const float four = best_ms([&] {
    cudaMemsetAsync(count.memory, 0, 4);
    features<<<blocks, THREADS>>>(tracks, pt, dxy);
    purity::kernel<<<blocks, THREADS>>>({c(0), c(1), c(2), c(3), c(4), c(5), c(6), c(7), c(8), c(9), c(10), c(11), c(12), pt, dxy, p}, n);
    vertex::kernel<<<blocks, THREADS>>>({c(0), c(1), c(3), c(4), pt, dxy, v}, n);
    cut<<<blocks, THREADS>>>(tracks, cuts, p, v, to);
  });
  if (found != selected(count, out)) throw std::runtime_error("the two ways select different tracks");
  std::ofstream(words[2], std::ios::binary).write(reinterpret_cast<const char *>(found.data()), 4 * found.size());
  std::printf("%zu of %lld tracks; one launch %.3f ms, four launches %.3f ms\n", found.size() / 3, static_cast<long long>(n), one, four);
}

int main(int count, char **words) {
  try {
    if (count != 6) throw std::runtime_error("select_tracks TRACKS SELECTED PT PURITY VERTEX");
    run(words);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
