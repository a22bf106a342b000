// The reduction of large symmetric matrices to tridiagonal form in panels (LAPACK's latrd). The matrix keeps its
// entries during a panel, so a column reads the lower triangle once and writes nothing of it. A column is two
// dispatches: one multiplies its reflector by the matrix, and one makes w of A - v wᵀ - w vᵀ from the product and
// updates the next column. After the panel one update of rank 2 x columns follows.
//
// On NVIDIA GPUs a kernel reads what kernels before the last one wrote before it waits for the last one. They have
// ended: a kernel begins when all threadgroups of the tridiagonal_multiply before it have waited. At a panel's first
// column, the kernel just before wrote the matrix.
#include <metal_stdlib>
using namespace metal;

#include "common/earlier.h"
#include "hermitian.h"
#include "tridiagonalize_steps.h"
#include "tridiagonalize.h"

// Makes w of the column before, and the current column with the updates of the panel's columns before it.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONALIZE_NEXT_ROWS * TRIDIAGONALIZE_SLICES)]] void
tridiagonal_next(device const float* a [[buffer(0)]], device const float* reflectors [[buffer(1)]],
                 device float* w [[buffer(2)]], device float* x [[buffer(3)]], device float2* norms [[buffer(4)]],
                 device const float* products [[buffer(5)]], device const float* quadratic [[buffer(6)]],
                 device const float2* dots [[buffer(7)]], device const float* tau [[buffer(8)]],
                 device float* diagonal [[buffer(9)]], constant TridiagonalPanelParams& p [[buffer(10)]],
                 uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kRows = TRIDIAGONALIZE_NEXT_ROWS, kSlices = TRIDIAGONALIZE_SLICES, kOwn = kRows - 1;
  threadgroup float2 sums[kSlices * kRows];
  const uint matrix = group / p.parts, part = group % p.parts, n = p.size, column = p.column;
  const uint lane = thread_index % 32, at = thread_index % kRows, slice = thread_index / kRows;
  const uint before = column - p.panel;  // columns of the panel
  metalcore_begin_later_kernels(0);
  // The last row of each threadgroup is the diagonal's.
  const uint row = at == kOwn ? column : column + 1 + part * kOwn + at;
  const bool there = row < n;
  a += ulong(matrix) * n * p.pitch;
  reflectors += (ulong(matrix) * p.reflectors + p.panel + 1) * p.pitch;
  w += ulong(matrix) * TRIDIAGONALIZE_PANEL * p.pitch;
  products += ulong(matrix) * p.slots * p.pitch;
  dots += matrix * TRIDIAGONALIZE_PANEL;

  if (before == 0) metalcore_await_earlier_kernels(0);
  float entry = there && slice == 0 ? a[ulong(row) * p.pitch + column] : 0.0f;
  const uint complete = there && before > 0 ? before - 1 : 0;  // columns with w
#pragma unroll(4)
  for (uint i = slice; i < complete; i += kSlices) {
    const float own_v = reflectors[ulong(i) * p.pitch + row], own_w = w[ulong(i) * p.pitch + row];
    const float other_v = reflectors[ulong(i) * p.pitch + column], other_w = w[ulong(i) * p.pitch + column];
    entry = fma(-own_v, other_w, fma(-own_w, other_v, entry));
  }
  metalcore_await_earlier_kernels(0);

  float product = 0.0f;
  if (before > 0 && there) {
#pragma unroll(4)
    for (uint slot = slice; slot < p.squares; slot += kSlices) product += products[ulong(slot) * p.pitch + row];
#pragma unroll(4)
    for (uint i = slice; i < complete; i += kSlices) {
      const float2 dot = dots[i];  // of the reflector before with w and with v
      product = fma(-reflectors[ulong(i) * p.pitch + row], dot.x, fma(-w[ulong(i) * p.pitch + row], dot.y, product));
    }
  }
  sums[thread_index] = float2(product, entry);
  float form = 0.0f;  // vᵀ A v of the column before
  if (before > 0) {
    const uint squares = p.squares * (p.squares + 1) / 2;
#pragma unroll(4)
    for (uint i = lane; i < squares; i += 32) form += quadratic[matrix * p.slots * (p.slots + 1) / 2 + i];
    for (uint i = lane; i + 1 < before; i += 32) form -= 2.0f * dots[i].x * dots[i].y;
  }
  form = simd_sum(form);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float2 sum = 0.0f, own_sum = 0.0f;  // own: of the diagonal's row
#pragma unroll
  for (uint s = 0; s < kSlices; ++s) {
    sum += sums[s * kRows + at];
    own_sum += sums[s * kRows + kOwn];
  }
  entry = sum.y;
  if (before > 0) {
    const float scale = tau[ulong(matrix) * p.reflectors + column], share = 0.5f * scale * scale * form;
    const float v = there ? reflectors[ulong(before - 1) * p.pitch + row] : 0.0f;
    const float new_w = fma(scale, sum.x, -share * v), own_w = fma(scale, own_sum.x, -share);
    entry = fma(-v, own_w, entry - new_w);
    if (slice == 0 && there && (at < kOwn || part == 0)) w[ulong(before - 1) * p.pitch + row] = new_w;
  }
  if (slice == 0 && there && (at < kOwn || part == 0)) x[ulong(matrix) * p.pitch + row] = entry;
  if (thread_index == kOwn && part == 0) diagonal[ulong(matrix) * n + column] = entry;
  const float rest = at < kOwn && there && row >= column + 2 ? entry : 0.0f;
  const float2 squares = float2(simd_sum(rest * rest), simd_sum(kTinyScale * rest * (kTinyScale * rest)));
  if (slice == 0 && lane == 0) norms[matrix * p.norms + part * (kRows / 32) + thread_index / 32] = squares;
}

