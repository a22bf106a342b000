// Block reflectors (compact WY: Schreiber and Van Loan 1989) on many columns: Vᵀ C by slabs of rows, T from Vᵀ V, and
// C - V op(T) (Vᵀ C). A simdgroup takes some of V's columns, or of C's rows, a lane two of C's columns.
#include <metal_stdlib>
using namespace metal;

#include "factor.h"
#include "reflectors.h"

constant constexpr uint kThreads = REFLECTORS_THREADS;
constant constexpr uint kSimdgroups = kThreads / 32;
constant constexpr uint kColumns = REFLECTORS_COLUMNS;
// Rows in threadgroup memory at once, for Vᵀ C and for the update.
constant constexpr uint kProductRows = REFLECTORS_ROWS / 2;
constant constexpr uint kApplyRows = REFLECTORS_ROWS;
constant constexpr uint kTargets = kProductRows * kColumns / kThreads;  // of a thread

// Entry (row, k) of V: ones on its diagonal, zeros above, where memory has R.
inline float reflector_entry(device const float* corner, constant ReflectorsParams& p, uint row, uint k) {
  const bool stored = k < p.width && row > k && row < p.rows - p.first;
  return stored ? corner[ulong(row) * p.columns + k] : (k < p.width && row == k ? 1.0f : 0.0f);
}

// Rows [base, base + ROWS) of V.
template <uint ROWS, uint WIDTH>
inline void load_reflectors(thread float (&values)[ROWS * WIDTH / kThreads], device const float* corner,
                            constant ReflectorsParams& p, uint base, uint thread_index) {
#pragma unroll
  for (uint i = 0; i < ROWS * WIDTH / kThreads; ++i) {
    const uint at = i * kThreads + thread_index;
    values[i] = reflector_entry(corner, p, base + at / WIDTH, at % WIDTH);
  }
}

template <uint COUNT>
inline void stage(threadgroup float* to, thread float (&values)[COUNT], uint thread_index) {
#pragma unroll
  for (uint i = 0; i < COUNT; ++i) to[i * kThreads + thread_index] = values[i];
}

inline void load_targets(thread float (&values)[kTargets], device const float* c, device const float* corner,
                         constant ReflectorsParams& p, uint base, uint end, uint column, uint thread_index) {
  const uint mine = column + thread_index % kColumns;
  const bool own = p.own && mine < p.first + p.width;
#pragma unroll
  for (uint i = 0; i < kTargets; ++i) {
    const uint row = base + (i * kThreads + thread_index) / kColumns;
    const bool there = row < end && mine < p.target_end;
    values[i] = own ? (there ? reflector_entry(corner, p, row, mine - p.first) : 0.0f)
                    : (there ? c[ulong(row) * p.target_columns + mine] : 0.0f);
  }
}

// Vᵀ C over one slab of rows, WIDTH x product_columns: slabs of a matrix lie one behind the other.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_products(
    device const float* reflectors [[buffer(0)]], device const float* target [[buffer(1)]],
    device float* products [[buffer(2)]], constant ReflectorsParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEach = WIDTH / kSimdgroups;  // columns of V a simdgroup
  threadgroup float4 v4[kProductRows * WIDTH / 4];
  threadgroup float* const v = (threadgroup float*)v4;
  threadgroup float c[kProductRows * kColumns];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint tile = group % p.tiles, slab = group / p.tiles % p.slabs, matrix = group / p.tiles / p.slabs;
  const uint rows = p.rows - p.first;
  const uint begin = slab * p.slab_rows, end = min(begin + p.slab_rows, rows);
  const uint column = p.target_first - p.skip + tile * kColumns;
  device const float* const corner = reflectors + (ulong(matrix) * p.rows + p.first) * p.columns + p.first;
  device const float* const from = target + (ulong(matrix) * p.rows + p.first) * p.target_columns;

  float sums[kEach][2];
