// The shim's operators on random shapes and strides, on several threads: `operators ROUNDS THREADS`.
//
// For the sanitizers: each tensor has its memory to itself, not a byte more, and all threads share one weight. The values are
// compared with torch's in test_shim.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tensors.h"

using soa_shim::Tensor;

extern "C" {
int32_t aoti_torch_create_tensor_from_blob(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t,
                                           int32_t, Tensor **);
int32_t aoti_torch_delete_tensor_object(Tensor *);
int32_t aoti_torch_new_tensor_handle(Tensor *, Tensor **);
int32_t aoti_torch_clone(Tensor *, Tensor **);
int32_t aoti_torch_copy_(Tensor *, Tensor *, int32_t);
int32_t aoti_torch_cpu_mm_out(Tensor *, Tensor *, Tensor *);
int32_t aoti_torch_cpu_bmm_out(Tensor *, Tensor *, Tensor *);
int32_t aoti_torch_cpu_addmm_out(Tensor *, Tensor *, Tensor *, Tensor *, double, double);
int32_t aoti_torch_cpu_baddbmm_out(Tensor *, Tensor *, Tensor *, Tensor *, double, double);
int32_t aoti_torch_cpu_topk(Tensor *, int64_t, int64_t, int32_t, int32_t, Tensor **, Tensor **);
int32_t aoti_torch_cpu_sort_stable(Tensor *, int32_t *, int64_t, int32_t, Tensor **, Tensor **);
int32_t aoti_torch_cpu_convolution(Tensor *, Tensor *, Tensor **, const int64_t *, int64_t, const int64_t *, int64_t,
                                   const int64_t *, int64_t, int32_t, const int64_t *, int64_t, int64_t, Tensor **);
int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(Tensor *, Tensor *, Tensor *, double, int32_t,
                                                                   Tensor **, double *, Tensor **, Tensor **);
}

namespace {

using Sizes = std::vector<int64_t>;
using Handle = std::unique_ptr<Tensor, int32_t (*)(Tensor *)>;
std::atomic<int> wrong{0};

void expect(bool fine, const char *what) {
  if (!fine && wrong++ == 0) std::printf("wrong: %s\n", what);
}
Handle owned(Tensor *tensor) { return {tensor, aoti_torch_delete_tensor_object}; }

struct Draw {
  std::mt19937 next;
  int64_t operator()(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(next); }
  float value() { return std::normal_distribution<float>()(next); }
};

// Normal numbers, the dimensions in any order in memory and with gaps between them.
struct Given {
  std::unique_ptr<float[]> memory;
  Handle handle{nullptr, aoti_torch_delete_tensor_object};

  Given(Draw &draw, const Sizes &sizes) {
    const auto dims = static_cast<int64_t>(sizes.size());
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), draw.next);
    Sizes strides(sizes.size());
    int64_t step = 1, span = 1;
    for (size_t d : order) {
      strides[d] = step;
      span = sizes[d] == 0 || span == 0 ? 0 : span + (sizes[d] - 1) * step;
      step *= std::max<int64_t>(sizes[d], 1) + draw(0, 2);
    }
    memory.reset(new float[static_cast<size_t>(span)]);
    std::generate_n(memory.get(), span, [&] { return draw.value(); });
    Tensor *tensor = nullptr;
    expect(aoti_torch_create_tensor_from_blob(memory.get(), dims, sizes.data(), strides.data(), 0, soa_shim::kFloat32, 0,
                                              0, &tensor) == 0, "a tensor");
    handle = owned(tensor);
  }
  operator Tensor *() const { return handle.get(); }
};

float at(const Tensor *tensor, std::initializer_list<int64_t> place) {
  int64_t offset = 0, dim = 0;
  for (int64_t i : place) offset += i * tensor->strides[dim++];
  return tensor->data<float>()[offset];
}

// A product with a weight of its own, or with the one that all threads share.
void products(Draw &draw, Tensor *shared) {
  const bool batched = draw(0, 1) != 0, with_shared = !batched && draw(0, 1) != 0, added = draw(0, 1) != 0;
  const int64_t m = draw(0, 40);
  const int64_t k = with_shared ? shared->sizes[0] : draw(0, 40), n = with_shared ? shared->sizes[1] : draw(1, 40);
  const auto sized = [&](int64_t rows, int64_t cols) { return batched ? Sizes{3, rows, cols} : Sizes{rows, cols}; };
  const Given a(draw, sized(m, k)), other(draw, sized(k, n)), plus(draw, Sizes{n}), out(draw, sized(m, n));
  Tensor *b = with_shared ? shared : static_cast<Tensor *>(other);
  const auto product = batched ? aoti_torch_cpu_bmm_out : aoti_torch_cpu_mm_out;
  const auto product_added = batched ? aoti_torch_cpu_baddbmm_out : aoti_torch_cpu_addmm_out;
  expect((added ? product_added(out, plus, a, b, 1, 1) : product(out, a, b)) == 0, "a product");
}