// The entries of a column's reflector.
struct ColumnReflector {
  float scale, inverse;
  uint leading;  // the row of its leading 1
  float entry(float x, uint row) const thread {
    return row > leading ? x * scale * inverse : row == leading ? 1.0f : 0.0f;
  }
  float4 entries(float4 x, uint row) const thread {
    return float4(entry(x.x, row), entry(x.y, row + 1), entry(x.z, row + 2), entry(x.w, row + 3));
  }
};

// Makes the column's reflector v, A v in parts, and v's products with v and w of the panel's columns before it.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONALIZE_SQUARE_THREADS)]] void tridiagonal_multiply(
    device const float* a [[buffer(0)]], device float* reflectors [[buffer(1)]], device const float* w [[buffer(2)]],
    device const float* x [[buffer(3)]], device const float2* norms [[buffer(4)]], device float* products [[buffer(5)]],
    device float* quadratic [[buffer(6)]], device float2* dots [[buffer(7)]], device float* tau [[buffer(8)]],
    device float* beside [[buffer(9)]], constant TridiagonalPanelParams& p [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kSide = TRIDIAGONALIZE_SQUARE, kSimdgroups = TRIDIAGONALIZE_SQUARE_THREADS / 32;
  constexpr uint kRows = kSide / kSimdgroups;  // of a simdgroup
  threadgroup float4 column_sums[kSimdgroups][kSide / 4];
  threadgroup float forms[kSimdgroups];
  threadgroup float2 found[kSimdgroups];
  threadgroup float row_sums[kSide];
  const uint matrix = group / p.parts, part = group % p.parts, n = p.size, column = p.column;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint before = column - p.panel, first = (column + 1) / 4 * 4;
  const bool multiplies = part >= before;
  const uint square = multiplies ? part - before : 0;
  const uint square_row = triangle_row(square), square_column = square - triangle_start(square_row);
  const uint first_row = first + square_row * kSide + simdgroup * kRows;
  const uint own_columns = first + square_column * kSide + 4 * lane;
  a += ulong(matrix) * n * p.pitch;
  reflectors += ulong(matrix) * p.reflectors * p.pitch;
  x += ulong(matrix) * p.pitch;
  norms += matrix * p.norms;

  if (before == 0) metalcore_await_earlier_kernels(0);
  float4 entries[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
    const bool there = multiplies && first_row + r < n && own_columns < p.pitch;
    entries[r] = there ? *(device const float4*)(a + ulong(first_row + r) * p.pitch + own_columns) : 0.0f;
  }
  metalcore_await_earlier_kernels(0);
  metalcore_begin_later_kernels(0);
  const float alpha = x[column + 1];
  const float4 x_of_columns = own_columns < p.pitch ? *(device const float4*)(x + own_columns) : 0.0f;
  const float x_of_row = lane < kRows && first_row + lane < n ? x[first_row + lane] : 0.0f;
  float2 squares = 0.0f;
#pragma unroll(4)
  for (uint i = lane; i < p.norms; i += 32) squares += norms[i];
  squares = float2(simd_sum(squares.x), simd_sum(squares.y));
  ColumnReflector v;
  const Reflector reflector = reflector_of(alpha, squares, v.scale);
  v.inverse = reflector.inverse;
  v.leading = column + 1;

  if (!multiplies) {
    float2 sums = 0.0f;
    device const float* const other_w = w + (ulong(matrix) * TRIDIAGONALIZE_PANEL + part) * p.pitch;
    device const float* const other_v = reflectors + ulong(p.panel + 1 + part) * p.pitch;
    for (uint at = first + 4 * thread_index; at < n; at += 4 * TRIDIAGONALIZE_SQUARE_THREADS) {
      const float4 own = entries_between(v.entries(*(device const float4*)(x + at), at), at, column + 1, n);
      sums.x += dot(own, entries_between(*(device const float4*)(other_w + at), at, column + 1, n));
      sums.y += dot(own, entries_between(*(device const float4*)(other_v + at), at, column + 1, n));
    }
    sums = float2(simd_sum(sums.x), simd_sum(sums.y));
    if (lane == 0) found[simdgroup] = sums;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0) {
      float2 sum = 0.0f;
#pragma unroll
      for (uint i = 0; i < kSimdgroups; ++i) sum += found[i];
      dots[matrix * TRIDIAGONALIZE_PANEL + part] = sum;
    }
    return;
  }

  const float4 v_of_columns = entries_between(v.entries(x_of_columns, own_columns), own_columns, column + 1, n);
  const float v_of_row = v.entry(x_of_row, first_row + lane);
  const bool on_diagonal = square_row == square_column;
  float sums[kRows], form = 0.0f;
  float4 down = 0.0f;
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
    const uint row = first_row + r;
    const float v_here = simd_broadcast(v_of_row, ushort(r));
    const float4 below = on_diagonal ? entries_between(entries[r], own_columns, 0, row) : entries[r];
    const float4 with_diagonal = on_diagonal ? entries_between(entries[r], own_columns, 0, row + 1) : entries[r];
    sums[r] = dot(with_diagonal, v_of_columns);
    form = fma(v_here, sums[r], form);
    down = fma(float4(v_here), below, down);
  }
  form = simd_sum(form + dot(down, v_of_columns));
  if (lane == 0) forms[simdgroup] = form;
  column_sums[simdgroup][lane] = down;
  const float own_sum = SharedSum<kRows>::of(sums, lane);
  constexpr uint kLanes = 32 / kRows;  // of a row
  const uint own_row = lane / kLanes;
  products += ulong(matrix) * p.slots * p.pitch;
  if (lane % kLanes == 0) {
    if (on_diagonal)
      row_sums[simdgroup * kRows + own_row] = own_sum;
    else if (first_row + own_row < n)
      products[ulong(square_column) * p.pitch + first_row + own_row] = own_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < kSide) {
    const uint row = first + square_column * kSide + thread_index;
    float sum = on_diagonal ? row_sums[thread_index] : 0.0f;
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) sum += ((threadgroup const float*)column_sums[i])[thread_index];
    if (row < n) products[ulong(square_row) * p.pitch + row] = sum;
    // The update after the panel also reads the zeros before the leading 1, and those in the padding.
    if (on_diagonal && row < p.pitch)
      reflectors[ulong(column + 1) * p.pitch + row] = row < n ? v.entry(x[row], row) : 0.0f;
  }
  if (thread_index == 0) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) sum += forms[i];
    quadratic[matrix * p.slots * (p.slots + 1) / 2 + square] = sum;
    if (square == 0) {
      tau[ulong(matrix) * p.reflectors + column + 1] = reflector.tau;
      beside[ulong(matrix) * (n - 1) + column] = reflector.beta;
    }
  }
}

