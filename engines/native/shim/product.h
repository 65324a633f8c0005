// Matrix products whose bits depend only on the values: each element of a result is one chain of fused
// multiply-adds over k in order, independent of the vector width, the blocking and the other rows.
// AOTInductor's own products (CppMicroGemmFP32Vec) compute the same chain.
#ifndef SOA_SHIM_PRODUCT_H
#define SOA_SHIM_PRODUCT_H

#include <cstdint>

namespace soa_shim {

// A matrix in memory that it does not own. row and col: the strides of both dimensions, in floats.
struct Matrix {
  float *data;
  int64_t rows, cols, row, col;

  float *at(int64_t i, int64_t j) const { return data + i * row + j * col; }
  Matrix transposed() const { return {data, cols, rows, col, row}; }
};

// The number that is added at the end of a chain: data[i * row + j * col]; none if data is null.
struct Addend {
  const float *data;
  int64_t row, col;
};

// out = a x b + addend. `out` must not overlap with the others.
void multiply(Matrix out, Matrix a, Matrix b, Addend addend);

// One row of a convolution's output: out(p, o) = the sum over segments s, and k in 0 … length - 1, of
// image[p * step + starts[s] + k] * weight(o, s * length + k), plus bias[o] where bias is not null.
struct Segments {
  const float *image;
  int64_t step, count, length;
  const int64_t *starts;
};
void convolve(Matrix out, const Segments &segments, const float *packed, const float *bias);

// Packs weights of shape (outputs, count * length) for `convolve`, into packed_size floats.
int64_t packed_size(Matrix weights);
void pack_weights(Matrix weights, float *packed);

// row[i] = softmax of row[i] * scale + mask[i * step], for i < n. Returns the logarithm of the sum of exponentials.
// A row with only -infinity becomes zeros. Defined in vector_math.cpp.
float softmax(float *row, int64_t n, float scale, const float *mask, int64_t step);

}  // namespace soa_shim

#endif
