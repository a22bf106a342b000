// SVD by one-sided Jacobi (jacobi.h): A V = X with orthogonal columns. Their norms are the singular values, and their
// directions the left singular vectors.
//
// A is divided by a power of two that makes its largest entry about one, even if it is scaled already. If a matrix has
// NaN or infinities, all its results are NaN.
#include <metal_stdlib>
using namespace metal;

#include "jacobi.h"
#include "spectral.h"

// `present` gets the number of left vectors that this kernel makes. svd_complete makes the others, whose singular
// values are zero or nearly so.
template <typename Tile, bool VECTORS>
inline void svd_of(device const typename Tile::Number* a, device typename Tile::Number* left, device float* values,
                   device typename Tile::Number* right, device uint* present, device const float* scales,
                   constant SvdParams& p, uint matrix, thread typename Tile::Shared& shared) {
  typedef typename Tile::Number T;
  typedef typename Tile::Four Four;
  const uint lane = shared.lane, part = shared.part();
  const bool live = matrix < p.matrices;  // the other lanes work on zeros
  Tile tile;
  uint4 magnitude = uint4(0);  // as bits, which compare as the numbers do, with NaN above infinity
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    const uint column = c * Tile::LANES + lane % Tile::LANES;
    device const T* from = a + matrix * p.a.batch_stride + column * p.a.column_stride;
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i)
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const uint row = Tile::row_of(part, i) + e;
        set_entry(tile.y[c][i], e, live && column < p.columns && row < p.rows ? from[row * p.a.row_stride] : T(0.0f));
      }
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i) magnitude = max(magnitude, bits_of(tile.y[c][i]));
#pragma unroll
    for (uint i = 0; i < Tile::V4; ++i) {
      const uint4 row = Tile::v_row_of(part, i) + uint4(0, 1, 2, 3);
      tile.y[c][Tile::X4 + i] = choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), row == column);
    }
    tile.square[c] = column < p.columns ? 0.0f : -1.0f;
  }
  const uint bits = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
  const float largest = shared.max(column_max<Tile::LANES>(bits < 0x7f800000 ? as_type<float>(bits) : INFINITY));
  const float scale = largest < INFINITY ? scale_to_one(largest) : 0.0f;  // takes one register less than a flag
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c)
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i)
      tile.y[c][i] = scale > 0.0f ? scaled_by(scaled_by(tile.y[c][i], scale), kJacobiScale) : four_of(T(0.0f));

  jacobi(tile, shared, FLT_EPSILON * precise::sqrt(float(p.rows)));

  uint ranks[Tile::COLUMNS];
  const uint found = jacobi_ranks(tile, lane, ranks);
  const bool finite = scale > 0.0f;
  if (!live) return;
  if (VECTORS && part == 0 && lane % Tile::LANES == 0) present[matrix] = finite ? found : p.columns;
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    const uint rank = ranks[c];
    if (rank >= p.columns) continue;
    const float norm = precise::sqrt(tile.square[c]);
    if (part == 0) {
      const float before = p.scaled ? inverse_of_scale(scales[matrix]) : 1.0f;
      values[ulong(matrix) * p.columns + rank] = finite ? norm / kJacobiScale * inverse_of_scale(scale) * before : NAN;
    }
    if (!VECTORS) continue;
    const float factor = !finite ? NAN : tile.square[c] > kJacobiFloor ? 1.0f / norm : 0.0f;
    device T* const to_left = left + matrix * p.left.batch_stride + rank * p.left.column_stride;
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i)
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const uint row = Tile::row_of(part, i) + e;
        if (row < p.rows) to_left[row * p.left.row_stride] = entry(tile.y[c][i], e) * factor;
      }
    device T* const to_right = right + matrix * p.right.batch_stride + rank * p.right.row_stride;
#pragma unroll
    for (uint i = 0; i < Tile::V4; ++i)
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const uint row = Tile::v_row_of(part, i) + e;
        if (row < p.columns)
          to_right[row * p.right.column_stride] = finite ? conjugate(entry(tile.y[c][Tile::X4 + i], e)) : T(NAN);
      }
  }
}

constant constexpr uint kSimdgroups = 4;  // per threadgroup of the simd kernels

