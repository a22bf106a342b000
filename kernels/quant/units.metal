// Products of packed weights and many rows of x in 16 bits, on GPUs whose units multiply tensors: a threadgroup has a
// tile of rows of x by rows of weights, and rounds weights to x's dtype.
#include <metal_tensor>

#include "unpacked.h"

using namespace metal;
using namespace mpp::tensor_ops;

template <typename F, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_UNIT_THREADS)]] void quant_unit(
    device const typename F::Word* packed [[buffer(0)]], device T* x [[buffer(1)]], device T* y [[buffer(2)]],
    constant QuantUnitParams& p [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kRows = QUANT_UNIT_ROWS, kColumns = QUANT_UNIT_COLUMNS, kSimds = QUANT_UNIT_THREADS / 32;
  using Extents = dextents<int, 2>;
  using Matrix = tensor<device T, Extents, tensor_inline>;
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, QUANT_UNIT_STEP, false, true);
  constexpr matmul2d<descriptor, execution_simdgroups<kSimds>> multiply;
  alignas(16) threadgroup T tile[kColumns * QUANT_UNIT_STEP];

  const uint row = group.y * kRows, column = group.x * kColumns, terms = p.slices * QUANT_SLICE;
  const uint rows = min(kRows, p.x_rows - row), columns = min(kColumns, p.weights - column);
  const Matrix left(x + ulong(row) * terms, Extents(int(terms), int(rows)), array<int, 2>{1, int(terms)});
  const UnpackedRows<F, T> right = {place(packed, 0), p.row_bytes, column, p.weights, p.slices};
  auto sums = multiply.template get_destination_cooperative_tensor<Matrix, Matrix, float>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
  metalcore_multiply_unpacked<kRows, kColumns, kSimds>(left, right, tile, sums, thread_index, 0);
  auto values = multiply.template get_destination_cooperative_tensor<Matrix, Matrix, T>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); ++i) values[i] = T(sums[i]);
  values.store(
      Matrix(y + ulong(row) * p.weights + column, Extents(int(columns), int(rows)), array<int, 2>{1, int(p.weights)}));
}

#define QUANT_UNIT(F)                                                                                            \
  template [[host_name("quant_unit_" #F "_half")]] [[kernel]] decltype(quant_unit<F, half>) quant_unit<F, half>; \
  template [[host_name("quant_unit_" #F "_bfloat")]] [[kernel]] decltype(quant_unit<F, bfloat>) quant_unit<F, bfloat>;
FOR_QUANT_TYPES(QUANT_UNIT)
