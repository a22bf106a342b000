// Eigenvalues and eigenvectors of general real matrices: isolated eigenvalues, balancing, reduction to upper Hessenberg
// form, QR sweeps to the real Schur form, and back-substitution. If a matrix has NaN or infinities, all its results are
// NaN.
#include <metal_stdlib>
using namespace metal;

#include "eig.h"
#include "eigenvectors.h"

template <typename Threads, typename Rows>
inline void load_scaled(device const float* a, constant EigParams& p, threadgroup const ushort* order, Rows h,
                        uint stride, uint n, float scale, thread const Threads& team) {
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads)
      h[i * stride + j] = scale > 0.0f ? a[order[i] * p.row_stride + order[j] * p.column_stride] * scale : 0.0f;
}

// h has rows of `stride` floats, z n * n floats and x n * n pairs of floats. `reflectors`, d and `order` have n
// entries.
template <bool VECTORS, typename Threads, typename Rows>
inline void eig_of(device const float* a, Rows h, uint stride, device float* z, device float2* x,
                   threadgroup float4* reflectors, threadgroup float* d, threadgroup ushort* order,
                   device float2* values, device float2* vectors, constant EigParams& p, bool live,
                   thread Threads& team) {
  const uint n = live ? p.size : 0;  // a simdgroup without a matrix does nothing
  threadgroup float* const memory = reinterpret_cast<threadgroup float*>(reflectors);
  for (uint i = team.index; i < n; i += Threads::kThreads) order[i] = ushort(i);
  team.wait();
  load_scaled(a, p, order, h, stride, n, 1.0f, team);
  team.wait();
  const float scale = scale_matrix(h, stride, n, team);
  const Range range = isolate_eigenvalues(h, stride, n, memory, order, team);
  load_scaled(a, p, order, h, stride, n, scale, team);
  team.wait();
  const bool harmful = !balance(h, stride, n, range, d, 1.0f, team);
  for (uint i = team.index; i < n && harmful; i += Threads::kThreads) d[i] = 1.0f;
  if (harmful) load_scaled(a, p, order, h, stride, n, scale, team);
  team.wait();
  const float balanced_scale = scale_matrix(h, stride, n, team);
  if (VECTORS) set_to_identity(z, n, team);
  reduce_to_hessenberg<VECTORS>(h, stride, n, z, memory, team);
  const bool found = reduce_to_schur<VECTORS>(h, stride, n, z, reflectors, team);
  const bool good = scale > 0.0f && found;
  team.wait_for_device_memory();  // others read rows of Z
  for (uint i = team.index; i < n; i += Threads::kThreads) {
    const float2 w = eigenvalue_of(h, stride, n, i);
    values[i] = good ? w * inverse_of_scale(balanced_scale) * inverse_of_scale(scale) : float2(NAN);
    if (!VECTORS) continue;
    if (!good) {
      for (uint j = 0; j < n; ++j) vectors[j * n + i] = float2(NAN);
    } else if (i == 0 || !begins_pair(h, stride, n, i - 1)) {
      const bool is_pair = begins_pair(h, stride, n, i);
      const uint last = is_pair ? i + 1 : i;
      solve_for_eigenvector(h, stride, n, i, last, w, x + i);
      write_eigenvector(z, d, order, x + i, n, last, is_pair, vectors + i);
    }
  }
}

// A simdgroup takes a matrix of up to SIZE columns.
template <uint SIZE, bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * EIG_SIMDGROUPS)]] void eig_simd(
    device const float* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device float* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float h[EIG_SIMDGROUPS * SIZE * (SIZE + 1)], d[EIG_SIMDGROUPS * SIZE];
  threadgroup float4 reflectors[EIG_SIMDGROUPS * SIZE];
  threadgroup ushort order[EIG_SIMDGROUPS * SIZE];
  const uint matrix = group * EIG_SIMDGROUPS + simdgroup;
  const ulong square = VECTORS ? ulong(matrix) * p.size * p.size : 0;
  Team<1, false> team = {nullptr, lane, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, h + simdgroup * SIZE * (SIZE + 1), SIZE + 1, z + square, x + square,
                  reflectors + simdgroup * SIZE, d + simdgroup * SIZE, order + simdgroup * SIZE,
                  values + ulong(matrix) * p.size, vectors + square, p, matrix < p.matrices, team);
}

// A threadgroup takes a matrix of up to EIG_BLOCK columns.
template <bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_BLOCK)]] void eig_block(
    device const float* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device float* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<EIG_BLOCK / 32, false> Threads;
  threadgroup float h[EIG_BLOCK * (EIG_BLOCK + 1)], d[EIG_BLOCK], memory[Threads::kFloats];
  threadgroup float4 reflectors[EIG_BLOCK];
  threadgroup ushort order[EIG_BLOCK];
  const ulong square = VECTORS ? ulong(matrix) * p.size * p.size : 0;
  Threads team = {memory, thread_index, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, static_cast<threadgroup float*>(h), EIG_BLOCK + 1, z + square,
                  x + square, reflectors, d, order, values + ulong(matrix) * p.size, vectors + square, p, true, team);
}

// A threadgroup takes a matrix of up to EIG_DEVICE columns, and works in device memory.
template <bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_DEVICE_THREADS)]] void eig_device(
    device const float* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device float* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    device float* h [[buffer(6)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<EIG_DEVICE_THREADS / 32, true> Threads;
  threadgroup float d[EIG_DEVICE], memory[Threads::kFloats];
  threadgroup float4 reflectors[EIG_DEVICE];
  threadgroup ushort order[EIG_DEVICE];
  const ulong own = ulong(matrix) * p.size * p.size, square = VECTORS ? own : 0;
  Threads team = {memory, thread_index, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, h + own, p.size, z + square, x + square, reflectors, d, order,
                  values + ulong(matrix) * p.size, vectors + square, p, true, team);
}

#define ARGUMENTS \
  device const float*, device float2*, device float2*, device float*, device float2*, constant EigParams&
#define SIMD(size)                                                                                             \
  template [[host_name("eig_simd_" #size)]] [[kernel]] void eig_simd<size, true>(ARGUMENTS, uint, uint, uint); \
  template [[host_name("eig_simd_values_" #size)]] [[kernel]] void eig_simd<size, false>(ARGUMENTS, uint, uint, uint);

SIMD(16)
SIMD(32)
template [[host_name("eig_block")]] [[kernel]] void eig_block<true>(ARGUMENTS, uint, uint);
template [[host_name("eig_block_values")]] [[kernel]] void eig_block<false>(ARGUMENTS, uint, uint);
template [[host_name("eig_device")]] [[kernel]] void eig_device<true>(ARGUMENTS, device float*, uint, uint);
template [[host_name("eig_device_values")]] [[kernel]] void eig_device<false>(ARGUMENTS, device float*, uint, uint);
