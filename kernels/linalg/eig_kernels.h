// Eigenvalues and eigenvectors of general matrices: isolated eigenvalues, balancing, reduction to upper Hessenberg
// form, QR sweeps to the Schur form, and back-substitution. If a matrix has NaN or infinities, all its results are NaN.
#pragma once

#include <metal_stdlib>

#include "eig.h"
#include "eigenvectors.h"

// h has rows of `stride` numbers, z n * n numbers and x n * n pairs of floats. `reflectors`, d and `order` have n
// entries.
template <bool VECTORS, typename Threads, typename Rows>
inline void eig_of(device const typename Threads::Number* a, Rows h, uint stride, device typename Threads::Number* z,
                   device float2* x, threadgroup float4* reflectors, threadgroup float* d, threadgroup ushort* order,
                   device float2* values, device float2* vectors, constant EigParams& p, bool live,
                   thread Threads& team) {
  typedef typename Threads::Number Number;
  const uint n = live ? p.size : 0;  // a simdgroup without a matrix does nothing
  load_scaled(a, p, InOrder(), h, stride, n, 1.0f, team);
  team.wait();
  const float scale = scale_matrix(h, stride, n, team);
  const Range range = isolate_eigenvalues(h, stride, n, reinterpret_cast<threadgroup float*>(reflectors), order, team);
  load_scaled(a, p, order, h, stride, n, scale, team);
  team.wait();
  const bool harmful = !balance(h, stride, n, range, d, 1.0f, team);
  for (uint i = team.index; i < n && harmful; i += Threads::kThreads) d[i] = 1.0f;
  if (harmful) load_scaled(a, p, order, h, stride, n, scale, team);
  team.wait();
  const float balanced_scale = scale_matrix(h, stride, n, team);
  if (VECTORS) set_to_identity(z, n, team);
  reduce_to_hessenberg<VECTORS>(h, stride, n, z, reinterpret_cast<threadgroup Number*>(reflectors), team);
  const bool found = reduce_to_schur<VECTORS>(h, stride, n, n, z, reflectors, team);
  const bool good = scale > 0.0f && found;
  team.wait_for_device_memory();  // others read rows of Z
  for (uint i = team.index; i < n; i += Threads::kThreads) {
    const float2 w = eigenvalue_of<Threads>(h, stride, n, i);
    values[i] = good ? w * inverse_of_scale(balanced_scale) * inverse_of_scale(scale) : float2(NAN);
    if (!VECTORS) continue;
    if (!good) {
      for (uint j = 0; j < n; ++j) vectors[j * n + i] = float2(NAN);
    } else if (i == 0 || !begins_pair<Threads>(h, stride, n, i - 1)) {
      const bool is_pair = begins_pair<Threads>(h, stride, n, i);
      const uint last = is_pair ? i + 1 : i;
      solve_for_eigenvector<Threads>(h, stride, n, i, last, w, x + i);
      const bool turns = is_pair || !BulgeOf<Number>::Type::kPairs;
      write_eigenvector(z, d, order, x + i, n, last, turns, is_pair, vectors + i);
    }
  }
}

// A simdgroup takes a matrix of up to SIZE columns.
template <typename T, uint SIMDGROUPS, uint SIZE, bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void eig_simd(
    device const T* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device T* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T h[SIMDGROUPS * SIZE * (SIZE + 1)];
  threadgroup float d[SIMDGROUPS * SIZE];
  threadgroup float4 reflectors[SIMDGROUPS * SIZE];
  threadgroup ushort order[SIMDGROUPS * SIZE];
  const uint matrix = group * SIMDGROUPS + simdgroup;
  const ulong square = VECTORS ? ulong(matrix) * p.size * p.size : 0;
  Team<T, 1, false> team = {nullptr, lane, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, h + simdgroup * SIZE * (SIZE + 1), SIZE + 1, z + square, x + square,
                  reflectors + simdgroup * SIZE, d + simdgroup * SIZE, order + simdgroup * SIZE,
                  values + ulong(matrix) * p.size, vectors + square, p, matrix < p.matrices, team);
}

// A threadgroup takes a matrix of up to SIZE columns.
template <typename T, uint SIZE, bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_BLOCK_THREADS)]] void eig_block(
    device const T* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device T* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, EIG_BLOCK_THREADS / 32, false> Threads;
  threadgroup T h[SIZE * (SIZE + 1)];
  threadgroup float d[SIZE], memory[Threads::kFloats];
  threadgroup float4 reflectors[SIZE];
  threadgroup ushort order[SIZE];
  const ulong square = VECTORS ? ulong(matrix) * p.size * p.size : 0;
  Threads team = {memory, thread_index, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, static_cast<threadgroup T*>(h), SIZE + 1, z + square, x + square,
                  reflectors, d, order, values + ulong(matrix) * p.size, vectors + square, p, true, team);
}

// A threadgroup takes a matrix of up to EIG_DEVICE columns, and works in device memory.
template <typename T, bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_DEVICE_THREADS)]] void eig_device(
    device const T* a [[buffer(0)]], device float2* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    device T* z [[buffer(3)]], device float2* x [[buffer(4)]], constant EigParams& p [[buffer(5)]],
    device T* h [[buffer(6)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, EIG_DEVICE_THREADS / 32, true> Threads;
  threadgroup float d[EIG_DEVICE], memory[Threads::kFloats];
  threadgroup float4 reflectors[EIG_DEVICE];
  threadgroup ushort order[EIG_DEVICE];
  const ulong own = ulong(matrix) * p.size * p.size, square = VECTORS ? own : 0;
  Threads team = {memory, thread_index, 0};
  eig_of<VECTORS>(a + matrix * p.batch_stride, h + own, p.size, z + square, x + square, reflectors, d, order,
                  values + ulong(matrix) * p.size, vectors + square, p, true, team);
}

#define ARGUMENTS(type) \
  device const type*, device float2*, device float2*, device type*, device float2*, constant EigParams&
#define SIMD(name, type, simdgroups, size)                                                                    \
  template [[host_name(name "_simd_" #size)]] [[kernel]] void eig_simd<type, simdgroups, size, true>(         \
      ARGUMENTS(type), uint, uint, uint);                                                                     \
  template [[host_name(name "_simd_values_" #size)]] [[kernel]] void eig_simd<type, simdgroups, size, false>( \
      ARGUMENTS(type), uint, uint, uint);
#define LARGER(name, type, size)                                                                                       \
  template [[host_name(name "_block")]] [[kernel]] void eig_block<type, size, true>(ARGUMENTS(type), uint, uint);      \
  template                                                                                                             \
      [[host_name(name "_block_values")]] [[kernel]] void eig_block<type, size, false>(ARGUMENTS(type), uint, uint);   \
  template [[host_name(name "_device")]] [[kernel]] void eig_device<type, true>(ARGUMENTS(type), device type*, uint,   \
                                                                                uint);                                 \
  template [[host_name(name "_device_values")]] [[kernel]] void eig_device<type, false>(ARGUMENTS(type), device type*, \
                                                                                        uint, uint);