// C - V Wᵀ - W Vᵀ for the trailing matrix C, of which a threadgroup updates a square of the lower triangle. A thread
// has 8 x 4 entries in registers.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONALIZE_UPDATE_THREADS)]] void tridiagonal_update(
    device float* a [[buffer(0)]], device const float* reflectors [[buffer(1)]], device const float* w [[buffer(2)]],
    constant TridiagonalUpdateParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = TRIDIAGONALIZE_UPDATE_TILE, kDepth = 8, kFours = kTile / 4;
  constexpr uint kThreads = TRIDIAGONALIZE_UPDATE_THREADS, kShare = kDepth * kFours / kThreads, kRows = 8;
  threadgroup float4 tiles[4][kDepth][kFours];  // v and w of the rows, v and w of the columns
  metalcore_begin_later_kernels(0);
  metalcore_await_earlier_kernels(0);
  const uint count = triangle_start(p.side), matrix = group / count, tile = group % count, n = p.size;
  const uint tile_row = triangle_row(tile), tile_column = tile - triangle_start(tile_row);
  const uint first_row = p.first + tile_row * kTile, first_column = p.first + tile_column * kTile;
  a += ulong(matrix) * n * p.pitch;
  reflectors += (ulong(matrix) * p.reflectors + p.panel + 1) * p.pitch;
  w += ulong(matrix) * TRIDIAGONALIZE_PANEL * p.pitch;
  const uint row = thread_index / kFours * kRows, column = thread_index % kFours * 4;

  float4 sums[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) sums[r] = 0.0f;
  const uint terms = p.end - p.panel;
  for (uint term = 0; term < terms; term += kDepth) {
    float4 share[4][kShare];
#pragma unroll
    for (uint s = 0; s < kShare; ++s) {
      const uint at = s * kThreads + thread_index, k = term + at / kFours, four = at % kFours * 4;
      const bool rows = k < terms && first_row + four < n, columns = k < terms && first_column + four < n;
      share[0][s] = rows ? *(device const float4*)(reflectors + ulong(k) * p.pitch + first_row + four) : 0.0f;
      share[1][s] = rows ? *(device const float4*)(w + ulong(k) * p.pitch + first_row + four) : 0.0f;
      share[2][s] = columns ? *(device const float4*)(reflectors + ulong(k) * p.pitch + first_column + four) : 0.0f;
      share[3][s] = columns ? *(device const float4*)(w + ulong(k) * p.pitch + first_column + four) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint s = 0; s < kShare; ++s) {
      const uint at = s * kThreads + thread_index;
#pragma unroll
      for (uint i = 0; i < 4; ++i) tiles[i][at / kFours][at % kFours] = share[i][s];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < kDepth; ++k) {
      const float4 of_v[2] = {tiles[0][k][row / 4], tiles[0][k][row / 4 + 1]};
      const float4 of_w[2] = {tiles[1][k][row / 4], tiles[1][k][row / 4 + 1]};
      const float4 v = tiles[2][k][column / 4], other = tiles[3][k][column / 4];
#pragma unroll
      for (uint r = 0; r < kRows; ++r)
        sums[r] = fma(float4(of_v[r / 4][r % 4]), other, fma(float4(of_w[r / 4][r % 4]), v, sums[r]));
    }
  }
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
    const uint i = first_row + row + r, j = first_column + column;
    if (i >= n || j > i) continue;
    device float4* const at = (device float4*)(a + ulong(i) * p.pitch + j);
    *at = *at - sums[r];
  }
}
