// The blocked variant's panels: QR of QR_PANEL columns by one threadgroup of QR_PANEL simdgroups, and the triangular
// factor T with H₀ H₁ … = I - V T Vᵀ (LAPACK's larft). V replaces the panel below its diagonal, R above.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "qr.h"

constant constexpr uint kThreads = 32 * QR_PANEL;

// T from the products v_lᵀ v_k (l < k) in products[l][k], with tau_k in products[k][k]. Thread l makes row l, which
// needs no other row.
inline void write_factor(threadgroup const float* products, device float* t, uint l) {
  float row[QR_PANEL];
#pragma unroll
  for (uint k = 0; k < QR_PANEL; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < k; ++i) sum = i >= l ? fma(row[i], products[i * QR_PANEL + k], sum) : sum;
    const float tau = products[k * QR_PANEL + k];
    row[k] = k < l ? 0.0f : k == l ? tau : -tau * sum;
    t[l * QR_PANEL + k] = row[k];
  }
}

inline device float* panel_corner(device float* a, constant QrPanelParams& p, uint matrix) {
  return a + (ulong(matrix) * p.rows + p.first) * p.columns + p.first;
}

inline device float* panel_factor(device float* t, constant QrPanelParams& p, uint matrix) {
  return t + (ulong(matrix) * p.panels + p.panel) * (QR_PANEL * QR_PANEL);
}

