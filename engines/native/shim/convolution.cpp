// Convolutions of one to three dimensions. An image is copied to channels-last layout with its padding, so that a
// row of the kernel covers contiguous memory. Then each row of positions is a product with the weights.
#include <algorithm>
#include <array>
#include <cstring>

#include "product.h"
#include "tensors.h"

using namespace soa_shim;

namespace {

using Three = std::array<int64_t, 3>;  // depth, height, width; dimensions that an image lacks come first

// `count` numbers, with `absent` for the dimensions that come first.
Three three(const int64_t *numbers, int64_t count, int64_t absent) {
  Three all{absent, absent, absent};
  std::copy(numbers, numbers + count, all.end() - count);
  return all;
}

// Dimension i in the order of channels-last, from the smallest stride on: channels, the last position, ..., the batch.
int64_t channels_last_dim(int64_t i, int64_t dims) {
  if (i == 0) return 1;
  return i + 1 == dims ? 0 : dims - i;
}

// True if torch regards a tensor's strides as channels-last (c10/core/MemoryFormat.h).
bool channels_last(const Tensor *t) {
  if (t->dims < 4 || t->strides[1] == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0; i < t->dims; ++i) {
    const int64_t d = channels_last_dim(i, t->dims);
    if (t->sizes[d] == 0 || t->strides[d] < least || (d == 0 && least == t->strides[1])) return false;
    least = t->strides[d] * std::max<int64_t>(t->sizes[d], 1);
  }
  return true;
}

// A convolution: `by` is its stride, `pad` its padding, `apart` its dilation.
struct Shape {
  int64_t groups, outputs, channels;  // outputs and channels are those of one group
  Three in, kernel, by, pad, apart, padded, out;
  int64_t pixel, row, plane;  // strides of the padded image, in floats

  Shape(const Tensor *input, const Tensor *weight, const int64_t *stride, const int64_t *padding,
        const int64_t *dilation, int64_t number_of_groups)
      : groups(number_of_groups), outputs(weight->sizes[0] / groups), channels(weight->sizes[1]) {
    const int64_t positions = input->dims - 2;  // the dimensions other than batch and channels
    in = three(input->sizes + 2, positions, 1);
    kernel = three(weight->sizes + 2, positions, 1);
    by = three(stride, positions, 1);
    pad = three(padding, positions, 0);
    apart = three(dilation, positions, 1);
    for (int i = 0; i < 3; ++i) {
      padded[i] = in[i] + 2 * pad[i];
      out[i] = (padded[i] - apart[i] * (kernel[i] - 1) - 1) / by[i] + 1;
    }
    pixel = channels * groups;
    row = padded[2] * pixel;
    plane = padded[1] * row;
  }

