// Activations of the sums that units made, and sums of what threadgroups left that share the terms of a tile.
#pragma once

#include "gemm/epilogue.h"

// In unrolled loops the sums stay in registers. Long activations take a copy of some sums at a time, which may be in
// memory and then stays in caches, so that the compiler has few of them and not as many as there are sums. NVIDIA's
// compiler makes one array of both where they are as many: products of all terms would wait for each other then.
template <typename T, typename Sums>
inline void activate(thread Sums& sums, uint activation) {
  if (activation == 0) return;
  if (activation == GEMM_RELU) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = activated<T>(sums[i], GEMM_RELU);
  } else if (activation == GEMM_SILU) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = activated<T>(sums[i], GEMM_SILU);
  } else {
    constexpr ushort kHeld = 12;  // no tile has as many sums
    float held[kHeld];
#pragma unroll
    for (ushort first = 0; first < sums.get_capacity(); first += kHeld) {
#pragma unroll
      for (ushort i = 0; i < kHeld; ++i) held[i] = first + i < sums.get_capacity() ? sums[first + i] : 0.0f;
#pragma unroll 4
      for (ushort i = 0; i < kHeld; ++i) held[i] = activated<T>(held[i], activation);
#pragma unroll
      for (ushort i = 0; i < kHeld; ++i)
        if (first + i < sums.get_capacity()) sums[first + i] = held[i];
    }
  }
}

// Adds GEMM_UNIT_SUMS elements from `index` on of `number` parts, which have `count` elements each.
inline metal::float4 sum_parts(device const float* parts, uint index, uint count, uint number) {
  metal::float4 sum = 0.0f;
  if (count % GEMM_UNIT_SUMS != 0) {
    for (uint i = 0; i < number; ++i, parts += count) {
#pragma unroll
      for (uint j = 0; j < GEMM_UNIT_SUMS; ++j)
        if (index + j < count) sum[j] += parts[index + j];
    }
    return sum;
  }
  constexpr uint kAtOnce = 4;
  for (uint first = 0; first < number; first += kAtOnce) {
    metal::float4 held[kAtOnce];
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i, parts += count)
      held[i] =
          first + i < number ? *reinterpret_cast<device const metal::float4*>(parts + index) : metal::float4(0.0f);
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) sum += held[i];
  }
  return sum;
}

// Makes `count` results, at most GEMM_UNIT_SUMS of them, of which the first one is in this row and column. The others
// are behind it in the row, or else in the column.
template <bool kInRows, typename T>
inline void store_sums(Epilogue<T> epilogue, constant GemmParams& p, uint row, uint column, uint count,
                       metal::float4 sums) {
  float values[GEMM_UNIT_SUMS];
#pragma unroll
  for (uint j = 0; j < GEMM_UNIT_SUMS; ++j) values[j] = p.alpha * sums[j];
  const uint last = count - 1;
  if (p.has_bias) {
    device const T* const bias = epilogue.bias + row * p.bias_row + column * p.bias_column;
    const int64_t step = kInRows ? p.bias_column : p.bias_row;
#pragma unroll
    for (uint j = 0; j < GEMM_UNIT_SUMS; ++j) values[j] += static_cast<float>(bias[metal::min(j, last) * step]);
  }
  if (p.has_residual) {
    device const T* const residual = epilogue.residual + row * p.residual.row + column * p.residual.column;
    const int64_t step = kInRows ? p.residual.column : p.residual.row;
#pragma unroll
    for (uint j = 0; j < GEMM_UNIT_SUMS; ++j)
      values[j] = fma(p.beta, static_cast<float>(residual[metal::min(j, last) * step]), values[j]);
  }
  if (p.activation != 0) {
#pragma unroll
    for (uint j = 0; j < GEMM_UNIT_SUMS; ++j) values[j] = activated<T>(values[j], p.activation);
  }
  const int64_t first = kInRows ? int64_t(row) * p.result.row + column : int64_t(column) * p.result.column + row;
  store_neighbours(epilogue.result + first, count, metal::float4(values[0], values[1], values[2], values[3]));
}

// The same for sums of a tile, whose first element is in row `first_row` and column `first_column` of the result.
template <bool kInRows, typename T>
struct TileResults {
  Epilogue<T> epilogue;
  constant GemmParams& p;
  uint first_row, first_column;

  void operator()(uint row, uint column, uint count, metal::float4 sums) const {
    store_sums<kInRows>(epilogue, p, first_row + row, first_column + column, count, sums);
  }
};
