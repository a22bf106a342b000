// Convolutions without tiles, for groups with few channels, as depthwise ones have. A thread makes
//
//   rows      CONV_RUN neighbours in a row of one channel, for any strides
//   channels  CONV_PIXELS neighbours in a row, of as many channels as 16 bytes have; each channel is a group
#include "common/pack.h"
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

// The elements of the weight for a pack of channels at a place of the window.
template <typename T>
inline Pack<T> factors_at(constant ConvParams& p, device const T* factors) {
  if (p.weight_packs) return *reinterpret_cast<device const Pack<T>*>(factors);
  float4 elements[kPackVectors<T>];
#pragma unroll
  for (uint i = 0; i < kPackElements<T>; ++i)
    elements[i / 4][i % 4] = static_cast<float>(factors[int(i) * p.weight.image]);
  return packed<T>(elements);
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV_THREADS)]] void conv2d_channels(
    device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]], device const T* scale [[buffer(2)]],
    device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]], device T* result [[buffer(5)]],
    constant ConvParams& p [[buffer(6)]], uint thread_index [[thread_position_in_grid]]) {
  constexpr uint kPack = kPackElements<T>, kVectors = kPackVectors<T>, kAtOnce = 3;
  const uint packs = p.groups / kPack, index = p.first + thread_index, run = index / packs, row = run / p.runs;
  const uint channel = index % packs * kPack;
  const Pixel pixel = {row / p.out.y, row % p.out.y, run % p.runs * CONV_PIXELS};
  const int2 corner = corner_of(p, pixel);
  device const T* const image = x + int64_t(pixel.image) * p.x.image + channel;
  device const T* const factors = weight + int64_t(channel) * p.weight.image;

  float4 own[CONV_PIXELS][kVectors];
#pragma unroll
  for (uint i = 0; i < CONV_PIXELS; ++i) {
#pragma unroll
    for (uint v = 0; v < kVectors; ++v) own[i][v] = 0.0f;
  }
  for (uint ky = 0; ky < p.window.y; ++ky) {
    const uint y = uint(corner.y) + ky * p.dilation.y;
    if (y >= p.size.y) continue;
    device const T* const line = image + int(y) * p.x.y;
    for (uint first = 0; first < p.window.x; first += kAtOnce) {
      // All loads come before what is computed.
      Pack<T> values[kAtOnce][CONV_PIXELS], factor[kAtOnce];
#pragma unroll
      for (uint k = 0; k < kAtOnce; ++k) {
        const uint kx = first + k;
        const bool exists = kx < p.window.x;
        factor[k] = Pack<T>();
        if (exists) factor[k] = factors_at(p, factors + int(ky) * p.weight.y + int(kx) * p.weight.x);
#pragma unroll
        for (uint i = 0; i < CONV_PIXELS; ++i) {
          const uint place = uint(corner.x) + i * p.stride.x + kx * p.dilation.x;
          values[k][i] = Pack<T>();
          if (exists && place < p.size.x)
            values[k][i] = *reinterpret_cast<device const Pack<T>*>(line + int(place) * p.x.x);
        }
      }
#pragma unroll
      for (uint k = 0; k < kAtOnce; ++k) {
        float4 by[kVectors];
        unpack(factor[k], by);
#pragma unroll
        for (uint i = 0; i < CONV_PIXELS; ++i) {
          float4 x_values[kVectors];
          unpack(values[k][i], x_values);
#pragma unroll
          for (uint v = 0; v < kVectors; ++v) own[i][v] = fma(x_values[v], by[v], own[i][v]);
        }
      }
    }
  }
  const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
#pragma unroll
  for (uint i = 0; i < CONV_PIXELS; ++i) {
    if (pixel.x + i >= p.out.x) continue;
    const Pixel of = {pixel.image, pixel.y, pixel.x + i};
#pragma unroll
    for (uint v = 0; v < kVectors; ++v)
      epilogue.store_channels(p, p.has_residual ? offset_of(p.residual, of, 0) : 0, offset_of(p.result, of, 0),
                              channel + 4 * v, 4, own[i][v]);
  }
}

#define INSTANTIATE(T)                                                                          \
  template [[host_name("conv2d_rows_" #T)]] [[kernel]] decltype(conv2d_rows<T>) conv2d_rows<T>; \
  template [[host_name("conv2d_channels_" #T)]] [[kernel]] decltype(conv2d_channels<T>) conv2d_channels<T>;
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
