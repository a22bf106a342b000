// Block reflectors (compact WY: Schreiber and Van Loan 1989) on many columns: Vᵀ C by slabs of rows, T from Vᵀ V, and
// C - V op(T) (Vᵀ C). A simdgroup takes some of V's columns or of C's rows, and a lane two of C's columns.
#include <metal_stdlib>
using namespace metal;

#include "factor.h"
#include "qr.h"

constant constexpr uint kThreads = REFLECTORS_THREADS;
constant constexpr uint kSimdgroups = kThreads / 32;
constant constexpr uint kColumns = REFLECTORS_COLUMNS;
// The rows that are in threadgroup memory at once, for Vᵀ C and for the update.
constant constexpr uint kProductRows = REFLECTORS_ROWS / 2;
constant constexpr uint kApplyRows = REFLECTORS_ROWS;
constant constexpr uint kTargets = kProductRows * kColumns / kThreads;  // per thread

// A block's V. Its diagonal begins at `corner`; on the diagonal and above, memory has R in place of ones and zeros.
struct BlockOfV {
  device const float* corner;
  uint rows, width, stride;

  float entry(uint row, uint k) const thread {
    const bool stored = k < width && row > k && row < rows;
    return stored ? corner[ulong(row) * stride + k] : (k < width && row == k ? 1.0f : 0.0f);
  }
};

inline BlockOfV block_of(device const float* v, constant ReflectorsParams& p, uint matrix, uint block) {
  const uint first = p.first + block * p.width;
  return {v + (ulong(matrix) * p.rows + first) * p.columns + first, p.rows - first, min(p.width, p.count - first),
          p.columns};
}

// Loads rows [base, base + ROWS) of V.
template <uint ROWS, uint WIDTH>
inline void load_reflectors(thread float (&values)[ROWS * WIDTH / kThreads], thread const BlockOfV& v, uint base,
                            uint thread_index) {
#pragma unroll
  for (uint i = 0; i < ROWS * WIDTH / kThreads; ++i) {
    const uint at = i * kThreads + thread_index;
    values[i] = v.entry(base + at / WIDTH, at % WIDTH);
  }
}

template <uint COUNT>
inline void stage(threadgroup float* to, thread float (&values)[COUNT], uint thread_index) {
#pragma unroll
  for (uint i = 0; i < COUNT; ++i) to[i * kThreads + thread_index] = values[i];
}

// Loads rows [base, end) of this thread's column of products. V's own columns come first, then C's from target_first
// on.
inline void load_targets(thread float (&values)[kTargets], device const float* c, constant ReflectorsParams& p,
                         thread const BlockOfV& v, uint base, uint end, uint column, uint thread_index) {
  const uint of_c = p.target_first + column - p.skip;
#pragma unroll
  for (uint i = 0; i < kTargets; ++i) {
    const uint row = base + (i * kThreads + thread_index) / kColumns;
    if (column < p.skip)
      values[i] = row < end ? v.entry(row, column) : 0.0f;
    else
      values[i] = row < end && of_c < p.target_end ? c[ulong(row) * p.target_columns + of_c] : 0.0f;
  }
}

// Vᵀ C over one part of the rows, WIDTH x product_columns. The parts of a block are contiguous.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_products(
    device const float* reflectors [[buffer(0)]], device const float* target [[buffer(1)]],
    device float* products [[buffer(2)]], constant ReflectorsParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEach = WIDTH / kSimdgroups;  // columns of V per simdgroup
  threadgroup float4 v4[kProductRows * WIDTH / 4];
  threadgroup float c[kProductRows * kColumns];
  threadgroup float* const v = (threadgroup float*)v4;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint tile = group % p.tiles, part = group / p.tiles % p.parts, index = group / p.tiles / p.parts;
  const uint matrix = index / p.blocks, block = index % p.blocks;
  const BlockOfV v_of_block = block_of(reflectors, p, matrix, block);
  const uint begin = part * p.part_rows, end = min(begin + p.part_rows, v_of_block.rows);
  const uint column = tile * kColumns + thread_index % kColumns;
  device const float* const from = target + (ulong(matrix) * p.rows + p.rows - v_of_block.rows) * p.target_columns;

  float sums[kEach][2];