// In registers: a simdgroup for each column.
template <uint QUADS>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void qr_panel(
    device float* a [[buffer(0)]], device float* t [[buffer(1)]], constant QrPanelParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef ColumnTile<32, QUADS> Tile;
  constexpr uint kStride = Tile::kBlock + 4;  // of a column in `staged`, which turns rows in device memory into columns
  threadgroup float4 reflectors[2 * Tile::kSlots];
  threadgroup float staged[QR_PANEL * kStride];
  threadgroup float products[QR_PANEL * QR_PANEL];

  const uint g = thread_index % 32;
  const uint column = thread_index / 32;
  const uint rows = p.rows - p.first;
  const uint count = min(p.width, rows);
  device float* const corner = panel_corner(a, p, matrix);

  Tile tile;
#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
#pragma unroll
    for (uint i = 0; i < Tile::kBlock * QR_PANEL / kThreads; ++i) {
      const uint at = i * kThreads + thread_index;
      const uint c = at % QR_PANEL, row = q * Tile::kBlock + at / QR_PANEL;
      staged[c * kStride + at / QR_PANEL] = row < rows && c < p.width ? corner[ulong(row) * p.columns + c] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint e = 0; e < 4; ++e) tile.x[q][e] = staged[column * kStride + 4 * g + e];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (thread_index < QR_PANEL * QR_PANEL) products[thread_index] = 0.0f;

  float tau = 0.0f;
  for (uint k = 0; k < count; ++k) {
    threadgroup float4* const v = reflectors + (k & 1) * Tile::kSlots;
    if (column == k) make_and_publish(tile, 0, g, k, true, v, tau);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float product = dot_with(tile, 0, g, v);
    const float tau_k = v[Tile::kSlots - 1].x;
    if (column > k) subtract(tile, 0, g, v, product * tau_k);
    if (g == 0 && column <= k) products[column * QR_PANEL + k] = column < k ? product : tau_k;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < QR_PANEL) write_factor(products, panel_factor(t, p, matrix), thread_index);

#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) staged[column * kStride + 4 * g + e] = tile.x[q][e];
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < Tile::kBlock * QR_PANEL / kThreads; ++i) {
      const uint at = i * kThreads + thread_index;
      const uint c = at % QR_PANEL, row = q * Tile::kBlock + at / QR_PANEL;
      if (row < rows && c < p.width) corner[ulong(row) * p.columns + c] = staged[c * kStride + at / QR_PANEL];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#define INSTANTIATE(quads, rows)                                                                           \
  template [[host_name("qr_panel_" #rows)]] [[kernel]] void qr_panel<quads>(device float*, device float*, \
      constant QrPanelParams&, uint, uint);

INSTANTIATE(4, 512)
INSTANTIATE(8, 1024)
INSTANTIATE(16, 2048)

// In device memory, for panels with more rows than registers hold: neighbouring threads take neighbouring columns. A
// thread has kBatch rows on their way at once, since nothing else hides the memory's latency.
constant constexpr uint kLoopedThreads = 1024;
constant constexpr uint kRowsAtOnce = kLoopedThreads / QR_PANEL;
constant constexpr uint kBatch = 8;

// value's sum over the threadgroup, or its maximum, for all of its threads.
template <bool MAXIMUM>
inline float threadgroup_reduce(float value, threadgroup float* partial, uint lane, uint simdgroup) {
  value = MAXIMUM ? simd_max(value) : simd_sum(value);
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = MAXIMUM ? simd_max(partial[lane]) : simd_sum(partial[lane]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return value;
}

// Rows first, first + step, … of a column; zero from row `end` on.
inline void load_rows(thread float (&values)[kBatch], device const float* x, uint first, uint step, uint end,
                      ulong stride) {
#pragma unroll
  for (uint e = 0; e < kBatch; ++e) values[e] = first + e * step < end ? x[(first + e * step) * stride] : 0.0f;
}

[[kernel]] [[max_total_threads_per_threadgroup(kLoopedThreads)]] void qr_panel_looped(
    device float* a [[buffer(0)]], device float* t [[buffer(1)]], constant QrPanelParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[32];
  threadgroup float sums[kLoopedThreads];
  threadgroup float products[QR_PANEL * QR_PANEL];

  const uint column = thread_index % QR_PANEL;
  const uint first_row = thread_index / QR_PANEL;
  const uint rows = p.rows - p.first;
  const uint count = min(p.width, rows);
  const ulong stride = p.columns;
  const bool mine = column < p.width;
  device float* const corner = panel_corner(a, p, matrix);
  device float* const y = corner + (mine ? column : 0);
  if (thread_index < QR_PANEL * QR_PANEL) products[thread_index] = 0.0f;

  for (uint k = 0; k < count; ++k) {
    device float* const x = corner + k;
    float batch[kBatch], own[kBatch];
    float largest = 0.0f;
    for (uint i = k + 1 + thread_index; i < rows; i += kBatch * kLoopedThreads) {
      load_rows(batch, x, i, kLoopedThreads, rows, stride);
#pragma unroll
      for (uint e = 0; e < kBatch; ++e) largest = max(largest, abs(batch[e]));
    }
    largest = threadgroup_reduce<true>(largest, partial, lane, simdgroup);
    const float alpha = x[k * stride];
    const float scale = scale_to_one(max(largest, abs(alpha)));
    float squares = 0.0f;
    for (uint i = k + 1 + thread_index; i < rows; i += kBatch * kLoopedThreads) {
      load_rows(batch, x, i, kLoopedThreads, rows, stride);
#pragma unroll
      for (uint e = 0; e < kBatch; ++e) squares = fma(batch[e] * scale, batch[e] * scale, squares);
    }
    squares = threadgroup_reduce<false>(squares, partial, lane, simdgroup);
    const Reflector h = make_reflector(alpha, largest, squares, scale);
    for (uint i = k + 1 + thread_index; i < rows; i += kLoopedThreads)
      x[i * stride] = (x[i * stride] * scale) * h.inverse;
    threadgroup_barrier(mem_flags::mem_device);
    if (thread_index == 0) x[k * stride] = h.beta;  // which all have read alpha from by now

    // Row k stays out of the loops: v is one there, and x holds beta.
    float sum = 0.0f;
    for (uint i = k + 1 + first_row; i < rows; i += kBatch * kRowsAtOnce) {
      load_rows(batch, x, i, kRowsAtOnce, rows, stride);
      load_rows(own, y, i, kRowsAtOnce, rows, stride);
#pragma unroll
      for (uint e = 0; e < kBatch; ++e) sum = fma(batch[e], own[e], sum);
    }
    sums[thread_index] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float product = column == k ? 0.0f : y[k * stride];
    for (uint i = 0; i < kRowsAtOnce; ++i) product += sums[i * QR_PANEL + column];
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    if (mine && column > k) {
      const float factor = product * h.tau;
      if (first_row == 0) y[k * stride] -= factor;
      for (uint i = k + 1 + first_row; i < rows; i += kBatch * kRowsAtOnce) {
        load_rows(batch, x, i, kRowsAtOnce, rows, stride);
        load_rows(own, y, i, kRowsAtOnce, rows, stride);
#pragma unroll
        for (uint e = 0; e < kBatch; ++e)
          if (i + e * kRowsAtOnce < rows) y[(i + e * kRowsAtOnce) * stride] = fma(-factor, batch[e], own[e]);
      }
    }
    if (first_row == 0 && column <= k) products[column * QR_PANEL + k] = column < k ? product : h.tau;
    threadgroup_barrier(mem_flags::mem_device);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < QR_PANEL) write_factor(products, panel_factor(t, p, matrix), thread_index);
}
