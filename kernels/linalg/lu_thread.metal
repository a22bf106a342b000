// LU, and with it A X = B, of square matrices of up to 4 rows. Each matrix is in the registers of one thread. Through
// threadgroup memory neighbouring threads read and write neighbouring elements.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

constant constexpr uint kThreads = 128;

template <uint N>
struct Staged {
  static constexpr constant uint kSize = N * N;
  static constexpr constant uint kStride = kSize | 1;  // odd, so that the threads' elements are in different banks
};

template <uint N>
inline void unstage(thread float (&x)[N][N], threadgroup const float* own) {
#pragma unroll
  for (uint e = 0; e < N * N; ++e) x[e / N][e % N] = own[e];
}

template <uint N>
inline void stage(thread const float (&x)[N][N], threadgroup float* own) {
#pragma unroll
  for (uint e = 0; e < N * N; ++e) own[e] = x[e / N][e % N];
}

template <uint N>
inline void exchange_rows(thread float (&x)[N][N], uint k, uint i, bool really) {
#pragma unroll
  for (uint c = 0; c < N; ++c) {
    const float upper = x[k][c], lower = x[i][c];
    x[k][c] = really ? lower : upper;
    x[i][c] = really ? upper : lower;
  }
}

template <uint N>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void lu_thread(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* lu [[buffer(2)]],
    device int* pivots [[buffer(3)]], device int* info [[buffer(4)]], device uint* sources [[buffer(5)]],
    device float* x [[buffer(6)]], constant LuParams& p [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Staged<N> Stage;
  threadgroup float memory[kThreads * Stage::kStride];
  threadgroup float* const own = memory + thread_index * Stage::kStride;

  const uint slots = p.matrices * p.tiles;
  const uint first = group * kThreads;
  const uint slot = first + thread_index;
  const bool live = slot < slots;
  const bool writes_results = live && slot % p.tiles == 0;  // other tiles take other columns of the same matrix's B

  float m[N][N], right[N][N];
#pragma unroll
  for (uint i = 0; i < Stage::kSize; ++i) {
    const uint at = i * kThreads + thread_index;
    const uint which = at / Stage::kSize, e = at % Stage::kSize;
    const uint from = min(first + which, slots - 1) / p.tiles;
    memory[which * Stage::kStride + e] = a[from * p.a_batch + e / N * p.a_row + e % N * p.a_column];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  unstage(m, own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (p.right > 0) {
#pragma unroll
    for (uint i = 0; i < Stage::kSize; ++i) {
      const uint at = i * kThreads + thread_index;
      const uint which = at / Stage::kSize, e = at % Stage::kSize;
      const uint from = min(first + which, slots - 1);
      const uint column = from % p.tiles * p.tile + e % N;
      const bool there = e % N < p.tile && column < p.right;
      float value = e / N == column ? 1.0f : 0.0f;
      if (p.identity == 0) value = there ? b[from / p.tiles * p.b_batch + e / N * p.b_row + column * p.b_column] : 0.0f;
      memory[which * Stage::kStride + e] = value;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  unstage(right, own);

  uint order[N];
  uint zero = 0;
#pragma unroll
  for (uint k = 0; k < N; ++k) order[k] = k;
#pragma unroll
  for (uint k = 0; k < N; ++k) {
    uint pivot = k, largest = pivot_key(m[k][k], k, k, true);
    if (p.pivoting != 0) {
#pragma unroll
      for (uint i = k + 1; i < N; ++i) {
        const uint key = pivot_key(m[i][k], i, k, true);
        pivot = key > largest ? i : pivot;
        largest = max(key, largest);
      }
    }
#pragma unroll
    for (uint i = k + 1; i < N; ++i) {
      const bool here = pivot == i;
      exchange_rows(m, k, i, here);
      exchange_rows(right, k, i, here);
      const uint upper = order[k], lower = order[i];
      order[k] = here ? lower : upper;
      order[i] = here ? upper : lower;
    }
    if (writes_results && p.factors != 0) pivots[slot / p.tiles * N + k] = int(pivot) + 1;
    if (m[k][k] == 0.0f && zero == 0) zero = k + 1;
    const Divisor diagonal = divisor(m[k][k]);
#pragma unroll
    for (uint i = k + 1; i < N; ++i) {
      const float factor = multiplier(m[i][k], m[k][k], diagonal, p.pivoting != 0);
      m[i][k] = factor;
#pragma unroll
      for (uint c = 0; c < N; ++c) {
        if (c > k) m[i][c] = fma(-factor, m[k][c], m[i][c]);
        right[i][c] = fma(-factor, right[k][c], right[i][c]);
      }
    }
  }
  if (writes_results) info[slot / p.tiles] = int(zero);
  if (writes_results && p.sources != 0) {
#pragma unroll
    for (uint k = 0; k < N; ++k) sources[slot / p.tiles * N + k] = order[k];
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (p.factors != 0) stage<N>(m, own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (p.factors != 0) {
#pragma unroll
    for (uint i = 0; i < Stage::kSize; ++i) {
      const uint at = i * kThreads + thread_index;
      const uint which = at / Stage::kSize, e = at % Stage::kSize;
      const uint to = first + which;
      if (to < slots && to % p.tiles == 0)
        lu[ulong(to / p.tiles) * Stage::kSize + e] = memory[which * Stage::kStride + e];
    }
  }
  if (p.right == 0) return;

#pragma unroll
  for (uint back = 0; back < N; ++back) {
    const uint k = N - 1 - back;
    const Divisor diagonal = divisor(m[k][k]);
#pragma unroll
    for (uint c = 0; c < N; ++c) {
      right[k][c] = right[k][c] / diagonal;
#pragma unroll
      for (uint i = 0; i < k; ++i) right[i][c] = fma(-m[i][k], right[k][c], right[i][c]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage<N>(right, own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < Stage::kSize; ++i) {
    const uint at = i * kThreads + thread_index;
    const uint which = at / Stage::kSize, e = at % Stage::kSize;
    const uint to = first + which;
    const uint column = to % p.tiles * p.tile + e % N;
    if (to < slots && e % N < p.tile && column < p.right)
      x[ulong(to / p.tiles) * N * p.right + e / N * p.x_row + column * p.x_column] = memory[which * Stage::kStride + e];
  }
}

#define INSTANTIATE(n)                                                                                                \
  template [[host_name("lu_thread_" #n)]] [[kernel]] void lu_thread<n>(                                               \
      device const float*, device const float*, device float*, device int*, device int*, device uint*, device float*, \
      constant LuParams&, uint, uint);

INSTANTIATE(1)
INSTANTIATE(2)
INSTANTIATE(3)
INSTANTIATE(4)
