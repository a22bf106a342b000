// Convolutions of images on GPUs whose units multiply tensors: a threadgroup has a tile of pixels by channels of one
// group. The channels of x, and of the result, are neighbours, and so are the weight's terms. Threadgroups that share a
// tile have a part of the terms each. They run together, or leave their sums in `result`, each behind those of the one
// before, and conv2d_unit_sum adds them.
#include <metal_tensor>

#include "common/joined_tile.h"
#include "conv/patches.h"
#include "gemm/unit_sums.h"

using namespace metal;
using namespace mpp::tensor_ops;

template <typename T, uint kColumns, uint kThreads>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void conv2d_unit(
    device T* x [[buffer(0)]], device T* weight [[buffer(1)]], device const T* scale [[buffer(2)]],
    device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]], device T* result [[buffer(5)]],
    constant ConvParams& p [[buffer(6)]], uint3 threadgroup_place [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kRows = CONV_UNIT_PIXELS, kSimds = kThreads / 32;
  using Extents = dextents<int, 2>;
  using Matrix = tensor<device T, Extents, tensor_inline>;
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, CONV_UNIT_STEP, false, true);
  constexpr matmul2d<descriptor, execution_simdgroups<kSimds>> multiply;
  alignas(16) threadgroup T tile[kRows * CONV_UNIT_STEP];

  uint split = threadgroup_place.z;
  if (p.together > 1) {
    split = threadgroup_place.y % p.together;
    threadgroup_place.y /= p.together;
  }
  const uint column_tiles = (p.outputs + kColumns - 1) / kColumns;
  const uint group = threadgroup_place.x / column_tiles, column = threadgroup_place.x % column_tiles * kColumns;
  const uint pixel = (p.first + threadgroup_place.y) * kRows, channel = group * p.outputs + column;
  const uint rows = min(kRows, p.pixels - pixel), columns = min(kColumns, p.outputs - column);
  const uint all = p.groups * p.outputs, begin = min(split * p.split_terms, p.terms);
  const uint terms = min(p.split_terms, p.terms - begin);
  const PatchRows<T> patches = {p, x + group * p.channels, pixel, begin};
  const Matrix factors(weight + int64_t(channel) * p.weight.image + begin, Extents(int(terms), int(columns)),
                       array<int, 2>{1, int(p.weight.image)});
  auto sums = multiply.template get_destination_cooperative_tensor<Matrix, Matrix, float>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
  metalcore_multiply_patches<kRows, kColumns, kSimds>(patches, factors, tile, sums, thread_index, 0);
  if (threadgroups.z > 1) {
    device float* const parts = reinterpret_cast<device float*>(result) + int64_t(threadgroup_place.z) * p.pixels * all;
    sums.store(tensor<device float, Extents, tensor_inline>(
        parts + int64_t(pixel) * all + channel, Extents(int(columns), int(rows)), array<int, 2>{1, int(all)}));
    return;
  }
  if (p.together > 1) {
    const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
    const JoinedTile<kRows, kColumns, kThreads> joined = {rows, columns};
    joined.template store<true>(sums, p.together, split, thread_index,
                                [&](uint row, uint column, uint count, float4 sum) {
                                  const int64_t at = pixel + row;
                                  epilogue.store_channels(p, at * p.residual.x, at * all, channel + column, count, sum);
                                });
    return;
  }

  const auto channel_of = [&](ushort i) {
    return int(channel + min(uint(sums.get_multidimensional_index(i)[0]), columns - 1));
  };
  if (p.has_scale) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] *= static_cast<float>(scale[channel_of(i) * p.scale_step]);
  }
  if (p.has_bias) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] += static_cast<float>(bias[channel_of(i) * p.bias_step]);
  }
  if (p.has_residual) {
    device const T* const added = residual + int64_t(pixel) * p.residual.x;
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      const uint row = min(uint(sums.get_multidimensional_index(i)[1]), rows - 1);
      sums[i] += static_cast<float>(added[int(row) * p.residual.x + channel_of(i) * p.residual.channel]);
    }
  }
  activate<T>(sums, p.activation);
  auto values = multiply.template get_destination_cooperative_tensor<Matrix, Matrix, T>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); ++i) values[i] = T(sums[i]);
  values.store(
      Matrix(result + int64_t(pixel) * all + channel, Extents(int(columns), int(rows)), array<int, 2>{1, int(all)}));
}

template <typename T>
[[kernel]] void conv2d_unit_sum(device const float* parts [[buffer(0)]], device const T* scale [[buffer(2)]],
                                device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]],
                                device T* result [[buffer(5)]], constant ConvParams& p [[buffer(6)]],
                                uint thread_index [[thread_position_in_grid]]) {
  const uint all = p.groups * p.outputs, index = thread_index * GEMM_UNIT_SUMS, count = p.pixels * all;
  if (index >= count) return;
  const float4 sum = sum_parts(parts, index, count, (p.terms + p.split_terms - 1) / p.split_terms);
  const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
  if (all % GEMM_UNIT_SUMS == 0) {
    const uint pixel = index / all, channel = index - pixel * all;
    epilogue.store_channels(p, int64_t(pixel) * p.residual.x, index - channel, channel, GEMM_UNIT_SUMS, sum);
    return;
  }
#pragma unroll
  for (uint j = 0; j < GEMM_UNIT_SUMS; ++j) {
    const uint pixel = (index + j) / all, channel = (index + j) % all;
    if (index + j < count) epilogue.store(p, pixel_at(p, pixel), channel, sum[j]);
  }
}

#define TILE(name, T, columns, threads) \
  template                              \
      [[host_name("conv2d_unit_" name   \
                  "_" #T)]] [[kernel]] decltype(conv2d_unit<T, columns, threads>) conv2d_unit<T, columns, threads>;
#define INSTANTIATE(T)                             \
  TILE("64", T, 64, CONV_UNIT_THREADS)             \
  TILE("128", T, 128, CONV_UNIT_THREADS)           \
  TILE("deep_64", T, 64, CONV_UNIT_DEEP_THREADS)   \
  TILE("deep_128", T, 128, CONV_UNIT_DEEP_THREADS) \
  template [[host_name("conv2d_unit_sum_" #T)]] [[kernel]] decltype(conv2d_unit_sum<T>) conv2d_unit_sum<T>;
INSTANTIATE(half)
INSTANTIATE(bfloat)
