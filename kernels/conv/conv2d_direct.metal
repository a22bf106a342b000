// Convolutions without tiles, for groups with few channels, as depthwise ones have: a thread makes CONV_RUN results.
//
//   rows      neighbours in a row of one channel, for any strides
//   channels  neighbouring channels of a pixel, which lie next to each other; each is a group
#include "conv/places.h"

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV_THREADS)]] void conv2d_rows(
    device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]], device const T* scale [[buffer(2)]],
    device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]], device T* result [[buffer(5)]],
    constant ConvParams& p [[buffer(6)]], uint thread_index [[thread_position_in_grid]]) {
  const uint row = (p.first + thread_index) / p.runs, plane = row / p.out.y, all = p.groups * p.outputs;
  const uint channel = plane % all;
  const Pixel pixel = {plane / all, row % p.out.y, (p.first + thread_index) % p.runs * CONV_RUN};
  const int2 corner = corner_of(p, pixel);
  // Then each place of the kernel meets what its left neighbour met one pixel further.
  const bool slides = p.stride.x == p.dilation.x;
  device const T* const image =
      x + int64_t(pixel.image) * p.x.image + int64_t(channel / p.outputs * p.channels) * p.x.channel;
  device const T* const factors = weight + int64_t(channel) * p.weight.image;

  float own[CONV_RUN], met[CONV_RUN];
#pragma unroll
  for (uint i = 0; i < CONV_RUN; ++i) own[i] = met[i] = 0.0f;
  for (uint c = 0; c < p.channels; ++c) {
    for (uint ky = 0; ky < p.window.y; ++ky) {
      const uint y = uint(corner.y) + ky * p.dilation.y;
      if (y >= p.size.y) continue;
      device const T* const line = image + int(c) * p.x.channel + int(y) * p.x.y;
      for (uint kx = 0; kx < p.window.x; ++kx) {
        const float factor =
            static_cast<float>(factors[int(c) * p.weight.channel + int(ky) * p.weight.y + int(kx) * p.weight.x]);
#pragma unroll
        for (uint i = 0; i < CONV_RUN; ++i) {
          if (slides && kx > 0 && i + 1 < CONV_RUN) {
            met[i] = met[(i + 1) % CONV_RUN];
          } else {
            const uint place = uint(corner.x) + i * p.stride.x + kx * p.dilation.x;
            met[i] = place < p.size.x ? static_cast<float>(line[int(place) * p.x.x]) : 0.0f;
          }
          own[i] = fma(met[i], factor, own[i]);
        }
      }
    }
  }
  const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
#pragma unroll
  for (uint i = 0; i < CONV_RUN; ++i) {
    if (pixel.x + i < p.out.x) epilogue.store(p, {pixel.image, pixel.y, pixel.x + i}, channel, own[i]);
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV_THREADS)]] void conv2d_channels(
    device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]], device const T* scale [[buffer(2)]],
    device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]], device T* result [[buffer(5)]],
    constant ConvParams& p [[buffer(6)]], uint thread_index [[thread_position_in_grid]]) {
  const uint channel = (p.first + thread_index) % p.runs * CONV_RUN;
  const Pixel pixel = pixel_at(p, (p.first + thread_index) / p.runs);
  const int2 corner = corner_of(p, pixel);
  device const T* const image = x + int64_t(pixel.image) * p.x.image + channel;
  device const T* const factors = weight + int64_t(channel) * p.weight.image;

  float4 own = 0.0f;
  for (uint ky = 0; ky < p.window.y; ++ky) {
    const uint y = uint(corner.y) + ky * p.dilation.y;
    if (y >= p.size.y) continue;
    for (uint kx = 0; kx < p.window.x; ++kx) {
      const uint place = uint(corner.x) + kx * p.dilation.x;
      if (place >= p.size.x) continue;
      const float4 values =
          static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(image + int(y) * p.x.y + int(place) * p.x.x));
      device const T* const at = factors + int(ky) * p.weight.y + int(kx) * p.weight.x;
      float4 factor;
      if (p.weight_packs) {
        factor = static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(at));
      } else {
#pragma unroll
        for (uint i = 0; i < CONV_RUN; ++i) factor[i] = static_cast<float>(at[i * p.weight.image]);
      }
      own = fma(values, factor, own);
    }
  }
  const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
  vec<T, 4> made;
#pragma unroll
  for (uint i = 0; i < CONV_RUN; ++i) made[i] = epilogue.value(p, pixel, channel + i, own[i]);
  *reinterpret_cast<device vec<T, 4>*>(result + offset_of(p.result, pixel, channel)) = made;
}

#define INSTANTIATE(T)                                                                          \
  template [[host_name("conv2d_rows_" #T)]] [[kernel]] decltype(conv2d_rows<T>) conv2d_rows<T>; \
  template [[host_name("conv2d_channels_" #T)]] [[kernel]] decltype(conv2d_channels<T>) conv2d_channels<T>;
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
