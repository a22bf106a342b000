// What kernels by chunks of positions share: tiles in threadgroup memory, and products with them. A simdgroup has some
// rows of a product.
#pragma once

#include "common/matrices.h"
#include "sequence/delta_state.h"

constexpr constant uint kChunk = DELTA_CHUNK, kOwn = kChunk / kSimdgroups;  // rows of a simdgroup

// Factors of rows that have none.
struct One {
  float operator[](uint) const { return 1.0f; }
};

// Brings `count` rows from `first` on, of which WIDTH elements, into a tile, times their factors. The rest is zero.
template <uint WIDTH, uint kPitch, uint ROWS = kChunk, typename T, typename U, typename F>
inline void fetch_slice(threadgroup U* tile, device const T* x, long stride, uint count, uint first, uint size,
                        F factors, uint thread_index) {
  constexpr uint kStep = DELTA_THREADS / WIDTH;  // rows between those of a thread
  const uint column = thread_index % WIDTH, begin = thread_index / WIDTH;
  const bool inside = first + column < size;
  x += begin * stride + first + column;
  tile += begin * kPitch + column;
#pragma unroll 2
  for (uint row = begin; row < ROWS; row += kStep, x += kStep * stride, tile += kStep * kPitch)
    *tile = static_cast<U>(inside && row < count ? static_cast<float>(*x) * factors[row] : 0.0f);
}

// The inverse lengths of a chunk's queries and keys, or 1.
template <typename T>
inline void measure(threadgroup float* of_queries, threadgroup float* of_keys, device const T* q, device const T* k,
                    uint count, constant DeltaRuleParams& params, uint simdgroup, uint lane) {
  for (uint i = simdgroup; i < kChunk; i += kSimdgroups) {
    const bool normalized = params.normalized && i < count;
    const float of_q = normalized ? inverse_length_of(q + i * params.q[1], params.keys, lane) : 1.0f;
    const float of_k = normalized ? inverse_length_of(k + i * params.k[1], params.keys, lane) : 1.0f;
    if (lane == 0) {
      of_queries[i] = of_q;
      of_keys[i] = of_k;
    }
  }
}

// How much of u a position of a chunk adds to the state.
inline float strength_of(device const float* beta, uint i, uint count, constant DeltaRuleParams& params) {
  if (i >= count) return 0.0f;
  return params.corrects ? beta[ulong(i) * params.value_heads] : 1.0f;
}

// The sums of the gates from the chunk's beginning on, in two parts, since their differences count.
inline void add_gates(threadgroup float* high, threadgroup float* low, device const float* g, uint count,
                      constant DeltaRuleParams& params, uint thread_index) {
  if (thread_index >= kChunk) return;
  float sum = 0.0f, rest = 0.0f;
  for (uint i = 0; params.has_gate && i < min(count, thread_index + 1); ++i) {
    const float term = max(g[ulong(i) * params.value_heads], -1e4f) + rest, next = sum + term;
    const float part = next - sum;
    rest = (sum - (next - part)) + (term - part);
    sum = next;
  }
  high[thread_index] = sum;
  low[thread_index] = rest;
}
inline float decay_of(threadgroup const float* high, threadgroup const float* low, uint later, uint earlier) {
  return exp(min((high[later] - high[earlier]) + (low[later] - low[earlier]), 0.0f));
}

// sums += a b of tiles, where a has WIDTH columns, of which some take part at a time: more do not fit in registers.
template <uint WIDTH, uint kLeft, uint kRight>
inline void add_tiles(thread Fragments<float, 2, 2>& sums, threadgroup const float* a, threadgroup const float* b) {
#pragma unroll 1
  for (uint term = 0; term < WIDTH; term += 16) {
    Fragments<float, 2, 2> rows;
    RightFragments<float, 2, 2> terms;
    load<kLeft>(rows, a + term);
    load<kRight>(terms, b + term * kRight);
    multiply(sums, rows, 0, terms);
  }
}

