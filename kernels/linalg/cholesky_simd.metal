// Cholesky factorization of matrices of up to 32 columns. A simdgroup factors one (N = 32) or several matrices; a lane
// holds a column in registers. It is right-looking: column k goes to the lanes on its right through threadgroup memory
// undivided. At the end all lanes divide their columns by the square roots of the pivots at once.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "hermitian.h"
#include "fours.h"

constant constexpr uint kSimdgroups = 4;  // per threadgroup

template <uint N, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void cholesky_simd(
    device const T* a [[buffer(0)]], device T* l [[buffer(1)]], device int* info [[buffer(2)]],
    constant CholeskyParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef typename FourOf<T>::Type Four;
  constexpr uint kMatrices = 32 / N, kQuads = N / 4;
  // There are two columns: while slow lanes read one, the next may be written.
  threadgroup Four columns[kSimdgroups * kMatrices * 2 * kQuads];

  const uint slot = simdgroup * kMatrices + lane / N;
  const uint matrix = group * kSimdgroups * kMatrices + slot;
  const uint column = lane % N;
  const bool has_column = matrix < p.matrices && column < p.n;  // the other lanes work on zeros, for the barriers
  threadgroup Four* const published = columns + slot * 2 * kQuads;

  Four x[kQuads];
  {
    device const T* from = a + matrix * p.a_batch + column * p.a_column;
#pragma unroll
    for (uint i = 0; i < N; ++i)
      set_entry(x[i / 4], i % 4, has_column && i >= column && i < p.n ? from[i * p.a_row] : T(0.0f));
  }

  uint failed = 0;
  float own_pivot = 0.0f;
#pragma unroll
  for (uint first = 0; first < kQuads; ++first) {
    const uint end = min(4 * first + 4, p.n);
    for (uint k = 4 * first; k < end; ++k) {
      threadgroup Four* const v = published + (k & 1) * kQuads;
      if (column == k) {
#pragma unroll
        for (uint q = 0; q < kQuads; ++q)
          if (q >= first) v[q] = x[q];
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const float pivot = real_part(taken(v, k));
      if (column == k) own_pivot = pivot;
      if (failed == 0 && !is_pivot(pivot)) failed = k + 1;
      if (failed == 0 && column > k) {
        const float inverse = rsqrt(pivot);
        const T factor = conjugate((taken(v, column) * inverse) * inverse);
#pragma unroll
        for (uint q = 0; q < kQuads; ++q)
          if (q >= first) x[q] = minus_product(x[q], factor, v[q]);
      }
    }
  }

  if (!has_column) return;
  const bool is_factored = failed == 0 || column + 1 < failed;  // the other columns become the identity's
  const float inverse = is_factored ? rsqrt(own_pivot) : 0.0f;
  const float diagonal = is_factored ? precise::sqrt(own_pivot) : 1.0f;
  device T* to = l + matrix * p.l_batch + column * p.l_column;
#pragma unroll
  for (uint i = 0; i < N; ++i)
    if (i < p.n)
      to[i * p.l_row] = i < column ? T(0.0f) : i == column ? number<T>(diagonal) : entry(x[i / 4], i % 4) * inverse;
  if (column == 0) info[matrix] = failed;
}

#define INSTANTIATE(name, n, type)                                        \
  template [[host_name(name #n)]] [[kernel]] void cholesky_simd<n, type>( \
      device const type*, device type*, device int*, constant CholeskyParams&, uint, uint, uint);

INSTANTIATE("cholesky_simd_", 4, float)
INSTANTIATE("cholesky_simd_", 8, float)
INSTANTIATE("cholesky_simd_", 16, float)
INSTANTIATE("cholesky_simd_", 32, float)
INSTANTIATE("cholesky_simd_complex_", 4, float2)
INSTANTIATE("cholesky_simd_complex_", 8, float2)
INSTANTIATE("cholesky_simd_complex_", 16, float2)
INSTANTIATE("cholesky_simd_complex_", 32, float2)
