// The blocked variant, which is right-looking as LAPACK's getrf is, in two levels. After a panel (lu_panel.metal),
// lu_rows exchanges rows in all other columns, makes rows of U in the rest of the block, and puts the panel back in its
// place; lu_update subtracts L U from the rest of the block. After a block's last panel, lu_top makes the rows of U on
// the block's right, and lu_update subtracts the block's L U from the rest of the matrix.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

constant constexpr uint kNone = UINT_MAX;
constant constexpr uint kQuads = LU_PANEL / 4;
constant constexpr uint kMoved = 8;  // rows on their way at once

// Forward substitution from row K on with a unit lower triangle, given by columns. It is no loop, because compilers may
// not unroll a loop of this size, and `top` would then be in memory.
template <uint K>
struct TopSolve {
  static void run(thread float4 (&top)[kQuads], threadgroup const float4* l) {
    const float4 factor = float4(-top[K / 4][K % 4]);
#pragma unroll
    for (uint j = K / 4; j < kQuads; ++j) top[j] = fma(factor, l[K * kQuads + j], top[j]);
    TopSolve<K + 1>::run(top, l);
  }
};

template <>
struct TopSolve<LU_PANEL> {
  static void run(thread float4 (&)[kQuads], threadgroup const float4*) {}
};

// A unit lower triangle by columns, with zeros on and above the diagonal and beyond `width`. `l` has `row` and `column`
// as distances.
inline void load_triangle(threadgroup float4* to, device const float* l, ulong row, ulong column, uint width,
                          uint thread_index) {
  for (uint at = thread_index; at < LU_PANEL * LU_PANEL; at += LU_ROWS_THREADS) {
    const uint i = column == 1 ? at / LU_PANEL : at % LU_PANEL, k = column == 1 ? at % LU_PANEL : at / LU_PANEL;
    ((threadgroup float*)to)[k * LU_PANEL + i] = i < width && k < i ? l[i * row + k * column] : 0.0f;
  }
}

// Copies some rows of the panel from scratch memory to the matrix.
inline void put_back(device float* to, device const float* panel, constant LuRowsParams& p, uint first_row,
                     threadgroup float* held, uint thread_index) {
  constexpr uint kPitch = LU_ROWS_THREADS + 1;
  for (uint at = thread_index; at < LU_PANEL * LU_ROWS_THREADS; at += LU_ROWS_THREADS) {
    const uint row = at % LU_ROWS_THREADS, column = at / LU_ROWS_THREADS;
    if (first_row + row < p.rows - p.first && column < p.width)
      held[column * kPitch + row] = panel[ulong(column) * p.pitch + first_row + row];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint at = thread_index; at < LU_PANEL * LU_ROWS_THREADS; at += LU_ROWS_THREADS) {
    const uint row = at / LU_PANEL, column = at % LU_PANEL;
    if (first_row + row < p.rows - p.first && column < p.width)
      to[ulong(first_row + row) * p.columns + column] = held[column * kPitch + row];
  }
}

