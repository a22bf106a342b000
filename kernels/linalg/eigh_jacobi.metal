// Eigenvalues and eigenvectors of symmetric or Hermitian matrices by one-sided Jacobi (jacobi.h) on B = A + s I, where
// s is above A's norm: B is positive definite, so the columns of B V, once orthogonal, have the eigenvectors as
// directions and the eigenvalues plus s as norms, and V need not be computed.
//
// A is divided by a power of two that makes its largest entry about one. If a matrix has NaN or infinities, all its
// results are NaN.
#include <metal_stdlib>
using namespace metal;

#include "hermitian.h"
#include "jacobi.h"
#include "spectral.h"

inline void add_real(thread float4& v, float4 a) { v += a; }
inline void add_real(thread Complex4& v, float4 a) { v.re += a; }

template <typename Tile, bool VECTORS>
inline void eigh_of(device const typename Tile::Number* a, device float* values, device typename Tile::Number* vectors,
                    constant EighParams& p, uint matrix, thread typename Tile::Shared& shared) {
  typedef typename Tile::Number T;
  typedef typename Tile::Four Four;
  const uint lane = shared.lane, part = shared.part();
  const bool live = matrix < p.matrices;  // the other lanes work on zeros
  device const T* const from = a + matrix * p.batch_stride;
  Tile tile;
  uint4 magnitude = uint4(0);  // as bits, which compare as the numbers do, with NaN above infinity
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    const uint column = c * Tile::LANES + lane % Tile::LANES;
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i) {
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const uint row = Tile::row_of(part, i) + e;
        set_entry(tile.y[c][i], e,
                  live && max(row, column) < p.size
                      ? of_triangle(from[max(row, column) * p.row_stride + min(row, column) * p.column_stride], row,
                                    column, p.conjugate)
                      : T(0.0f));
      }
      magnitude = max(magnitude, bits_of(tile.y[c][i]));
    }
    tile.square[c] = column < p.size ? 0.0f : -1.0f;
  }
  const uint bits = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
  const float largest = shared.max(column_max<Tile::LANES>(bits < 0x7f800000 ? as_type<float>(bits) : INFINITY));
  const bool finite = largest < INFINITY;
  const float scale = scale_to_one(largest);

  // The norm is at most the largest sum of a column's magnitudes, and at most the root of all squares.
  float sums[Tile::COLUMNS], squares[Tile::COLUMNS];
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    float4 sum = float4(0.0f);
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i) {
      tile.y[c][i] = finite ? scaled_by(tile.y[c][i], scale) : four_of(T(0.0f));
      sum += lengths_of(tile.y[c][i]);
    }
    sums[c] = sum_of(sum);
    squares[c] = jacobi_square<Tile::X4>(tile.y[c]);
  }
  shared.template sum<Tile::COLUMNS>(sums);
  shared.template sum<Tile::COLUMNS>(squares);
  float most = 0.0f, total = 0.0f;
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    most = max(most, sums[c]);
    total += squares[c];
  }
  const float bound = min(column_max<Tile::LANES>(most), precise::sqrt(column_sum<Tile::LANES>(total)));
  const float shift = bound > 0.0f ? 1.0625f * bound : 1.0f;
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c)
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i) {
      const uint column = c * Tile::LANES + lane % Tile::LANES;
      const uint4 row = Tile::row_of(part, i) + uint4(0, 1, 2, 3);
      add_real(tile.y[c][i], select(float4(0.0f), float4(shift), row == column && column < p.size));
    }

  jacobi(tile, shared, FLT_EPSILON * precise::sqrt(float(p.size)));

  uint ranks[Tile::COLUMNS];
  jacobi_ranks(tile, lane, ranks);
  if (!live) return;
