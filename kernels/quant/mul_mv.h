// Products of packed weights and few rows of x. A lane keeps its slice of each row of x in registers while it walks
// over all of the threadgroup's rows of weights, and loads several of these at once: slices lie too far apart in x for
// one cache line to serve several lanes. The simdgroups of a threadgroup share the rows' length, and none is without a
// chunk of it.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/rows.h"
#include "formats.h"
#include "numbers.h"
#include "quant.h"

// A slice of a row of x, and the sums of its two runs.
struct Held {
  float4 x[8];
  float2 sums;
};

template <typename F>
inline Held hold(device const uint4* x, ulong row, uint slices, uint i, uint dtype) {
  Held held;
  const ulong from = row * slices * 32 + SliceOf<F>(i).first();
  load16(held.x, x, from, dtype);
  load16(held.x + 4, x, from + F::apart, dtype);
  held.sums = float2(sum4((held.x[0] + held.x[1]) + (held.x[2] + held.x[3])),
                     sum4((held.x[4] + held.x[5]) + (held.x[6] + held.x[7])));
  return held;
}

template <typename F>
inline float product(thread const Slice& w, thread const Held& held) {
  float first = 0.0f, second = 0.0f;
#pragma unroll
  for (uint k = 0; k < 16; ++k) {
    first = fma(w.q[k / 4][k % 4], held.x[k / 4][k % 4], first);
    second = fma(w.q[k / 4 + 4][k % 4], held.x[k / 4 + 4][k % 4], second);
  }
  first = fma(first, F::unit, -F::bias * held.sums.x);
  second = fma(second, F::upper_unit, -F::bias * held.sums.y);
  float result = fma(w.scale.x, first, w.scale.y * second);
  if (F::has_offset) result = fma(w.offset.x, held.sums.x, fma(w.offset.y, held.sums.y, result));
  return result;
}

// A threadgroup's rows of weights times M rows of x, `step` rows of weights at once. `table` has room for F::entries.
template <typename F, uint M, uint step_rows, typename P>
inline void multiply(P packed, device const uint4* x, device float* floats, device ushort* halves,
                     device const int* chosen, constant QuantMvParams& p, threadgroup float* parts,
                     threadgroup float* table, uint group, uint thread_index, uint simdgroups) {
  const uint lane = thread_index % 32;
  // A compiler that is told that lanes agree about their chunks keeps what they share in uniform registers.
  const uint simdgroup = simd_broadcast(thread_index / 32, ushort(0));
  const uint x_groups = (p.x_rows + M - 1) / M;  // of neighbouring threadgroups, which share weights
  const uint first_row = group / x_groups * p.group_rows, first_x = group % x_groups * M;
  const uint expert = p.experts ? uint(chosen[first_x]) : 0;
  const bool there = expert == 0 || expert < p.experts;  // what an expert that does not exist makes is NaN
  const auto matrix = place(packed, there ? expert * p.expert_bytes : 0);
  const uint steps = (min(p.group_rows, p.weights - first_row) + step_rows - 1) / step_rows;

  const Shared<F> shared(table, thread_index);
  const uint chunks = (p.slices + 31) / 32;
  for (uint chunk = simdgroup; chunk < chunks; chunk += simdgroups) {
    // Lanes behind the row's end read its last slice, and their sums are zeros.
    const bool inside = chunk * 32 + lane < p.slices;
    const uint i = min(chunk * 32 + lane, p.slices - 1);
    const SliceOf<F> slice(i);
    Held held[M];
    for (uint step = 0; step < steps; ++step) {
      Packed loaded[step_rows];
#pragma unroll
      for (uint r = 0; r < step_rows; ++r) {
        const uint row = min(first_row + step * step_rows + r, p.weights - 1);
        loaded[r] = slice.load(matrix.plus(row * p.row_bytes));
      }
      if (step == 0) {  // while the weights are on their way
#pragma unroll
        for (uint m = 0; m < M; ++m)
          held[m] = hold<F>(x, min(first_x + m, p.x_rows - 1) / p.shared, p.slices, i, p.dtype);
      }
      float sums[step_rows * M];
#pragma unroll
      for (uint r = 0; r < step_rows; ++r) {
        const Slice numbers = shared.decode(slice, loaded[r]);
#pragma unroll
        for (uint m = 0; m < M; ++m) sums[r * M + m] = select(0.0f, product<F>(numbers, held[m]), inside);
      }
      const float sum = simd_sums(sums, lane);
      constexpr uint kShare = 32 / (step_rows * M);
      threadgroup float& part = parts[simdgroup * QUANT_MV_RESULTS + step * step_rows * M + lane / kShare];
      if (lane % kShare == 0) part = chunk == simdgroup ? sum : part + sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = thread_index; i < steps * step_rows * M; i += simdgroups * 32) {
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s) sum += parts[s * QUANT_MV_RESULTS + i];
    const uint row = first_row + i / M, result = first_x + i % M;
    if (row < p.weights && result < p.x_rows)
      store(floats, halves, ulong(result) * p.weights + row, there ? sum : NAN, p.dtype);
  }
}
