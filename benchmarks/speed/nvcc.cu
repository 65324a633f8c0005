// Runs a network's CUDA header on a GPU: self-test, bits, and the time of a kernel (benchmarks/speed/nvcc.py).
// Files in the working folder: net.h and settings.h, which defines INPUTS, OUTPUTS, ROWS and COLUMNS_AT(base, n), the columns
// of n rows; inputs and wanted, columns of ROWS rows.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "net.h"
#include "settings.h"

#define OK(call)                                             \
  if (const cudaError_t code = (call)) {                     \
    std::printf("%s: %s\n", #call, cudaGetErrorString(code)); \
    return 1;                                                \
  }

__global__ void self_test(int *failed) { *failed = net::self_test(); }

std::vector<float> read(const char *path, long columns) {
  std::vector<float> found(columns * ROWS);
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char *>(found.data()), 4 * found.size());
  return found;
}

int main() {
  constexpr long n = ROWS, many = 1 << 20, threads = 128;
  const std::vector<float> given = read("inputs", INPUTS), wanted = read("wanted", OUTPUTS);
  std::vector<float> found(wanted.size(), -7);
  float *few, *all;
  int *failed, wrong = -1;
  OK(cudaMalloc(&failed, 4));
  OK(cudaMalloc(&few, 4 * n * (INPUTS + OUTPUTS)));
  OK(cudaMalloc(&all, 4 * many * (INPUTS + OUTPUTS)));
  OK(cudaMemcpy(few, given.data(), 4 * given.size(), cudaMemcpyHostToDevice));
  OK(cudaMemcpy(few + given.size(), found.data(), 4 * found.size(), cudaMemcpyHostToDevice));
  for (long c = 0; c < INPUTS; ++c) {
    for (long at = 0; at < many; at += n) {
      OK(cudaMemcpy(all + c * many + at, few + c * n, 4 * std::min(n, many - at), cudaMemcpyDeviceToDevice));
    }
  }
  self_test<<<1, 1>>>(failed);
  OK(cudaMemcpy(&wrong, failed, 4, cudaMemcpyDeviceToHost));
  net::kernel<<<(n + threads - 1) / threads, threads>>>(COLUMNS_AT(few, n), n);
  OK(cudaMemcpy(found.data(), few + given.size(), 4 * found.size(), cudaMemcpyDeviceToHost));
  long other = 0;
  for (size_t i = 0; i < found.size(); ++i) other += std::memcmp(&found[i], &wanted[i], 4) != 0;
  cudaEvent_t begin, end;
  OK(cudaEventCreate(&begin));
  OK(cudaEventCreate(&end));
  float best = 1e9f;
  for (int k = 0; k < 8; ++k) {
    float ms = 0;
    OK(cudaEventRecord(begin));
    net::kernel<<<(many + threads - 1) / threads, threads>>>(COLUMNS_AT(all, many), many);
    OK(cudaEventRecord(end));
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  OK(cudaGetLastError());
  std::printf("self-test %s, %ld of %zu answers with other bits, %.3f ms for %ld rows\n", wrong ? "FAILED" : "passed", other,
              found.size(), best, many);
  return wrong != 0 || other != 0;
}