// Puts a simdgroup's rows of a product into a tile, for its lanes.
template <uint kPitch>
inline void store(thread const Fragments<float, 2, 2>& sums, threadgroup float* tile) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < 2; ++n) simdgroup_store(sums.at[m][n], tile + m * 8 * kPitch + n * 8, kPitch);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// sums += a b or aᵀ b, where b is a tile, and a is lower triangular in device memory with rows of a chunk.
template <bool TRANSPOSED, uint kPitch>
inline void add_lower(thread Fragments<float, 2, 2>& sums, device const float* a, threadgroup const float* tile,
                      uint simdgroup) {
  constexpr uint kTerms = 2;
  const uint own = simdgroup * kOwn, begin = TRANSPOSED ? own : 0, end = TRANSPOSED ? kChunk : own + kOwn;
  for (uint first = begin; first < end; first += kTerms * 8) {
    Fragments<float, 2, kTerms> rows;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < kTerms; ++n) {
        const uint row = own + m * 8, term = first + n * 8;
        if (TRANSPOSED)
          simdgroup_load(rows.at[m][n], a + term * kChunk + row, kChunk, ulong2(0), true);
        else
          simdgroup_load(rows.at[m][n], a + row * kChunk + term, kChunk);
      }
    }
    RightFragments<float, kTerms, 2> terms;
    load<kPitch>(terms, tile + first * kPitch);
    multiply(sums, rows, 0, terms);
  }
}

// WIDTH rows of a matrix of DELTA_COLUMNS become theirs times the decay, plus sliceᵀ tile.
template <uint WIDTH, uint kSlice, uint kPitch>
inline void add_outer(threadgroup float* matrix, float decay, threadgroup const float* slice,
                      threadgroup const float* tile, uint simdgroup) {
  constexpr uint kAcross = DELTA_COLUMNS / 8, kDown = WIDTH / 8 * kAcross / kSimdgroups;
  const uint down = simdgroup / kAcross * kDown * 8, across = simdgroup % kAcross * 8;
  matrix += down * kPitch + across;
  Fragments<float, kDown, 1> sums;
  load<kPitch>(sums, matrix);
#pragma unroll
  for (uint m = 0; m < kDown; ++m) elements(sums.at[m][0]) *= decay;
#pragma unroll 2
  for (uint i = 0; i < kChunk / 8; ++i) {
    Fragments<float, kDown, 1> rows;
    RightFragments<float, 1, 1> terms;
#pragma unroll
    for (uint m = 0; m < kDown; ++m)
      simdgroup_load(rows.at[m][0], slice + i * 8 * kSlice + down + m * 8, kSlice, ulong2(0), true);
    load<kPitch>(terms, tile + i * 8 * kPitch + across);
    multiply(sums, rows, 0, terms);
  }
#pragma unroll
  for (uint m = 0; m < kDown; ++m) simdgroup_store(sums.at[m][0], matrix + m * 8 * kPitch, kPitch);
}

// Brings columns of a state into threadgroup memory. Those that are not given are zero.
template <uint KEYS, uint kPitch>
inline void fetch_state(threadgroup float* matrix, device const float* state, bool given, uint block,
                        constant DeltaRuleParams& params, uint thread_index) {
  for (uint i = thread_index; i < KEYS * DELTA_COLUMNS; i += DELTA_THREADS) {
    const uint row = i / DELTA_COLUMNS, column = block + i % DELTA_COLUMNS;
    const bool inside = given && row < params.keys && column < params.values;
    matrix[row * kPitch + i % DELTA_COLUMNS] = inside ? state[ulong(row) * params.values + column] : 0.0f;
  }
}
template <uint kPitch>
inline void put_state(device float* state, threadgroup const float* matrix, bool wanted, uint block,
                      constant DeltaRuleParams& params, uint thread_index) {
  for (uint i = thread_index; wanted && i < params.keys * DELTA_COLUMNS; i += DELTA_THREADS) {
    const uint row = i / DELTA_COLUMNS, column = block + i % DELTA_COLUMNS;
    if (column < params.values) state[ulong(row) * params.values + column] = matrix[row * kPitch + i % DELTA_COLUMNS];
  }
}
