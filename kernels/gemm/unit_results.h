// What is made of the sums of units that multiply tensors.
#pragma once

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "gemm/unit_sums.h"

// A part of a matrix whose rows begin `line` elements after each other, and whose columns `step`.
template <typename T>
inline auto unit_part(device T* data, uint columns, uint rows, int64_t line, int64_t step = 1) {
  using Extents = metal::dextents<int, 2>;
  return metal::tensor<device T, Extents, metal::tensor_inline>(data, Extents(int(columns), int(rows)),
                                                                metal::array<int, 2>{int(step), int(line)});
}

// The results of a tile, which ends before `end_row` or sooner. `result` is that of the member of the batch.
template <typename T>
struct UnitResults {
  device const T* bias;
  device const T* residual;
  device T* result;
  uint row, column, end_row, member;

  // Makes results of the sums, which are of this thread, in `values`. The loops are unrolled, so that the sums stay in
  // registers, and have no branches, so that loads go on at the same time: elements outside take what is at the edge.
  template <typename Sums, typename Values>
  METAL_FUNC void store(constant GemmParams& p, thread Sums& sums, thread Values& values) const {
    const uint rows = end_row - row, columns = p.columns - column;
    if (p.alpha != 1.0f) {
#pragma unroll
      for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] *= p.alpha;
    }
    if (p.has_bias && p.bias_column == 0) {
#pragma unroll
      for (ushort i = 0; i < sums.get_capacity(); ++i) {
        const uint place = metal::min(row + uint(sums.get_multidimensional_index(i)[1]), end_row - 1);
        sums[i] += static_cast<float>(bias[place]);
      }
    } else if (p.has_bias) {
#pragma unroll
      for (ushort i = 0; i < sums.get_capacity(); ++i) {
        const uint place = metal::min(column + uint(sums.get_multidimensional_index(i)[0]), p.columns - 1);
        sums[i] += static_cast<float>(bias[place]);
      }
    }
    if (p.has_residual) {
      // Within a tile, distances take 32 bits.
      const int row_step = int(p.residual.row), column_step = int(p.residual.column);
      device const T* const added =
          residual + batch_offset(p, p.residual, member) + row * p.residual.row + column * p.residual.column;
#pragma unroll
      for (ushort i = 0; i < sums.get_capacity(); ++i) {
        const auto at = sums.get_multidimensional_index(i);
        const int down = metal::min(int(at[1]), int(rows) - 1), across = metal::min(int(at[0]), int(columns) - 1);
        sums[i] = fma(p.beta, static_cast<float>(added[down * row_step + across * column_step]), sums[i]);
      }
    }
    activate<T>(sums, p.activation);
    // All destinations of an operation have the same layout.
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) values[i] = T(sums[i]);
    values.store(unit_part(result + row * p.result.row + column * p.result.column, columns, rows, p.result.row,
                           p.result.column));
  }
};
