// What the blocked variant does between and after its panels: C = (I - V T Vᵀ) C or (I - V Tᵀ Vᵀ) C, and the results.
#include <metal_stdlib>
using namespace metal;

#include "qr.h"

constant constexpr uint kColumns = QR_UPDATE_COLUMNS;  // of C: one a lane
constant constexpr uint kThreads = QR_UPDATE_THREADS;  // one for each entry of Vᵀ C
constant constexpr uint kSimdgroups = kThreads / 32;
constant constexpr uint kRows = 256;       // of V at once in threadgroup memory
constant constexpr uint kShare = kRows / kSimdgroups;  // a simdgroup's
constant constexpr uint kQuads = QR_PANEL / 4;

// Rows [base, base + kRows) of V, with its ones and zeros, which the panel holds parts of R in place of.
inline void load_reflectors(threadgroup float* v, device const float* corner, constant QrPanelParams& p, uint base,
                            uint thread_index) {
  const uint rows = p.rows - p.first;
#pragma unroll
  for (uint i = 0; i < kRows * QR_PANEL / kThreads; ++i) {
    const uint at = i * kThreads + thread_index;
    const uint row = base + at / QR_PANEL, k = at % QR_PANEL;
    const bool stored = k < p.width && row > k && row < rows;
    v[at] = stored ? corner[ulong(row) * p.columns + k] : (k < p.width && row == k ? 1.0f : 0.0f);
  }
}

// A simdgroup's rows of C, from `first`, all on their way before any is needed.
inline void load_target(thread float (&values)[kShare], device const float* c, uint first, uint rows, ulong stride,
                        bool mine) {
#pragma unroll
  for (uint i = 0; i < kShare; ++i) values[i] = mine && first + i < rows ? c[(first + i) * stride] : 0.0f;
}

// A threadgroup takes kColumns columns of C through all rows: once for Vᵀ C, its rows spread over the simdgroups, and
// once to subtract. So C is read twice and written once for each panel, and nothing else goes through device memory.
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void qr_update(
    device const float* reflectors [[buffer(0)]], device const float* t [[buffer(1)]],
    device float* target [[buffer(2)]], constant QrUpdateParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 v[kRows * kQuads];  // between the passes over C: sums of half the simdgroups
  threadgroup float products[QR_PANEL * kColumns];
  threadgroup float factor[QR_PANEL * QR_PANEL];
  threadgroup float* const partial = (threadgroup float*)v;

  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint matrix = group / p.tiles;
  const uint rows = p.of.rows - p.of.first;
  const uint column = p.target_first + group % p.tiles * kColumns + lane;
  const bool mine = column < p.target_columns;
  device const float* const corner =
      reflectors + (ulong(matrix) * p.of.rows + p.of.first) * p.of.columns + p.of.first;
  device float* const c = target + (ulong(matrix) * p.of.rows + p.of.first) * p.target_columns + column;
  const ulong stride = p.target_columns;

  {
    device const float* from = t + (ulong(matrix) * p.of.panels + p.of.panel) * (QR_PANEL * QR_PANEL);
    for (uint i = thread_index; i < QR_PANEL * QR_PANEL; i += kThreads) factor[i] = from[i];
  }

  float4 w[kQuads];
#pragma unroll
  for (uint j = 0; j < kQuads; ++j) w[j] = float4(0.0f);
  for (uint base = 0; base < rows; base += kRows) {
    float values[kShare];
    load_target(values, c, base + simdgroup * kShare, rows, stride, mine);
    load_reflectors((threadgroup float*)v, corner, p.of, base, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kShare; ++i) {
      const uint at = (simdgroup * kShare + i) * kQuads;
#pragma unroll
      for (uint j = 0; j < kQuads; ++j) w[j] = fma(v[at + j], float4(values[i]), w[j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Vᵀ C: the second half of the simdgroups gives its sums to the first, then a thread adds up each entry.
  const uint half_of_them = kSimdgroups / 2;
  const uint slot = simdgroup % half_of_them * QR_PANEL * kColumns + lane;
  if (simdgroup >= half_of_them) {
#pragma unroll
    for (uint k = 0; k < QR_PANEL; ++k) partial[slot + k * kColumns] = w[k / 4][k % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup < half_of_them) {
#pragma unroll
    for (uint k = 0; k < QR_PANEL; ++k) partial[slot + k * kColumns] += w[k / 4][k % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
#pragma unroll
  for (uint s = 0; s < half_of_them; ++s) sum += partial[s * QR_PANEL * kColumns + thread_index];
  products[thread_index] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // T times that, or Tᵀ.
  const uint k = thread_index / kColumns;
  sum = 0.0f;
#pragma unroll
  for (uint l = 0; l < QR_PANEL; ++l)
    sum = fma(factor[p.transpose ? l * QR_PANEL + k : k * QR_PANEL + l], products[l * kColumns + lane], sum);
  partial[thread_index] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint l = 0; l < QR_PANEL; ++l) w[l / 4][l % 4] = partial[l * kColumns + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint base = 0; base < rows; base += kRows) {
    const uint first = base + simdgroup * kShare;
    float values[kShare];
    load_target(values, c, first, rows, stride, mine);
    load_reflectors((threadgroup float*)v, corner, p.of, base, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kShare; ++i) {
      const uint at = (simdgroup * kShare + i) * kQuads;
      float4 sum = v[at] * w[0];
#pragma unroll
      for (uint j = 1; j < kQuads; ++j) sum = fma(v[at + j], w[j], sum);
      if (mine && first + i < rows) c[(first + i) * stride] = values[i] - ((sum.x + sum.y) + (sum.z + sum.w));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// The first columns of the identity; the upper triangle of what the panels left. One thread an element.
[[kernel]] void qr_identity(device float* q [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                            uint at [[thread_position_in_grid]]) {
  q[at] = at / p.columns % p.rows == at % p.columns ? 1.0f : 0.0f;
}

[[kernel]] void qr_upper(device float* r [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                         device const float* a [[buffer(2)]], uint at [[thread_position_in_grid]]) {
  const uint column = at % p.columns, row = at / p.columns % p.rows, matrix = at / p.columns / p.rows;
  r[at] = row <= column ? a[(ulong(matrix) * p.source_rows + row) * p.columns + column] : 0.0f;
}