#pragma unroll
  for (uint k = 0; k < kEach; ++k) sums[k][0] = sums[k][1] = 0.0f;
  float next_v[kProductRows * WIDTH / kThreads], next_c[kTargets];
  load_reflectors<kProductRows, WIDTH>(next_v, v_of_block, begin, thread_index);
  load_targets(next_c, from, p, v_of_block, begin, end, column, thread_index);
  for (uint base = begin; base < end; base += kProductRows) {
    stage(v, next_v, thread_index);
    stage(c, next_c, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // These loads are under way during the sums.
    load_reflectors<kProductRows, WIDTH>(next_v, v_of_block, base + kProductRows, thread_index);
    load_targets(next_c, from, p, v_of_block, base + kProductRows, end, column, thread_index);
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
  device float* const to = products + (ulong(index) * p.parts + part) * WIDTH * p.product_columns + tile * kColumns;
#pragma unroll
  for (uint k = 0; k < kEach; ++k)
#pragma unroll
    for (uint side = 0; side < 2; ++side)
      if (tile * kColumns + lane + 32 * side < p.product_columns)
        to[ulong(simdgroup * kEach + k) * p.product_columns + lane + 32 * side] = sums[k][side];
}

// Sums products over all slabs. Of the products' columns the first COLUMNS or fewer are wanted. A thread makes COUNT
// sums.
template <uint COLUMNS, uint COUNT>
inline void sum_slabs(thread float (&sums)[COUNT], device const float* products, uint slabs, ulong slab_size,
                      uint stride, uint wanted, uint thread_index) {
#pragma unroll
  for (uint n = 0; n < COUNT; ++n) sums[n] = 0.0f;
  for (uint slab = 0; slab < slabs; ++slab) {
#pragma unroll
    for (uint n = 0; n < COUNT; ++n) {
      const uint i = (n * kThreads + thread_index) / COLUMNS, j = (n * kThreads + thread_index) % COLUMNS;
      if (j < wanted) sums[n] += products[slab * slab_size + ulong(i) * stride + j];
    }
  }
}

// Makes T = (T₁, -T₁ V₁ᵀV₂ T₂; 0, T₂) of every two neighbours of SIZE columns: first gram = gram T₂, then factor = -T₁
// gram.
template <uint WIDTH, uint SIZE>
inline void merge_factors(threadgroup float* gram, threadgroup float* factor, uint thread_index) {
  constexpr uint kEach = WIDTH / 2 * SIZE / kThreads + (WIDTH / 2 * SIZE < kThreads);  // entries per thread
#pragma unroll
  for (uint updates_factor = 0; updates_factor < 2; ++updates_factor) {
    float sum[kEach];
#pragma unroll
    for (uint n = 0; n < kEach; ++n) sum[n] = 0.0f;
#pragma unroll 8
    for (uint k = 0; k < SIZE; ++k) {
#pragma unroll
      for (uint n = 0; n < kEach; ++n) {
        const uint at = n * kThreads + thread_index;
        const uint corner = at / (SIZE * SIZE) * 2 * SIZE, middle = corner + SIZE;
        const uint i = corner + at / SIZE % SIZE, j = middle + at % SIZE;
        sum[n] = updates_factor ? fma(-factor[i * WIDTH + corner + k], gram[(corner + k) * WIDTH + j], sum[n])
                                : fma(gram[i * WIDTH + middle + k], factor[(middle + k) * WIDTH + j], sum[n]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < kEach; ++n) {
      const uint at = n * kThreads + thread_index;
      const uint corner = at / (SIZE * SIZE) * 2 * SIZE;
      (updates_factor ? factor : gram)[(corner + at / SIZE % SIZE) * WIDTH + corner + SIZE + at % SIZE] = sum[n];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// T, WIDTH x WIDTH: first for each QR_PANEL columns by themselves, then for neighbours.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_factor(
    device const float* products [[buffer(0)]], device const float* tau [[buffer(1)]], device float* t [[buffer(2)]],
    constant ReflectorsFactorParams& p [[buffer(3)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEntries = WIDTH * WIDTH / kThreads;
  threadgroup float gram[WIDTH * WIDTH];
  threadgroup float factor[WIDTH * WIDTH];
  const uint matrix = index / p.blocks, block = index % p.blocks;
  const uint first = p.first + block * p.width, width = min(p.width, p.count - first);
  float sums[kEntries];
  const ulong slab_size = ulong(WIDTH) * p.product_columns;
  sum_slabs<WIDTH>(sums, products + index * p.slabs * slab_size, p.slabs, slab_size, p.product_columns, width,
                   thread_index);
#pragma unroll
  for (uint n = 0; n < kEntries; ++n) {
    const uint at = n * kThreads + thread_index;
    const uint i = at / WIDTH, j = at % WIDTH;
    gram[at] = i == j && j < width ? tau[ulong(matrix) * p.count + first + j] : i < j ? sums[n] : 0.0f;
    factor[at] = 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < WIDTH) {
    const uint corner = thread_index / QR_PANEL * QR_PANEL * (WIDTH + 1);
    write_factor(gram + corner, WIDTH, factor + corner, WIDTH, thread_index % QR_PANEL);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (WIDTH == REFLECTORS_WIDE) {
    merge_factors<WIDTH, QR_PANEL>(gram, factor, thread_index);
    merge_factors<WIDTH, 2 * QR_PANEL>(gram, factor, thread_index);
  }
  t += (ulong(block) * p.matrices + matrix) * (WIDTH * WIDTH);
#pragma unroll
  for (uint n = 0; n < kEntries; ++n) t[n * kThreads + thread_index] = factor[n * kThreads + thread_index];
}

// C -= V W with W = op(T) Vᵀ C. A threadgroup computes W for its columns, and updates part_rows rows.
template <uint WIDTH>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void reflectors_apply(
    device const float* reflectors [[buffer(0)]], device const float* t [[buffer(1)]],
    device const float* products [[buffer(2)]], device float* target [[buffer(3)]],
    constant ReflectorsParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEach = WIDTH / kSimdgroups;           // rows of W per simdgroup
  constexpr uint kRowsEach = kApplyRows / kSimdgroups;  // rows of C per simdgroup
  threadgroup float w[WIDTH * kColumns];
  threadgroup float4 v4[kApplyRows * WIDTH / 4];  // T first
  threadgroup float* const v = (threadgroup float*)v4;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint tile = group % p.tiles, part = group / p.tiles % p.parts, matrix = group / p.tiles / p.parts;
  const BlockOfV v_of_block = block_of(reflectors, p, matrix, 0);
  const uint begin = part * p.part_rows, end = min(begin + p.part_rows, v_of_block.rows);
  const uint column = p.target_first + tile * kColumns + lane;
  device float* const c = target + (ulong(matrix) * p.rows + p.first) * p.target_columns + column;
  const bool there[2] = {column < p.target_end, column + 32 < p.target_end};

  {
    float sums[WIDTH * kColumns / kThreads];
    const ulong slab_size = ulong(WIDTH) * p.product_columns;
    const uint remaining = p.target_end - p.target_first - tile * kColumns;
    sum_slabs<kColumns>(sums, products + matrix * p.slabs * slab_size + p.skip + tile * kColumns, p.slabs, slab_size,
                        p.product_columns, remaining, thread_index);
    stage(w, sums, thread_index);
  }
#pragma unroll
  for (uint i = 0; i < (WIDTH * WIDTH + kThreads - 1) / kThreads; ++i)
    v[i * kThreads + thread_index] = t[ulong(matrix) * (WIDTH * WIDTH) + i * kThreads + thread_index];
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
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint e = 0; e < kEach; ++e) {
    w[(simdgroup * kEach + e) * kColumns + lane] = sums[e][0];
    w[(simdgroup * kEach + e) * kColumns + lane + 32] = sums[e][1];
  }

  for (uint base = begin; base < end; base += kApplyRows) {
    float values[kRowsEach][2];
    const uint first = base + simdgroup * kRowsEach;
#pragma unroll
    for (uint e = 0; e < kRowsEach; ++e)
#pragma unroll
      for (uint side = 0; side < 2; ++side)
        values[e][side] = there[side] && first + e < end ? c[ulong(first + e) * p.target_columns + 32 * side] : 0.0f;
    {
      float part_of_v[kApplyRows * WIDTH / kThreads];
      load_reflectors<kApplyRows, WIDTH>(part_of_v, v_of_block, base, thread_index);
      stage(v, part_of_v, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
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
      for (uint side = 0; side < 2; ++side)
        if (there[side] && first + e < end) c[ulong(first + e) * p.target_columns + 32 * side] = values[e][side];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#define INSTANTIATE(width)                                                                                            \
  template [[host_name("reflectors_products_" #width)]] [[kernel]] void reflectors_products<width>(                   \
      device const float*, device const float*, device float*, constant ReflectorsParams&, uint, uint);               \
  template [[host_name("reflectors_factor_" #width)]] [[kernel]] void reflectors_factor<width>(                       \
      device const float*, device const float*, device float*, constant ReflectorsFactorParams&, uint, uint);         \
  template [[host_name("reflectors_apply_" #width)]] [[kernel]] void reflectors_apply<width>(                         \
      device const float*, device const float*, device const float*, device float*, constant ReflectorsParams&, uint, \
      uint);

INSTANTIATE(16)
INSTANTIATE(64)