void convolutions(Draw &draw) {
  const int64_t nd = draw(1, 3), groups = draw(1, 3), inner = draw(1, 4), outer = draw(1, 20), images = draw(0, 2);
  Sizes kernel, by, pad, apart, none(static_cast<size_t>(nd)), in{images, groups * inner}, weights{groups * outer, inner};
  for (int64_t d = 0; d < nd; ++d) {
    kernel.push_back(draw(1, 3)), by.push_back(draw(1, 2)), pad.push_back(draw(0, 2)), apart.push_back(draw(1, 2));
    in.push_back(apart.back() * (kernel.back() - 1) + draw(1, 6));
    weights.push_back(kernel.back());
  }
  const Given image(draw, in), weight(draw, weights);
  std::vector<float> plus(static_cast<size_t>(groups * outer));
  for (float &x : plus) x = draw.value();
  const int64_t one = 1, count = groups * outer;
  Tensor *bias = nullptr, *made = nullptr;
  expect(aoti_torch_create_tensor_from_blob(plus.data(), 1, &count, &one, 0, soa_shim::kFloat32, 0, 0, &bias) == 0, "bias");
  const Handle bias_owner = owned(bias);
  const int32_t code = aoti_torch_cpu_convolution(image, weight, &bias, by.data(), nd, pad.data(), nd, apart.data(), nd, 0,
                                                  none.data(), nd, groups, &made);
  if (code != 0 && nd == 3) return;  // a volume whose strides say channels-last
  expect(code == 0, "a convolution");
  if (code == 0) owned(made);
}

// Sorts and top-k, then copies and a second handle of one tensor.
void orders(Draw &draw) {
  const Sizes sizes{draw(1, 3), draw(1, 200), draw(1, 3)};
  const Given x(draw, sizes), target(draw, sizes);
  const int64_t dim = draw(0, 2), k = draw(0, sizes[static_cast<size_t>(dim)]);
  for (const bool sorted : {false, true}) {
    Tensor *values = nullptr, *indices = nullptr;
    const int32_t code = sorted ? aoti_torch_cpu_sort_stable(x, nullptr, dim, draw(0, 1) != 0, &values, &indices)
                                : aoti_torch_cpu_topk(x, k, dim, draw(0, 1) != 0, 1, &values, &indices);
    expect(code == 0, "an order");
    const Handle value_owner = owned(values), index_owner = owned(indices);
    const int64_t *index = indices->data<int64_t>();
    for (int64_t i = 0; i < indices->count(); ++i) expect(index[i] >= 0 && index[i] < sizes[dim], "an index");
  }
  Tensor *copied = nullptr, *again = nullptr;
  expect(aoti_torch_clone(x, &copied) == 0 && aoti_torch_copy_(target, copied, 0) == 0, "a copy");
  expect(aoti_torch_new_tensor_handle(copied, &again) == 0, "a second handle");
  aoti_torch_delete_tensor_object(copied);
  const Handle last = owned(again);
  expect(at(target, {0, 0, 0}) == at(x, {0, 0, 0}) && at(again, {0, 0, 0}) == at(x, {0, 0, 0}), "a copy's values");
}

void attention(Draw &draw) {
  const int64_t rows = draw(1, 20), keys = draw(1, 40), width = draw(1, 16);
  const Given q(draw, {2, 3, rows, width}), k(draw, {2, 3, keys, width}), v(draw, {2, 3, keys, width});
  const Given mask(draw, {2, 1, rows, keys});
  Tensor *added = mask, *made = nullptr, *logarithms = nullptr;
  expect(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, 0, draw(0, 1) != 0 ? &added : nullptr,
                                                                    nullptr, &made, &logarithms) == 0, "attention");
  const Handle out = owned(made), sums = owned(logarithms);
  expect(std::isfinite(at(made, {1, 2, rows - 1, width - 1})) && std::isfinite(at(logarithms, {1, 2, rows - 1})), "values");
}

}  // namespace

int main(int count, char **words) {
  if (count != 3) return std::puts("operators ROUNDS THREADS"), 2;
  const int rounds = std::atoi(words[1]), threads = std::atoi(words[2]);
  Draw first{std::mt19937(0)};
  const Given weight(first, {24, 33});
  std::vector<std::thread> at_work;
  for (int t = 0; t < threads; ++t) {
    at_work.emplace_back([&, t] {
      Draw draw{std::mt19937(static_cast<unsigned>(t + 1))};
      for (int i = 0; i < rounds; ++i) products(draw, weight), convolutions(draw), orders(draw), attention(draw);
    });
  }
  for (std::thread &thread : at_work) thread.join();
  std::printf("%d rounds on %d threads, %d wrong\n", rounds, threads, wrong.load());
  return wrong != 0;
}
