// A X + X B = C for upper triangular A and B (Bartels and Stewart 1972), or X X = C for upper triangular C (Björck and
// Hammarling 1983). A simdgroup or a threadgroup makes X column by column: column j solves a triangular system with A +
// b_jj I, or with X + x_jj I, whose entries before column j are known then.
#include <metal_stdlib>
using namespace metal;

#include "hessenberg.h"
#include "sylvester.h"

// Row i of the right-hand side of column j.
inline float2 right_side(device const float2* x, device const float2* b, device const float2* c, uint i, uint j,
                         constant SylvesterParams& p) {
  float2 value = c[ulong(j) * p.rows + i];
  if (p.is_root != 0) return value;
  for (uint k = 0; k < j; ++k) value = add_product(value, -b[ulong(j) * p.columns + k], x[ulong(k) * p.rows + i]);
  return value;
}

template <uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void sylvester_triangular(
    device const float2* a [[buffer(0)]], device const float2* b [[buffer(1)]], device const float2* c [[buffer(2)]],
    device float2* x [[buffer(3)]], constant SylvesterParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<float2, SIMDGROUPS, true> Threads;
  threadgroup float2 right[32 * SIMDGROUPS == 32 ? 32 : SYLVESTER_ROWS];
  const Threads team = {nullptr, thread_index, 0};
  a += ulong(matrix) * p.rows * p.rows;
  b += ulong(matrix) * p.columns * p.columns;
  c += ulong(matrix) * p.rows * p.columns;
  x += ulong(matrix) * p.rows * p.columns;
  const bool is_root = p.is_root != 0;
  device const float2* const triangle = is_root ? x : a;
  for (uint j = 0; j < p.columns; ++j) {
    const uint rows = is_root ? j : p.rows;
    const float2 diagonal = is_root ? c[ulong(j) * p.rows + j] : b[ulong(j) * p.columns + j];
    const float2 shift = is_root ? square_root(diagonal) : diagonal;
    for (uint i = thread_index; i < rows; i += Threads::kThreads) right[i] = right_side(x, b, c, i, j, p);
    for (uint k = rows; k > 0;) {
      --k;
      team.wait();
      // All threads divide. A sum of zero gives infinity or NaN.
      const float2 divisor = triangle[ulong(k) * p.rows + k] + shift;
      const float2 value = quotient(right[k], divisor);
      if (thread_index == k % Threads::kThreads) x[ulong(j) * p.rows + k] = value;
      for (uint i = thread_index; i < k; i += Threads::kThreads)
        right[i] = add_product(right[i], -value, triangle[ulong(k) * p.rows + i]);
    }
    if (is_root)
      for (uint i = j + thread_index; i < p.rows; i += Threads::kThreads)
        x[ulong(j) * p.rows + i] = i == j ? shift : float2(0.0f);
    team.wait_for_device_memory();
  }
}

#define INSTANTIATE(name, simdgroups)                                                                              \
  template [[host_name(name)]] [[kernel]] void sylvester_triangular<simdgroups>(                                   \
      device const float2*, device const float2*, device const float2*, device float2*, constant SylvesterParams&, \
      uint, uint);

INSTANTIATE("sylvester_simd", 1)
INSTANTIATE("sylvester_block", SYLVESTER_THREADS / 32)
