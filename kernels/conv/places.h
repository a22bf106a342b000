// What the kernels of convolutions have in common: pixels of the result, and what is made of the sums.
#pragma once

#include "conv/conv2d.h"
#include "gemm/epilogue.h"

struct Pixel {
  uint image, y, x;
};
inline Pixel pixel_at(constant ConvParams& p, uint index) {
  const uint row = index / p.out.x;
  return {row / p.out.y, row % p.out.y, index % p.out.x};
}
// The pixel that comes `count` ones later.
inline Pixel later(constant ConvParams& p, Pixel pixel, uint count) {
  pixel.x += count;
  while (pixel.x >= p.out.x) {
    pixel.x -= p.out.x;
    if (++pixel.y == p.out.y) pixel.y = 0, ++pixel.image;
  }
  return pixel;
}

inline int64_t offset_of(constant ConvImages& images, Pixel pixel, uint channel) {
  return int64_t(pixel.image) * images.image + int(channel) * images.channel + int(pixel.y) * images.y +
         int(pixel.x) * images.x;
}

// Where the kernel's first element lies for a pixel of the result: outside of the image where there is padding.
inline int2 corner_of(constant ConvParams& p, Pixel pixel) {
  return {int(pixel.x * p.stride.x) - int(p.padding.x), int(pixel.y * p.stride.y) - int(p.padding.y)};
}

template <typename T>
struct ConvEpilogue {
  device const T* scale;
  device const T* bias;
  device const T* residual;
  device T* result;

  T value(constant ConvParams& p, Pixel pixel, uint channel, float sum) const {
    float value = p.has_scale ? static_cast<float>(scale[int(channel) * p.scale_step]) * sum : sum;
    if (p.has_bias) value += static_cast<float>(bias[int(channel) * p.bias_step]);
    if (p.has_residual) value += static_cast<float>(residual[offset_of(p.residual, pixel, channel)]);
    return static_cast<T>(activated<T>(value, p.activation));
  }
  void store(constant ConvParams& p, Pixel pixel, uint channel, float sum) const {
    result[offset_of(p.result, pixel, channel)] = value(p, pixel, channel, sum);
  }
  // Writes `count` of 4 channels of a pixel, whose channels are neighbours in the result. The offsets are those of the
  // pixel's first channel.
  void store_channels(constant ConvParams& p, int64_t of_residual, int64_t of_result, uint channel, uint count,
                      metal::float4 sums) const {
    int places[4];
#pragma unroll
    for (uint i = 0; i < 4; ++i) places[i] = int(channel + metal::min(i, count - 1));
    if (p.has_scale) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) sums[i] *= static_cast<float>(scale[places[i] * p.scale_step]);
    }
    if (p.has_bias) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) sums[i] += static_cast<float>(bias[places[i] * p.bias_step]);
    }
    if (p.has_residual) {
#pragma unroll
      for (uint i = 0; i < 4; ++i)
        sums[i] += static_cast<float>(residual[of_residual + places[i] * p.residual.channel]);
    }
    if (p.activation != 0) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) sums[i] = activated<T>(sums[i], p.activation);
    }
    store_neighbours(result + of_result + channel, count, sums);
  }
};
