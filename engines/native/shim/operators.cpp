// The operators of torch's C interface (aoti_torch/generated/c_shim_cpu.h) that AOTInductor calls instead of
// generating their code. Arguments that they do not support end the run with an error.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "order.h"
#include "product.h"
#include "tensors.h"

using namespace soa_shim;

namespace {

// Matrix `i` of a batch; for two dimensions the tensor itself.
Matrix matrix(const Tensor *t, int64_t i = 0) {
  const int64_t d = t->dims;
  require(d == 2 || d == 3, "a product of other than two or three dimensions");
  return {t->data<float>() + (d == 3 ? i * t->strides[0] : 0), t->sizes[d - 2], t->sizes[d - 1], t->strides[d - 2],
          t->strides[d - 1]};
}

// out = alpha * a x b + beta * added for each matrix of a batch; `added` is broadcast, and may be null if beta is 0.
void multiply_batch(const Tensor *out, const Tensor *a, const Tensor *b, const Tensor *added, double beta,
                    double alpha) {
  require_float({out, a, b});
  require(alpha == 1 && (beta == 1 || beta == 0), "an alpha or beta other than one");
  if (beta == 0) added = nullptr;
  if (added != nullptr) require_float({added});
  const int64_t batch = out->dims == 3 ? out->sizes[0] : 1;
  for (int64_t i = 0; i < batch; ++i) {
    const Matrix to = matrix(out, i);
    Addend addend{nullptr, 0, 0};
    if (added != nullptr) {
      addend = {added->data<float>() + (out->dims == 3 ? i * added->step(2, batch) : 0), added->step(1, to.rows),
                added->step(0, to.cols)};
    }
    multiply(to, matrix(a, i), matrix(b, i), addend);
  }
}

// Calls visit(offset in a, offset in b) for each line of two tensors along `dim`. They differ in this dimension only.
template <typename Visit>
void each_line(const Tensor *a, const Tensor *b, int64_t dim, Visit &&visit) {
  int64_t index[kMaxDims] = {}, in_a = 0, in_b = 0, lines = 1;
  for (int64_t d = 0; d < a->dims; ++d) lines *= d == dim ? 1 : a->sizes[d];
  for (; lines > 0; --lines) {
    visit(in_a, in_b);
    for (int64_t d = a->dims - 1; d >= 0; --d) {  // counts up: the last dimension first, with a carry
      if (d == dim) continue;
      in_a += a->strides[d];
      in_b += b->strides[d];
      if (++index[d] < a->sizes[d]) break;
      in_a -= index[d] * a->strides[d];
      in_b -= index[d] * b->strides[d];
      index[d] = 0;
    }
  }
}

// A value with its index. In comparisons NaN is the largest value, as in torch.
template <typename T>
struct Pair {
  T value;
  int64_t index;
};
struct More {
  template <typename T>
  bool operator()(const Pair<T> &a, const Pair<T> &b) const {
    return (a.value != a.value && b.value == b.value) || a.value > b.value;
  }
};
struct Less {
  template <typename T>
  bool operator()(const Pair<T> &a, const Pair<T> &b) const {
    return (a.value == a.value && b.value != b.value) || a.value < b.value;
  }
};

// Sets values and indices to the first elements of each line of `self` along `dim`, after order(first, last, compare).
template <typename T, typename Order>
void ordered(const Tensor *self, int64_t dim, bool descending, const Tensor *values, const Tensor *indices,
             Order &&order) {
  const bool scalar = self->dims == 0;
  const int64_t n = scalar ? 1 : self->sizes[dim], kept = scalar ? 1 : values->sizes[dim];
  const int64_t from = scalar ? 0 : self->strides[dim], to = scalar ? 0 : values->strides[dim];
  const Scratch<Pair<T>> pairs(n);
  if (kept == 0) return;
  each_line(self, values, dim, [&](int64_t in, int64_t out) {
    for (int64_t i = 0; i < n; ++i) pairs[i] = {self->data<T>()[in + i * from], i};
    if (descending) {
      order(pairs.data(), pairs.data() + n, More{});
    } else {
      order(pairs.data(), pairs.data() + n, Less{});
    }
    for (int64_t i = 0; i < kept; ++i) {
      values->data<T>()[out + i * to] = pairs[i].value;
      indices->data<int64_t>()[out + i * to] = pairs[i].index;
    }
  });
}

// As above, for the dtype of `self`.
template <typename Order>
void ordered(const Tensor *self, int64_t dim, bool descending, const Tensor *values, const Tensor *indices,
             Order &&order) {
  switch (self->dtype) {
    case kFloat32: return ordered<float>(self, dim, descending, values, indices, order);
    case kFloat64: return ordered<double>(self, dim, descending, values, indices, order);
    case kInt32: return ordered<int32_t>(self, dim, descending, values, indices, order);
    case kInt64: return ordered<int64_t>(self, dim, descending, values, indices, order);
    default: require(false, "an order of this dtype");
  }
}

// Makes tensors of the values along `dim` in order, and of their indices. Equal elements keep their order.
void sort(const Tensor *self, int64_t dim, bool descending, Tensor **values, Tensor **indices) {
  if (dim < 0) dim += self->dims;
  *values = dense(self, self->sizes, self->dtype);
  *indices = dense(self, self->sizes, kInt64);
  ordered(self, dim, descending, *values, *indices,
          [](auto *first, auto *last, auto compare) { std::stable_sort(first, last, compare); });
}

}  // namespace

