// Cholesky factorization of matrices of up to 32 columns. A simdgroup factors one (N = 32) or several matrices; a lane
// holds a column in registers. It is right-looking: column k goes to the lanes on its right through threadgroup memory
// undivided. At the end all lanes divide their columns by the square roots of the pivots at once.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "cholesky_pivot.h"

constant constexpr uint kSimdgroups = 4;  // per threadgroup

template <uint N>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void cholesky_simd(
    device const float* a [[buffer(0)]], device float* l [[buffer(1)]], device int* info [[buffer(2)]],
    constant CholeskyParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kMatrices = 32 / N, kQuads = N / 4;
  // There are two columns: while slow lanes read one, the next may be written.
  threadgroup float4 columns[kSimdgroups * kMatrices * 2 * kQuads];

  const uint slot = simdgroup * kMatrices + lane / N;
  const uint matrix = group * kSimdgroups * kMatrices + slot;
  const uint column = lane % N;
  const bool has_column = matrix < p.matrices && column < p.n;  // the other lanes work on zeros, for the barriers
  threadgroup float4* const published = columns + slot * 2 * kQuads;

  float4 x[kQuads];
  {
    device const float* from = a + matrix * p.a_batch + column * p.a_column;
#pragma unroll
    for (uint i = 0; i < N; ++i) x[i / 4][i % 4] = has_column && i >= column && i < p.n ? from[i * p.a_row] : 0.0f;
  }

  uint failed = 0;
  float own_pivot = 0.0f;
#pragma unroll
  for (uint first = 0; first < kQuads; ++first) {
    const uint end = min(4 * first + 4, p.n);
    for (uint k = 4 * first; k < end; ++k) {
      threadgroup float4* const v = published + (k & 1) * kQuads;
      if (column == k) {
#pragma unroll
        for (uint q = 0; q < kQuads; ++q)
          if (q >= first) v[q] = x[q];
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      threadgroup const float* const entries = (threadgroup const float*)v;
      const float pivot = entries[k];
      if (column == k) own_pivot = pivot;
      if (failed == 0 && !is_pivot(pivot)) failed = k + 1;
      if (failed == 0 && column > k) {
        const float inverse = rsqrt(pivot);
        const float factor = (entries[column] * inverse) * inverse;
#pragma unroll
        for (uint q = 0; q < kQuads; ++q)
          if (q >= first) x[q] = fma(float4(-factor), v[q], x[q]);
      }
    }
  }

  if (!has_column) return;
  const bool is_factored = failed == 0 || column + 1 < failed;  // the other columns become the identity's
  const float inverse = is_factored ? rsqrt(own_pivot) : 0.0f;
  const float diagonal = is_factored ? precise::sqrt(own_pivot) : 1.0f;
  device float* to = l + matrix * p.l_batch + column * p.l_column;
#pragma unroll
  for (uint i = 0; i < N; ++i)
    if (i < p.n) to[i * p.l_row] = i < column ? 0.0f : i == column ? diagonal : x[i / 4][i % 4] * inverse;
  if (column == 0) info[matrix] = failed;
}

#define INSTANTIATE(n)                                                          \
  template [[host_name("cholesky_simd_" #n)]] [[kernel]] void cholesky_simd<n>( \
      device const float*, device float*, device int*, constant CholeskyParams&, uint, uint, uint);

INSTANTIATE(4)
INSTANTIATE(8)
INSTANTIATE(16)
INSTANTIATE(32)