  // The numbers that are multiplied for one output.
  int64_t inner() const { return channels * kernel[0] * kernel[1] * kernel[2]; }
  // True if a row of the kernel covers contiguous memory of the image.
  bool joined() const { return apart[2] == 1 && groups == 1; }
  // The length of a segment: what covers contiguous memory, a row of the kernel or one position of it.
  int64_t segment() const { return channels * (joined() ? kernel[2] : 1); }
};

// The output, whose memory is not initialised. It is channels-last if one of the others is.
Tensor *output(const Tensor *input, const Tensor *weight, const Shape &s) {
  int64_t sizes[5] = {input->sizes[0], weight->sizes[0]}, strides[5], step = 1;
  const int64_t dims = input->dims;
  std::copy(s.out.end() - (dims - 2), s.out.end(), sizes + 2);
  const bool last = channels_last(input) || channels_last(weight);
  for (int64_t i = 0; i < dims; ++i) {  // the dimension with the smallest stride first
    const int64_t d = last ? channels_last_dim(i, dims) : dims - 1 - i;
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return empty(dims, sizes, strides, kFloat32);
}

// The weights of a group as (outputs, depth x height x width x channels).
void flatten(const Tensor *weight, const Shape &s, int64_t group, float *to) {
  const Three step = three(weight->strides + 2, weight->dims - 2, 0);
  for (int64_t o = group * s.outputs; o < (group + 1) * s.outputs; ++o) {
    for (int64_t z = 0; z < s.kernel[0]; ++z) {
      for (int64_t y = 0; y < s.kernel[1]; ++y) {
        for (int64_t x = 0; x < s.kernel[2]; ++x) {
          const float *from = weight->data<float>() + o * weight->strides[0] + z * step[0] + y * step[1] + x * step[2];
          for (int64_t c = 0; c < s.channels; ++c) *to++ = from[c * weight->strides[1]];
        }
      }
    }
  }
}

// The start of each segment of the kernel in the padded image, relative to the kernel's position, in floats.
void find_starts(const Shape &s, int64_t *starts) {
  for (int64_t z = 0; z < s.kernel[0]; ++z) {
    for (int64_t y = 0; y < s.kernel[1]; ++y) {
      for (int64_t x = 0; x < (s.joined() ? 1 : s.kernel[2]); ++x) {
        *starts++ = z * s.apart[0] * s.plane + y * s.apart[1] * s.row + x * s.apart[2] * s.pixel;
      }
    }
  }
}

// Copies image `n` into the padded image.
void lay_out(const Tensor *input, const Shape &s, int64_t n, float *image) {
  const Three step = three(input->strides + 2, input->dims - 2, 0);
  const int64_t channel_step = input->strides[1];
  for (int64_t z = 0; z < s.in[0]; ++z) {
    for (int64_t y = 0; y < s.in[1]; ++y) {
      float *to = image + (z + s.pad[0]) * s.plane + (y + s.pad[1]) * s.row + s.pad[2] * s.pixel;
      const float *from = input->data<float>() + n * input->strides[0] + z * step[0] + y * step[1];
      const bool dense = (channel_step == 1 || s.pixel == 1) && (step[2] == s.pixel || s.in[2] == 1);
      if (dense) {
        std::memcpy(to, from, static_cast<size_t>(s.in[2] * s.pixel) * sizeof(float));
        continue;
      }
      for (int64_t x = 0; x < s.in[2]; ++x) {
        for (int64_t c = 0; c < s.pixel; ++c) to[x * s.pixel + c] = from[x * step[2] + c * channel_step];
      }
    }
  }
}

// The weights of all groups, packed for `convolve` one after another.
class PackedWeights {
 public:
  PackedWeights(const Tensor *weight, const Shape &s)
      : size_(packed_size({nullptr, s.outputs, s.inner(), s.inner(), 1})), packed_(size_ * s.groups) {
    const Scratch<float> flat(s.outputs * s.inner());
    for (int64_t g = 0; g < s.groups; ++g) {
      flatten(weight, s, g, flat.data());
      pack_weights({flat.data(), s.outputs, s.inner(), s.inner(), 1}, packed_.data() + g * size_);
    }
  }
  const float *of_group(int64_t group) const { return packed_.data() + group * size_; }

 private:
  int64_t size_;  // of one group, in floats
  Scratch<float> packed_;
};

// The supported convolutions: of float32 in one to three dimensions, not transposed.
void require_supported(const Tensor *input, const Tensor *weight, const Tensor *bias, bool transposed) {
  require_float({input, weight});
  require(input->dims >= 3 && input->dims <= 5 && weight->sizes[1] > 0 && !transposed, "such a convolution");
  require(input->dims < 5 || !(channels_last(input) || channels_last(weight)), "a volume in channels-last");
  if (bias == nullptr) return;
  require_float({bias});
  require(bias->strides[0] == 1 || bias->sizes[0] == 1, "a bias with gaps");
}

// Convolves a padded image with the weights of one group. `to`: the group's first output for this image.
void convolve_group(const Shape &s, const float *image, const int64_t *starts, const float *packed, const float *bias,
                    const Tensor &out, float *to) {
  const Three step = three(out.strides + 2, out.dims - 2, 0);
  const int64_t length = s.segment();
  for (int64_t z = 0; z < s.out[0]; ++z) {
    for (int64_t y = 0; y < s.out[1]; ++y) {
      const float *from = image + z * s.by[0] * s.plane + y * s.by[1] * s.row;
      const Matrix row{to + z * step[0] + y * step[1], s.out[2], s.outputs, step[2], out.strides[1]};
      convolve(row, {from, s.by[2] * s.pixel, s.inner() / length, length, starts}, packed, bias);
    }
  }
}

}  // namespace

SOA_SHIM(aoti_torch_cpu_convolution,
         (Tensor * input, Tensor *weight, Tensor **bias, const int64_t *stride, int64_t, const int64_t *padding,
          int64_t, const int64_t *dilation, int64_t, int32_t transposed, const int64_t *, int64_t, int64_t groups,
          Tensor **result), {
  const Tensor *added = bias != nullptr ? *bias : nullptr;
  require_supported(input, weight, added, transposed != 0);
  const Shape s(input, weight, stride, padding, dilation, groups);
  const PackedWeights packed(weight, s);
  const Scratch<int64_t> starts(s.inner() / s.segment());
  find_starts(s, starts.data());
  const int64_t image_size = s.padded[0] * s.plane;
  const Scratch<float> image(image_size);
  std::memset(image.data(), 0, static_cast<size_t>(image_size) * sizeof(float));  // the padding stays 0
  *result = output(input, weight, s);
  const Tensor &out = **result;
  for (int64_t n = 0; n < input->sizes[0]; ++n) {
    lay_out(input, s, n, image.data());
    for (int64_t g = 0; g < groups; ++g) {
      const float *own_bias = added != nullptr ? added->data<float>() + g * s.outputs : nullptr;
      float *to = out.data<float>() + n * out.strides[0] + g * s.outputs * out.strides[1];
      convolve_group(s, image.data() + g * s.channels, starts.data(), packed.of_group(g), own_bias, out, to);
    }
  }
})