// A thread takes a column beside the panel: the rows that pivoting moved to the panel's top, the rows that they
// displaced, and in the block on the right of the panel U = L⁻¹ times the new top. The last threadgroups put the panel
// back in its place.
[[kernel]] [[max_total_threads_per_threadgroup(LU_ROWS_THREADS)]] void lu_rows(
    device float* a [[buffer(0)]], device const int* pivots [[buffer(1)]], device const float* panel [[buffer(2)]],
    device uint* permutation [[buffer(3)]], constant LuRowsParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 l[(LU_PANEL * (LU_ROWS_THREADS + 1) + 3) / 4];
  threadgroup uint pivot_of[LU_PANEL], top_source[LU_PANEL], below[LU_PANEL], below_source[LU_PANEL];
  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint n = p.columns, width = p.width;
  device float* const base = a + (ulong(matrix) * p.rows + p.first) * n;
  panel += ulong(matrix) * LU_PANEL * p.pitch;
  if (tile >= p.column_tiles) {
    put_back(base + p.first, panel, p, (tile - p.column_tiles) * LU_ROWS_THREADS, (threadgroup float*)l, thread_index);
    return;
  }

  if (thread_index < LU_PANEL) {
    const uint i = thread_index;
    pivot_of[i] = i < width ? uint(pivots[ulong(matrix) * p.pivots + p.first + i]) - 1 - p.first : i;
  }
  load_triangle(l, panel, 1, p.pitch, width, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  {
    const uint i = thread_index % LU_PANEL, row = pivot_of[i];
    const uint source = source_row(thread_index < LU_PANEL ? uint(i) : row, 0, width, pivot_of);
    if (thread_index < LU_PANEL) {
      top_source[i] = source;
    } else {
      below[i] = i < width && row >= width ? row : kNone;
      below_source[i] = source;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (p.permutation != 0 && tile == 0) {
    device uint* const order = permutation + ulong(matrix) * p.rows + p.first;
    const uint i = thread_index % LU_PANEL;
    const bool above = thread_index < LU_PANEL;
    const uint to = above ? (i < width ? uint(i) : kNone) : below[i];  // no address of i, which would put it in memory
    const uint from = above ? top_source[i] : below_source[i];
    const uint row = to != kNone ? order[from] : 0;
    threadgroup_barrier(mem_flags::mem_device);
    if (to != kNone) order[to] = row;
  }

  const uint beside = tile * LU_ROWS_THREADS + thread_index;
  const uint column = beside < p.first ? beside : beside + width;
  const bool has_column = column < n;
  float4 top[kQuads];
#pragma unroll
  for (uint i = 0; i < LU_PANEL; ++i)
    top[i / 4][i % 4] = has_column && i < width ? base[ulong(top_source[i]) * n + column] : 0.0f;
  // Rows that move down come from the top, which is not written here, so a few of them can be moved at a time.
  for (uint i = 0; i < LU_PANEL; i += kMoved) {
    float moved[kMoved];
#pragma unroll
    for (uint j = 0; j < kMoved; ++j)
      moved[j] = has_column && below[i + j] != kNone ? base[ulong(below_source[i + j]) * n + column] : 0.0f;
#pragma unroll
    for (uint j = 0; j < kMoved; ++j)
      if (has_column && below[i + j] != kNone) base[ulong(below[i + j]) * n + column] = moved[j];
  }
  if (column > p.first && column < p.end) TopSolve<0>::run(top, l);
#pragma unroll
  for (uint i = 0; i < LU_PANEL; ++i)
    if (has_column && i < width) base[ulong(i) * n + column] = top[i / 4][i % 4];
}

// A thread takes a column on the right of a block, and makes LU_PANEL rows of U at a time from those above.
[[kernel]] [[max_total_threads_per_threadgroup(LU_ROWS_THREADS)]] void lu_top(
    device float* a [[buffer(0)]], constant LuTopParams& p [[buffer(1)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 l[LU_PANEL * kQuads];  // by columns
  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const ulong n = p.columns;
  device float* const base = a + (ulong(matrix) * p.rows + p.first) * n;
  device const float* const lower = base + p.first;
  const uint column = p.first + p.width + tile * LU_ROWS_THREADS + thread_index;
  const bool has_column = column < n;
  for (uint row = 0; row < p.width; row += LU_PANEL) {
    float4 top[kQuads];
#pragma unroll
    for (uint i = 0; i < LU_PANEL; ++i) top[i / 4][i % 4] = has_column ? base[(row + i) * n + column] : 0.0f;
    for (uint done = 0; done < row; done += LU_PANEL) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint at = thread_index; at < LU_PANEL * LU_PANEL; at += LU_ROWS_THREADS) {
        const uint i = at / LU_PANEL, k = at % LU_PANEL;
        ((threadgroup float*)l)[k * LU_PANEL + i] = lower[(row + i) * n + done + k];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll(8)
      for (uint k = 0; k < LU_PANEL; ++k) {
        const float4 factor = float4(has_column ? -base[(done + k) * n + column] : 0.0f);
#pragma unroll
        for (uint j = 0; j < kQuads; ++j) top[j] = fma(factor, l[k * kQuads + j], top[j]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_triangle(l, lower + row * n + row, n, 1, LU_PANEL, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TopSolve<0>::run(top, l);
#pragma unroll
    for (uint i = 0; i < LU_PANEL; ++i)
      if (has_column) base[(row + i) * n + column] = top[i / 4][i % 4];
  }
}