SOA_SHIM(aoti_torch_cpu_mm_out, (Tensor * out, Tensor *a, Tensor *b), { multiply_batch(out, a, b, nullptr, 0, 1); })
SOA_SHIM(aoti_torch_cpu_bmm_out, (Tensor * out, Tensor *a, Tensor *b), { multiply_batch(out, a, b, nullptr, 0, 1); })
SOA_SHIM(aoti_torch_cpu_addmm_out, (Tensor * out, Tensor *self, Tensor *a, Tensor *b, double beta, double alpha),
         { multiply_batch(out, a, b, self, beta, alpha); })
SOA_SHIM(aoti_torch_cpu_baddbmm_out, (Tensor * out, Tensor *self, Tensor *a, Tensor *b, double beta, double alpha),
         { multiply_batch(out, a, b, self, beta, alpha); })

// Equal elements have the same order as in torch, because this chooses among the algorithms of order.h as torch does
// (ATen/native/cpu/SortingKernel.cpp).
SOA_SHIM(aoti_torch_cpu_topk,
         (Tensor * self, int64_t k, int64_t dim, int32_t largest, int32_t sorted, Tensor **values, Tensor **indices), {
  if (dim < 0) dim += self->dims;
  int64_t sizes[kMaxDims] = {};
  std::copy(self->sizes, self->sizes + self->dims, sizes);
  if (self->dims > 0) sizes[dim] = k;
  *values = contiguous(self->dims, sizes, self->dtype);
  *indices = contiguous(self->dims, sizes, kInt64);
  ordered(self, dim, largest != 0, *values, *indices, [&](auto *first, auto *last, auto compare) {
    const Order<std::remove_pointer_t<decltype(first)>, decltype(compare)> order(compare);
    if (k * 64 <= last - first) {
      order.partial_sort(first, first + k, last);
    } else {
      order.nth_element(first, first + k - 1, last);
      if (sorted != 0) order.sort(first, first + k - 1);
    }
  });
})
SOA_SHIM(aoti_torch_cpu_sort, (Tensor * self, int64_t dim, int32_t descending, Tensor **values, Tensor **indices),
         { sort(self, dim, descending != 0, values, indices); })
SOA_SHIM(aoti_torch_cpu_sort_stable,
         (Tensor * self, int32_t *, int64_t dim, int32_t descending, Tensor **values, Tensor **indices),
         { sort(self, dim, descending != 0, values, indices); })

namespace {

// The matrix of one head of one element of a batch: the last two dimensions of four.
Matrix head_of(const Tensor *t, int64_t b, int64_t h) {
  float *from = t->data<float>() + b * t->strides[0] + h * t->strides[1];
  return {from, t->sizes[2], t->sizes[3], t->strides[2], t->strides[3]};
}

}  // namespace

// softmax(q x k^T * scale + mask) x v, and the logarithms of the sums of exponentials.
SOA_SHIM(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu,
         (Tensor * q, Tensor *k, Tensor *v, double dropout, int32_t causal, Tensor **mask, double *scale, Tensor **result,
          Tensor **logarithms), {
  require_float({q, k, v});
  require(dropout == 0 && v->sizes[3] == q->sizes[3], "attention of this kind");
  const Tensor *added = mask != nullptr ? *mask : nullptr;
  if (added != nullptr) require_float({added});
  const int64_t batch = q->sizes[0], heads = q->sizes[1], rows = q->sizes[2], width = q->sizes[3], keys = k->sizes[2];
  const int64_t by_row[3] = {batch, heads, rows}, steps[3] = {rows * heads, 1, heads};
  const float by = scale != nullptr ? static_cast<float>(*scale) : 1 / std::sqrt(static_cast<float>(width));
  *result = dense(q, q->sizes, kFloat32);
  *logarithms = empty(3, by_row, steps, kFloat32);
  const Scratch<float> score_memory(rows * keys);
  const Matrix scores{score_memory.data(), rows, keys, keys, 1};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      multiply(scores, head_of(q, b, h), head_of(k, b, h).transposed(), {nullptr, 0, 0});
      for (int64_t i = 0; i < rows; ++i) {
        const float *row_mask = nullptr;
        int64_t mask_step = 0;
        if (added != nullptr) {
          row_mask = added->data<float>() + b * added->step(3, batch) + h * added->step(2, heads) + i * added->step(1, rows);
          mask_step = added->step(0, keys);
        }
        const int64_t seen = causal != 0 ? std::min(i + 1, keys) : keys;  // a row sees no keys behind its own
        std::fill(scores.at(i, seen), scores.at(i + 1, 0), 0.0f);
        float *logarithm = (*logarithms)->data<float>() + b * steps[0] + h * steps[1] + i * steps[2];
        *logarithm = softmax(scores.at(i, 0), seen, by, row_mask, mask_step);
      }
      multiply(head_of(*result, b, h), scores, head_of(v, b, h), {nullptr, 0, 0});
    }
  }
})