#pragma unroll
  for (uint c = 0; c < Tile::COLUMNS; ++c) {
    if (ranks[c] >= p.size) continue;
    const uint rank = p.size - 1 - ranks[c];
    const float norm = precise::sqrt(tile.square[c]);
    if (part == 0) values[ulong(matrix) * p.size + rank] = finite ? (norm - shift) * inverse_of_scale(scale) : NAN;
    if (!VECTORS) continue;
    const float factor = finite ? 1.0f / norm : NAN;
    device T* const to = vectors + ulong(matrix) * p.size * p.size + rank;
#pragma unroll
    for (uint i = 0; i < Tile::X4; ++i)
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const uint row = Tile::row_of(part, i) + e;
        if (row < p.size) to[row * p.size] = entry(tile.y[c][i], e) * factor;
      }
  }
}

constant constexpr uint kSimdgroups = 4;  // per threadgroup of the simd kernels

// A simdgroup takes 32 / (LANES SPLITS) matrices.
template <uint LANES, uint SPLITS, bool VECTORS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void eigh_simd(
    device const T* a [[buffer(0)]], device float* values [[buffer(1)]], device T* vectors [[buffer(2)]],
    constant EighParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef JacobiTile<2, LANES, SPLITS, 1, 2 * LANES, false, T> Tile;
  typename Tile::Shared shared = {nullptr, 0, lane, 0};
  const uint matrix = (group * kSimdgroups + simdgroup) * (32 / (LANES * SPLITS)) + lane / (LANES * SPLITS);
  eigh_of<Tile, VECTORS>(a, values, vectors, p, matrix, shared);
}

// A threadgroup takes a matrix of up to COLUMNS LANES columns.
template <uint COLUMNS, uint LANES, uint SIMDGROUPS, bool VECTORS, typename T, uint MOST>
[[kernel]] [[max_total_threads_per_threadgroup(MOST)]] void eigh_block(
    device const T* a [[buffer(0)]], device float* values [[buffer(1)]], device T* vectors [[buffer(2)]],
    constant EighParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef JacobiTile<COLUMNS, LANES, 32 / LANES, SIMDGROUPS, COLUMNS * LANES, false, T> Tile;
  threadgroup float memory[Tile::Shared::kFloats];
  typename Tile::Shared shared = {memory, simdgroup, lane, 0};
  eigh_of<Tile, VECTORS>(a, values, vectors, p, matrix, shared);
}

#define ARGUMENTS(type) device const type*, device float*, device type*, constant EighParams&, uint, uint, uint
#define SIMD(name, size, lanes, splits, type)                                                               \
  template [[host_name(name #size)]] [[kernel]] void eigh_simd<lanes, splits, true, type>(ARGUMENTS(type)); \
  template [[host_name(name "values_" #size)]] [[kernel]] void eigh_simd<lanes, splits, false, type>(ARGUMENTS(type));
#define BLOCK_OF(name, type, ...) template [[host_name(name)]] [[kernel]] void eigh_block<__VA_ARGS__>(ARGUMENTS(type));
#define BLOCK(name, size, columns, lanes, simdgroups, type, most)          \
  BLOCK_OF(name #size, type, columns, lanes, simdgroups, true, type, most) \
  BLOCK_OF(name "values_" #size, type, columns, lanes, simdgroups, false, type, most)

SIMD("eigh_simd_", 8, 4, 2, float)
SIMD("eigh_simd_", 16, 8, 2, float)
SIMD("eigh_simd_", 32, 16, 2, float)
BLOCK("eigh_block_", 64, 2, 32, 4, float, 512)
BLOCK("eigh_block_", 128, 4, 32, 16, float, 512)
SIMD("eigh_complex_simd_", 8, 4, 2, float2)
SIMD("eigh_complex_simd_", 16, 8, 4, float2)
// A complex number takes two registers, so that more simdgroups share the rows.
BLOCK("eigh_complex_block_", 32, 2, 16, 4, float2, 128)
BLOCK("eigh_complex_block_", 64, 2, 32, 8, float2, 256)
BLOCK("eigh_complex_block_", 128, 4, 32, 16, float2, 512)
