// Least squares of matrices of full rank with at least as many rows as columns. Blocks of rows of (A, B) are factored
// by themselves, and then their stacked results, until one block is left (TSQR, Demmel et al. 2012). Q is never formed:
// the reflectors of A's columns turn B into Qᵀ B and a rest, whose sum of squares is the residual. So A and B are read
// once. The last block's threadgroup solves R X = Qᵀ B.
//
// G lanes share a column of a block, as in qr_block.metal. Each column of each block has a power of two as its scale,
// with which norms are in range, whatever the magnitudes in A and B are.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "qr.h"

// value * 2^exponent in two steps, each of which has a normal number as its factor.
inline float times_power(float value, int exponent) {
  return ldexp(ldexp(value, exponent / 2), exponent - exponent / 2);
}

inline int exponent_of(float power) { return (as_type<int>(power) >> 23) - 127; }

// A simdgroup solves R x = c for one right side. A lane holds every 32nd element. R's rows have `stride` elements.
constant constexpr uint kMostColumns = 128;
inline void substitute_back(device const float* r, device const float* c, uint n, uint stride, uint lane,
                            thread float* x) {
#pragma unroll
  for (uint t = 0; t < kMostColumns / 32; ++t) {
    const uint row = lane + 32 * t;
    x[t] = row < n ? c[row * stride] : 0.0f;
  }
#pragma unroll
  for (uint back = 0; back < kMostColumns / 32; ++back) {
    const uint t = kMostColumns / 32 - 1 - back, end = min(n, 32 * t + 32);
    for (uint k = end; k > 32 * t;) {
      --k;
      const float found = simd_shuffle(x[t], ushort(k % 32)) / r[k * stride + k];
#pragma unroll
      for (uint s = 0; s <= t; ++s) {
        const uint row = lane + 32 * s;
        if (row < k) x[s] = fma(-r[row * stride + k], found, x[s]);
        if (row == k) x[s] = found;
      }
    }
  }
}

template <uint G, uint QUADS>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void lstsq(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device const float* stack [[buffer(2)]],
    device const float* stack_scales [[buffer(3)]], device const float* stack_squares [[buffer(4)]],
    device float* r [[buffer(5)]], device float* scales [[buffer(6)]], device float* squares [[buffer(7)]],
    device float* x [[buffer(8)]], constant LstsqParams& p [[buffer(9)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  typedef ColumnTile<G, QUADS> Tile;
  threadgroup float4 reflectors[2 * Tile::kSlots];

  const uint n = p.columns, width = n + p.sides;
  const uint g = thread_index % G;
  const uint column = thread_index / G;
  const uint simdgroup_column = thread_index / 32 * (32 / G);  // the first of this simdgroup's columns
  const uint matrix = group / p.blocks, block = group % p.blocks;
  const uint first_row = block * p.block_rows;
  const uint rows = min(p.block_rows, p.rows - first_row);  // the other rows count as zeros
  const uint count = min(rows, n);
  const bool stacked = p.parts > 0, live = column < width, of_b = column >= n;

  // The parts of this block, of which each has n rows.
  const uint first_part = stacked ? first_row / n : 0, parts = stacked ? rows / n : 0;
  device const float* const part_scales = stack_scales + (ulong(matrix) * p.parts + first_part) * width;
  Tile tile;
  float scale = 0x1p126f;
  if (stacked) {
    float negative = -0x1p126f;
    for (uint part = g; part < parts; part += G)
      if (live) negative = max(negative, -part_scales[part * width + column]);
    scale = -column_max<G>(negative);
  }
  {
    device const float* from = stack + (ulong(matrix) * p.rows + first_row) * width + column;
    ulong row_stride = width;
    if (!stacked) {
      from = of_b ? b + matrix * p.b_batch + first_row * p.b_row + (column - n) * p.b_column
                  : a + matrix * p.a_batch + first_row * p.a_row + column * p.a_column;
      row_stride = of_b ? p.b_row : p.a_row;
    }
    float4 most = float4(0.0f);
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) {
      const uint4 row = Tile::rows_of(i, g);
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const bool there = live && row[e] < rows;
        float value = there ? from[row[e] * row_stride] : 0.0f;
        if (stacked && there) value *= scale * inverse_of_scale(part_scales[row[e] / n * width + column]);
        tile.x[i][e] = value;
      }
      most = max(most, abs(tile.x[i]));
    }
    if (!stacked) {
      scale = scale_to_one(column_max<G>(max_of(most)));
#pragma unroll
      for (uint i = 0; i < QUADS; ++i) tile.x[i] *= scale;
    }
  }

  float tau = 0.0f;
  for (uint quad = 0; quad < QUADS; ++quad) {
    const uint end = min((quad + 1) * Tile::kBlock, count);
    for (uint k = quad * Tile::kBlock; k < end; ++k) {
      threadgroup float4* const v = reflectors + (k & 1) * Tile::kSlots;
      if (k - simdgroup_column < 32 / G) make_and_publish(tile, quad, thread_index % 32, k, column == k, v, tau);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (simdgroup_column + 32 / G > k + 1) {
        const float factor = dot_with(tile, quad, g, v) * v[Tile::kSlots - 1].x;
        if (column > k) subtract(tile, quad, g, v, factor);
      }
    }
  }

  float4 rest = float4(0.0f);
  device float* const results = r + ulong(group) * n * width;
#pragma unroll
  for (uint i = 0; i < QUADS; ++i) {
    const uint4 row = Tile::rows_of(i, g);
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      if (live && row[e] < n) results[row[e] * width + column] = of_b || row[e] <= column ? tile.x[i][e] : 0.0f;
      rest[e] += row[e] < n ? 0.0f : tile.x[i][e] * tile.x[i][e];
    }
  }
  float square = sum_of(rest);
  if (live && of_b)
    for (uint part = g; part < parts; part += G) {
      const float share = scale * inverse_of_scale(part_scales[part * width + column]);
      square += stack_squares[(ulong(matrix) * p.parts + first_part + part) * p.sides + column - n] * share * share;
    }
  square = column_sum<G>(square);
  if (live && g == 0) {
    scales[ulong(group) * width + column] = scale;
    if (of_b)
      squares[ulong(group) * p.sides + column - n] = p.last ? times_power(square, -2 * exponent_of(scale)) : square;
  }

  // The block is a whole matrix where it is the last.
  threadgroup_barrier(mem_flags::mem_device);
  if (p.last == 0) return;
  const uint lane = thread_index % 32;
  for (uint side = thread_index / 32; side < p.sides; side += threads / 32) {
    float solution[kMostColumns / 32];
    substitute_back(results, results + n + side, n, width, lane, solution);
    const int exponent = exponent_of(scales[ulong(group) * width + n + side]);
#pragma unroll
    for (uint t = 0; t < kMostColumns / 32; ++t) {
      const uint row = lane + 32 * t;
      if (row < n)
        x[(ulong(matrix) * n + row) * p.sides + side] =
            times_power(solution[t], exponent_of(scales[ulong(group) * width + row]) - exponent);
    }
  }
}

#define INSTANTIATE(lanes, quads, rows)                                                                        \
  template [[host_name("lstsq_" #rows)]] [[kernel]] void lstsq<lanes, quads>(                                  \
      device const float*, device const float*, device const float*, device const float*, device const float*, \
      device float*, device float*, device float*, device float*, constant LstsqParams&, uint, uint, uint);

INSTANTIATE(4, 4, 64)
INSTANTIATE(4, 8, 128)
INSTANTIATE(8, 8, 256)
INSTANTIATE(16, 8, 512)
INSTANTIATE(32, 8, 1024)
