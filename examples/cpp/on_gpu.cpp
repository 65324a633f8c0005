// Run an artifact on GPU memory, without Python and without the CUDA toolkit: only the driver's library is needed.
//
//   on_gpu BUNDLE/targets/cuda/sm_90/lanes N INPUT_COLLECTION OUTPUT_COLLECTION
//   g++ -std=c++17 on_gpu.cpp ... -l:libcuda.so.1
//
// The model uses the given pointers and stream directly. A framework already has both: with alpaka, the buffers of its
// PortableCollections and alpaka::getNativeHandle(queue). The copies here replace the code that fills the memory.
#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "pattern.hpp"

extern "C" {  // from cuda.h
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxPushCurrent_v2(void *context);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);
int cuMemAlloc_v2(std::uintptr_t *address, std::size_t size);
int cuMemFree_v2(std::uintptr_t address);
int cuMemcpyHtoDAsync_v2(std::uintptr_t to, const void *from, std::size_t size, void *stream);
int cuMemcpyDtoHAsync_v2(void *to, std::uintptr_t from, std::size_t size, void *stream);
}

namespace {

void check(int code) {
  if (code != 0) throw soa::Error("the driver says error " + std::to_string(code));
}

// A stream of the device's primary context, which the model uses too.
void *stream_on(int device) {
  void *context = nullptr, *stream = nullptr;
  check(cuInit(0));
  check(cuDevicePrimaryCtxRetain(&context, device));
  check(cuCtxPushCurrent_v2(context));
  check(cuStreamCreate(&stream, 1));
  return stream;
}

// A copy of a host collection on the device.
class OnDevice {
 public:
  OnDevice(const soa::Collection &host, void *stream) : host_(host), stream_(stream) {
    if (host.layout().storage != "buffer") throw soa::Error("this example takes collections in one buffer");
    check(cuMemAlloc_v2(&address_, size()));
    check(cuMemcpyHtoDAsync_v2(address_, host.pieces()[0].first.get(), size(), stream));
  }
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;
  ~OnDevice() { cuMemFree_v2(address_); }

  soa::Memory memory(const std::string &name) const { return {name, reinterpret_cast<void *>(address_), host_.size()}; }

  void back() const {
    check(cuMemcpyDtoHAsync_v2(host_.pieces()[0].first.get(), address_, size(), stream_));
    check(cuStreamSynchronize(stream_));
  }

 private:
  std::size_t size() const { return host_.pieces()[0].second; }

  const soa::Collection &host_;
  void *stream_;
  std::uintptr_t address_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 5) {
    std::cerr << "usage: on_gpu ARTIFACT_FOLDER N INPUT_COLLECTION OUTPUT_COLLECTION\n";
    return 2;
  }
  try {
    const auto n = std::strtoll(argv[2], nullptr, 10);
    const soa::Model model = soa::Model::open(argv[1], "cuda:0");
    const soa::Collection inputs = model.collection(argv[3], n), outputs = model.collection(argv[4], n);
    pattern::fill(inputs);
    void *const stream = stream_on(0);
    const OnDevice given(inputs, stream), answers(outputs, stream);
    model.bind({given.memory(argv[3]), answers.memory(argv[4])})(stream);
    answers.back();
    pattern::print(outputs);
    return 0;
  } catch (const soa::Error &error) {
    std::cerr << "on_gpu: " << error.what() << '\n';
    return 1;
  }
}
