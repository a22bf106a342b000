// The Schur form A = Z T Zᴴ of general matrices, or only their upper Hessenberg form. Z and T have the scale of A,
// which is not balanced. If a matrix has NaN or infinities, or its sweeps do not converge, all its results are NaN.
#pragma once

#include <metal_stdlib>

#include "eig.h"
#include "sweeps.h"

// h has rows of `stride` numbers. `reflectors` has n entries. Z is column by column, and T row by row.
template <typename Threads, typename Rows>
inline void schur_of(device const typename Threads::Number* a, Rows h, uint stride, device typename Threads::Number* z,
                     device typename Threads::Number* t, threadgroup float4* reflectors, constant SchurParams& p,
                     bool live, thread Threads& team) {
  typedef typename Threads::Number Number;
  const uint n = live ? p.eig.size : 0;  // a simdgroup without a matrix does nothing
  load_scaled(a, p.eig, InOrder(), h, stride, n, 1.0f, team);
  team.wait();
  const float scale = scale_matrix(h, stride, n, team);
  set_to_identity(z, n, team);
  reduce_to_hessenberg<true>(h, stride, n, z, reinterpret_cast<threadgroup Number*>(reflectors), team);
  const bool found = reduce_to_schur<true>(h, stride, n, p.sweeps ? n : 0, z, reflectors, team);
  const bool good = scale > 0.0f && found;
  team.wait();
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads) {
      const uint least = p.sweeps ? j : j + 1;  // rows below have zeros, except for the blocks of real matrices
      const bool is_zero = i > least && (i > least + 1 || !p.sweeps || !BulgeOf<Number>::Type::kPairs);
      const Number entry = is_zero ? Number(0.0f) : h[i * stride + j] * inverse_of_scale(scale);
      t[ulong(i) * n + j] = good ? entry : Number(NAN);
      if (!good) z[ulong(i) * n + j] = Number(NAN);
    }
}

// A simdgroup takes a matrix of up to 32 columns.
template <typename T, uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void schur_simd(
    device const T* a [[buffer(0)]], device T* z [[buffer(1)]], device T* t [[buffer(2)]],
    constant SchurParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T h[SIMDGROUPS * 32 * 33];
  threadgroup float4 reflectors[SIMDGROUPS * 32];
  const uint matrix = group * SIMDGROUPS + simdgroup;
  const ulong square = ulong(matrix) * p.eig.size * p.eig.size;
  Team<T, 1, false> team = {nullptr, lane, 0};
  schur_of(a + matrix * p.eig.batch_stride, h + simdgroup * 32 * 33, 33, z + square, t + square,
           reflectors + simdgroup * 32, p, matrix < p.eig.matrices, team);
}

// A threadgroup takes a matrix of up to SIZE columns.
template <typename T, uint SIZE>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_BLOCK_THREADS)]] void schur_block(
    device const T* a [[buffer(0)]], device T* z [[buffer(1)]], device T* t [[buffer(2)]],
    constant SchurParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, EIG_BLOCK_THREADS / 32, false> Threads;
  threadgroup T h[SIZE * (SIZE + 1)];
  threadgroup float memory[Threads::kFloats];
  threadgroup float4 reflectors[SIZE];
  const ulong square = ulong(matrix) * p.eig.size * p.eig.size;
  Threads team = {memory, thread_index, 0};
  schur_of(a + matrix * p.eig.batch_stride, static_cast<threadgroup T*>(h), SIZE + 1, z + square, t + square,
           reflectors, p, true, team);
}

// A threadgroup takes a matrix of up to EIG_DEVICE columns, and works in the memory of the result.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(EIG_DEVICE_THREADS)]] void schur_device(
    device const T* a [[buffer(0)]], device T* z [[buffer(1)]], device T* t [[buffer(2)]],
    constant SchurParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, EIG_DEVICE_THREADS / 32, true> Threads;
  threadgroup float memory[Threads::kFloats];
  threadgroup float4 reflectors[EIG_DEVICE];
  const ulong square = ulong(matrix) * p.eig.size * p.eig.size;
  Threads team = {memory, thread_index, 0};
  schur_of(a + matrix * p.eig.batch_stride, t + square, p.eig.size, z + square, t + square, reflectors, p, true, team);
}

#define ARGUMENTS(type) device const type*, device type*, device type*, constant SchurParams&
#define INSTANTIATE(name, type, simdgroups, size)                                                                  \
  template                                                                                                         \
      [[host_name(name "_simd")]] [[kernel]] void schur_simd<type, simdgroups>(ARGUMENTS(type), uint, uint, uint); \
  template [[host_name(name "_block")]] [[kernel]] void schur_block<type, size>(ARGUMENTS(type), uint, uint);      \
  template [[host_name(name "_device")]] [[kernel]] void schur_device<type>(ARGUMENTS(type), uint, uint);