#pragma unroll
  for (uint k = 0; k < kEach; ++k) sums[k][0] = sums[k][1] = 0.0f;
  float next_v[kProductRows * WIDTH / kThreads], next_c[kTargets];
  load_reflectors<kProductRows, WIDTH>(next_v, corner, p, begin, thread_index);
  load_targets(next_c, from, corner, p, begin, end, column, thread_index);
  for (uint base = begin; base < end; base += kProductRows) {
    stage(v, next_v, thread_index);
    stage(c, next_c, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_reflectors<kProductRows, WIDTH>(next_v, corner, p, base + kProductRows, thread_index);  // on their way during the sums
    load_targets(next_c, from, corner, p, base + kProductRows, end, column, thread_index);
#pragma unroll 8
    for (uint i = 0; i < kProductRows; ++i) {
      const float a = c[i * kColumns + lane], b = c[i * kColumns + lane + 32];
#pragma unroll
      for (uint k = 0; k < kEach; ++k) {
        const float f = v[i * WIDTH + simdgroup * kEach + k];
        sums[k][0] = fma(f, a, sums[k][0]);
        sums[k][1] = fma(f, b, sums[k][1]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  device float* const to = products + (ulong(matrix) * p.slabs + slab) * WIDTH * p.product_columns + tile * kColumns;
#pragma unroll
  for (uint k = 0; k < kEach; ++k)
#pragma unroll
    for (uint half_ = 0; half_ < 2; ++half_)
      if (tile * kColumns + lane + 32 * half_ < p.product_columns)
        to[ulong(simdgroup * kEach + k) * p.product_columns + lane + 32 * half_] = sums[k][half_];
}

// T, WIDTH x WIDTH: that of each QR_PANEL columns by itself, then T = (T₁, -T₁ V₁ᵀV₂ T₂; 0, T₂) of two neighbours.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_factor(
    device const float* products [[buffer(0)]], device const float* tau [[buffer(1)]], device float* t [[buffer(2)]],
    constant ReflectorsFactorParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float gram[WIDTH * WIDTH];
  threadgroup float factor[WIDTH * WIDTH];
  for (uint at = thread_index; at < WIDTH * WIDTH; at += kThreads) {
    const uint i = at / WIDTH, j = at % WIDTH;
    float sum = 0.0f;
    if (i < j && j < p.width)
      for (uint slab = 0; slab < p.slabs; ++slab)
        sum += products[((ulong(matrix) * p.slabs + slab) * WIDTH + i) * p.product_columns + j];
    if (i == j && j < p.width) sum = tau[ulong(matrix) * p.count + p.first + j];
    gram[at] = sum;
    factor[at] = 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < WIDTH) {
    const uint corner = thread_index / QR_PANEL * QR_PANEL * (WIDTH + 1);
    write_factor(gram + corner, WIDTH, factor + corner, WIDTH, thread_index % QR_PANEL);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr uint kMost = WIDTH * WIDTH / 4 / kThreads + 1;  // entries of a thread in a merge
#pragma unroll
  for (uint size = QR_PANEL; size < WIDTH; size *= 2) {
    const uint entries = WIDTH / 2 * size;  // of all pairs
    float sum[kMost];
#pragma unroll
    for (uint left = 0; left < 2; ++left) {  // gram = gram T₂, then factor = -T₁ gram
#pragma unroll
      for (uint n = 0; n < kMost; ++n) {
        const uint at = n * kThreads + thread_index;
        const uint corner = at / (size * size) * 2 * size, i = at / size % size, j = at % size;
        sum[n] = 0.0f;
        if (at < entries)
          for (uint k = 0; k < size; ++k)
            sum[n] = left ? fma(-factor[(corner + i) * WIDTH + corner + k], gram[(corner + k) * WIDTH + corner + size + j], sum[n])
                          : fma(gram[(corner + i) * WIDTH + corner + size + k],
                                factor[(corner + size + k) * WIDTH + corner + size + j], sum[n]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint n = 0; n < kMost; ++n) {
        const uint at = n * kThreads + thread_index;
        const uint corner = at / (size * size) * 2 * size, i = at / size % size, j = at % size;
        threadgroup float* const to = left ? factor : gram;
        if (at < entries) to[(corner + i) * WIDTH + corner + size + j] = sum[n];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  for (uint at = thread_index; at < WIDTH * WIDTH; at += kThreads) t[ulong(matrix) * WIDTH * WIDTH + at] = factor[at];
}

// C -= V W, W = op(T) Vᵀ C: a threadgroup computes W for its columns, and takes span_rows rows through.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_apply(
    device const float* reflectors [[buffer(0)]], device const float* t [[buffer(1)]],
    device const float* products [[buffer(2)]], device float* target [[buffer(3)]],
    constant ReflectorsParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEach = WIDTH / kSimdgroups;      // rows of W a simdgroup
  constexpr uint kRowsEach = kApplyRows / kSimdgroups;  // rows of C
  threadgroup float w[WIDTH * kColumns];
  threadgroup float4 v4[kApplyRows * WIDTH / 4];  // T first
  threadgroup float* const v = (threadgroup float*)v4;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint tile = group % p.tiles, span = group / p.tiles % p.spans, matrix = group / p.tiles / p.spans;
  const uint rows = p.rows - p.first;
  const uint begin = span * p.span_rows, end = min(begin + p.span_rows, rows);
  device const float* const corner = reflectors + (ulong(matrix) * p.rows + p.first) * p.columns + p.first;
  const uint column = p.target_first + tile * kColumns + lane;
  device float* const c = target + (ulong(matrix) * p.rows + p.first) * p.target_columns + column;
  const bool there[2] = {column < p.target_end, column + 32 < p.target_end};

  products += ulong(matrix) * p.slabs * WIDTH * p.product_columns + p.skip + tile * kColumns;
#pragma unroll
  for (uint i = 0; i < WIDTH * kColumns / kThreads; ++i) {
    const uint at = i * kThreads + thread_index;
    const uint k = at / kColumns, j = at % kColumns;
    float sum = 0.0f;
    if (p.target_first + tile * kColumns + j < p.target_end)
      for (uint slab = 0; slab < p.slabs; ++slab) sum += products[(ulong(slab) * WIDTH + k) * p.product_columns + j];
    w[at] = sum;
  }
  for (uint at = thread_index; at < WIDTH * WIDTH; at += kThreads) v[at] = t[ulong(matrix) * WIDTH * WIDTH + at];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sums[kEach][2];
#pragma unroll
  for (uint k = 0; k < kEach; ++k) sums[k][0] = sums[k][1] = 0.0f;
#pragma unroll 4
  for (uint l = 0; l < WIDTH; ++l) {
    const float a = w[l * kColumns + lane], b = w[l * kColumns + lane + 32];
#pragma unroll
    for (uint e = 0; e < kEach; ++e) {
      const uint k = simdgroup * kEach + e;
      const float f = v[p.transpose ? l * WIDTH + k : k * WIDTH + l];
      sums[e][0] = fma(f, a, sums[e][0]);
      sums[e][1] = fma(f, b, sums[e][1]);
    }
  }
  float next[kApplyRows * WIDTH / kThreads];
  load_reflectors<kApplyRows, WIDTH>(next, corner, p, begin, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint e = 0; e < kEach; ++e) {
    w[(simdgroup * kEach + e) * kColumns + lane] = sums[e][0];
    w[(simdgroup * kEach + e) * kColumns + lane + 32] = sums[e][1];
  }

  for (uint base = begin; base < end; base += kApplyRows) {
    stage(v, next, thread_index);
    float values[kRowsEach][2];
    const uint first = base + simdgroup * kRowsEach;
#pragma unroll
    for (uint e = 0; e < kRowsEach; ++e)
#pragma unroll
      for (uint half_ = 0; half_ < 2; ++half_)
        values[e][half_] = there[half_] && first + e < end ? c[ulong(first + e) * p.target_columns + 32 * half_] : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_reflectors<kApplyRows, WIDTH>(next, corner, p, base + kApplyRows, thread_index);
#pragma unroll 4
    for (uint k = 0; k < WIDTH; ++k) {
      const float a = w[k * kColumns + lane], b = w[k * kColumns + lane + 32];
#pragma unroll
      for (uint e = 0; e < kRowsEach; ++e) {
        const float f = v[(simdgroup * kRowsEach + e) * WIDTH + k];
        values[e][0] = fma(-f, a, values[e][0]);
        values[e][1] = fma(-f, b, values[e][1]);
      }
    }
#pragma unroll
    for (uint e = 0; e < kRowsEach; ++e)
#pragma unroll
      for (uint half_ = 0; half_ < 2; ++half_)
        if (there[half_] && first + e < end) c[ulong(first + e) * p.target_columns + 32 * half_] = values[e][half_];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#define INSTANTIATE(width)                                                                                             \
  template [[host_name("reflectors_products_" #width)]] [[kernel]] void reflectors_products<width>(                   \
      device const float*, device const float*, device float*, constant ReflectorsParams&, uint, uint);                \
  template [[host_name("reflectors_factor_" #width)]] [[kernel]] void reflectors_factor<width>(                       \
      device const float*, device const float*, device float*, constant ReflectorsFactorParams&, uint, uint);          \
  template [[host_name("reflectors_apply_" #width)]] [[kernel]] void reflectors_apply<width>(                         \
      device const float*, device const float*, device const float*, device float*, constant ReflectorsParams&, uint, \
      uint);

INSTANTIATE(16)
INSTANTIATE(64)