// A simdgroup takes 32 / (LANES SPLITS) matrices.
template <uint ROWS, uint LANES, uint SPLITS, bool VECTORS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void svd_simd(
    device const T* a [[buffer(0)]], device T* left [[buffer(1)]], device float* values [[buffer(2)]],
    device T* right [[buffer(3)]], device uint* present [[buffer(4)]], constant SvdParams& p [[buffer(5)]],
    device const float* scales [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef JacobiTile<2, LANES, SPLITS, 1, ROWS, VECTORS, T> Tile;
  typename Tile::Shared shared = {nullptr, 0, lane, 0};
  const uint matrix = (group * kSimdgroups + simdgroup) * (32 / (LANES * SPLITS)) + lane / (LANES * SPLITS);
  svd_of<Tile, VECTORS>(a, left, values, right, present, scales, p, matrix, shared);
}

// A threadgroup takes a matrix of up to COLUMNS LANES columns and rows. Without RIGHT it makes no right singular
// vectors.
template <uint COLUMNS, uint LANES, uint SIMDGROUPS, bool VECTORS, uint MOST, typename T, bool RIGHT = VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(MOST)]] void svd_block(
    device const T* a [[buffer(0)]], device T* left [[buffer(1)]], device float* values [[buffer(2)]],
    device T* right [[buffer(3)]], device uint* present [[buffer(4)]], constant SvdParams& p [[buffer(5)]],
    device const float* scales [[buffer(6)]], uint matrix [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef JacobiTile<COLUMNS, LANES, 32 / LANES, SIMDGROUPS, COLUMNS * LANES, RIGHT, T> Tile;
  threadgroup float memory[Tile::Shared::kFloats];
  typename Tile::Shared shared = {memory, simdgroup, lane, 0};
  svd_of<Tile, VECTORS>(a, left, values, right, present, scales, p, matrix, shared);
}

#define ARGUMENTS(type)                                                                             \
  device const type*, device type*, device float*, device type*, device uint*, constant SvdParams&, \
      device const float*, uint, uint, uint
#define SIMD_OF(name, rows, lanes, splits, type, vectors) \
  template [[host_name(name)]] [[kernel]] void svd_simd<rows, lanes, splits, vectors, type>(ARGUMENTS(type));
#define SIMD(name, rows, columns, lanes, splits, type)              \
  SIMD_OF(name #rows "x" #columns, rows, lanes, splits, type, true) \
  SIMD_OF(name "values_" #rows "x" #columns, rows, lanes, splits, type, false)
#define BLOCK_OF(name, type, ...) template [[host_name(name)]] [[kernel]] void svd_block<__VA_ARGS__>(ARGUMENTS(type));
#define BLOCK(name, size, columns, lanes, simdgroups, type, most)          \
  BLOCK_OF(name #size, type, columns, lanes, simdgroups, true, most, type) \
  BLOCK_OF(name "values_" #size, type, columns, lanes, simdgroups, false, most, type)

SIMD("svd_simd_", 8, 8, 4, 2, float)
SIMD("svd_simd_", 16, 8, 4, 2, float)
SIMD("svd_simd_", 32, 8, 4, 2, float)
SIMD("svd_simd_", 16, 16, 8, 2, float)
SIMD("svd_simd_", 32, 16, 8, 2, float)
SIMD("svd_simd_", 32, 32, 16, 2, float)
BLOCK("svd_block_", 64, 2, 32, 4, float, 512)
BLOCK("svd_block_", 128, 4, 32, 16, float, 512)
// For GPUs whose threads have few registers: more simdgroups share the rows.
BLOCK_OF("svd_lean_32", float, 2, 16, 2, true, 64, float)
BLOCK_OF("svd_lean_64", float, 2, 32, 8, true, 256, float)
// A complex number takes two registers, so that more simdgroups share the rows.
SIMD("svd_complex_simd_", 8, 8, 4, 2, float2)
SIMD("svd_complex_simd_", 16, 8, 4, 2, float2)
SIMD("svd_complex_simd_", 16, 16, 8, 4, float2)
BLOCK("svd_complex_block_", 32, 2, 16, 2, float2, 64)
BLOCK("svd_complex_block_", 64, 2, 32, 8, float2, 256)
// The registers of a threadgroup hold no V beside such a matrix.
BLOCK_OF("svd_complex_block_128", float2, 4, 32, 16, true, 512, float2, false)
BLOCK_OF("svd_complex_block_values_128", float2, 4, 32, 16, false, 512, float2)
