// Exponentials of matrices of up to 64 columns, complex ones of up to 32, by scaling and squaring, as in
// matrix_exp.metal. A threadgroup takes a matrix, and a thread a tile of 4 x 4 entries of it. A complex matrix is the
// real one (Re, -Im; Im, Re) of twice the size.
#include <metal_stdlib>
using namespace metal;

#include "matrix_exp.h"
#include "matrix_exp_series.h"

constant constexpr uint kSide = MATRIX_EXP_BLOCK_COLUMNS / 4;  // tiles in a row

inline float real_entry(device const float* a, constant MatrixExpParams& p, uint i, uint j) {
  return i < p.size && j < p.size ? a[i * p.row_stride + j * p.column_stride] : 0.0f;
}
inline float real_entry(device const float2* a, constant MatrixExpParams& p, uint i, uint j) {
  const uint n = p.size;
  if (i >= 2 * n || j >= 2 * n) return 0.0f;
  const bool below = i >= n, right = j >= n;
  const float2 value = a[(i - (below ? n : 0)) * p.row_stride + (j - (right ? n : 0)) * p.column_stride];
  return below == right ? value.x : below ? value.y : -value.y;
}
inline void store_entry(device float* to, uint n, uint i, uint j, float value) {
  if (i < n && j < n) to[i * n + j] = value;
}
inline void store_entry(device float2* to, uint n, uint i, uint j, float value) {
  if (j >= n || i >= 2 * n) return;
  device float* const at = (device float*)(to + (i < n ? i : i - n) * n + j);
  at[i < n ? 0 : 1] = value;
}

// Four rows of four entries.
struct ExpTile {
  float4 rows[4];
};

// A tile of a product's left factor, which is stored by columns.
inline void put_left(threadgroup float4* left, thread const ExpTile& tile, uint row, uint column) {
#pragma unroll
  for (uint c = 0; c < 4; ++c)
    left[(4 * column + c) * kSide + row] = float4(tile.rows[0][c], tile.rows[1][c], tile.rows[2][c], tile.rows[3][c]);
}
inline void put_right(threadgroup float4* right, thread const ExpTile& tile, uint row, uint column) {
#pragma unroll
  for (uint r = 0; r < 4; ++r) right[(4 * row + r) * kSide + column] = tile.rows[r];
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(kSide * kSide)]] void matrix_exp_block(
    device const T* a [[buffer(0)]], device T* result [[buffer(1)]], constant MatrixExpParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[MATRIX_EXP_BLOCK_COLUMNS * kSide], right[MATRIX_EXP_BLOCK_COLUMNS * kSide];
  const uint row = thread_index / kSide, column = thread_index % kSide;
  const uint size = p.size * (sizeof(T) / sizeof(float));
  ExpTile power, square, found;
  float4 lengths = float4(0.0f);
  a += matrix * p.batch_stride;
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
#pragma unroll
    for (uint c = 0; c < 4; ++c) power.rows[r][c] = real_entry(a, p, 4 * row + r, 4 * column + c);
    lengths += abs(power.rows[r]);
  }
  // Column sums, and the bits of the largest, with NaN above infinity.
  right[thread_index] = lengths;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  lengths = float4(0.0f);
  for (uint r = 0; r < kSide; ++r) lengths += right[r * kSide + column];
  const uint4 column_bits = as_type<uint4>(abs(lengths * (2.0f / 3)));
  const uint bits = simd_max(max(max(column_bits.x, column_bits.y), max(column_bits.z, column_bits.w)));
  const bool finite = bits < 0x7f800000;
  const uint squarings = squarings_of(bits);
  const float half_scale = exp2(-float(squarings / 2)), other_half = exp2(-float(squarings - squarings / 2));
#pragma unroll
  for (uint r = 0; r < 4; ++r) power.rows[r] = (power.rows[r] * half_scale) * other_half;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  put_left(left, power, row, column);
  put_right(right, power, row, column);
  for (uint step = 0; step < 5 + squarings; ++step) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint r = 0; r < 4; ++r) found.rows[r] = float4(0.0f);
#pragma unroll 4
    for (uint k = 0; k < size; ++k) {
      const float4 down = left[k * kSide + row], along = right[k * kSide + column];
#pragma unroll
      for (uint r = 0; r < 4; ++r) found.rows[r] = fma(float4(down[r]), along, found.rows[r]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step == 0) {  // A²
      square = found;
      put_right(right, found, row, column);
      continue;
    }
    if (step == 1) put_left(left, found, row, column);  // A³
    if (step < 5) {                                     // three terms more of the polynomial
      constant const float* const c = kExpCoefficients + 12 - 3 * step;
#pragma unroll
      for (uint r = 0; r < 4; ++r) {
        const float4 identity = select(float4(0.0f), float4(c[0]), 4 * column + uint4(0, 1, 2, 3) == 4 * row + r);
        const float4 terms = fma(float4(c[1]), power.rows[r], fma(float4(c[2]), square.rows[r], identity));
        found.rows[r] = fma(float4(step == 1 ? c[3] : 1.0f), found.rows[r], terms);
      }
    }
    if (step >= 4) put_left(left, found, row, column);
    put_right(right, found, row, column);
  }
#pragma unroll
  for (uint r = 0; r < 4; ++r)
#pragma unroll
    for (uint c = 0; c < 4; ++c)
      store_entry(result + ulong(matrix) * p.size * p.size, p.size, 4 * row + r, 4 * column + c,
                  finite ? found.rows[r][c] : NAN);
}

#define INSTANTIATE(name, type)                                                                         \
  template [[host_name(name)]] [[kernel]] void matrix_exp_block<type>(device const type*, device type*, \
                                                                      constant MatrixExpParams&, uint, uint);

INSTANTIATE("matrix_exp_block", float)
INSTANTIATE("matrix_exp_block_complex", float2)
