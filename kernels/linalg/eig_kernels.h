// Eigenvalues and eigenvectors of general matrices: isolated eigenvalues, balancing, reduction to upper Hessenberg
// form, QR sweeps to the Schur form, and back-substitution. If a matrix has NaN or infinities, all its results are NaN.
//
// Back-substitution finds the eigenvectors of a Schur form t, and their products with Z. A thread has an eigenvalue, or
// the pair of a 2 x 2 block, from its eigenvector in the Schur form to the result. Entry i of the former is x[i * n].
#pragma once

#include <metal_stdlib>

#include "eig.h"
#include "sweeps.h"

constant constexpr float kMostEntry = 0x1p40f;  // of an eigenvector before it is scaled

// Two factors, both powers of two, by which an eigenvector is multiplied before an entry of it is s / by: their product
// might be below float32's numbers.
inline float2 factors_before(float s, float by) {
  if (s <= by * kMostEntry) return float2(1.0f);
  return float2(scale_to_one(s), by < 1.0f ? inverse_of_scale(scale_to_one(by)) : 1.0f);
}

template <typename Threads, typename Rows>
inline bool begins_pair(Rows t, uint stride, uint n, uint i) {
  return BulgeOf<typename Threads::Number>::Type::kPairs && i + 1 < n && size_of(t[(i + 1) * stride + i]) > 0.0f;
}

// The eigenvalue of row i; the first of a pair has the positive imaginary part.
template <typename Threads, typename Rows>
inline float2 eigenvalue_of(Rows t, uint stride, uint n, uint i) {
  const bool first = begins_pair<Threads>(t, stride, n, i);
  const bool second = i > 0 && begins_pair<Threads>(t, stride, n, i - 1);
  const uint top = second ? i - 1 : i;
  const float2 on_diagonal = to_complex(t[i * stride + i]);
  if (!first && !second) return on_diagonal;
  const float imaginary = metal::precise::sqrt(size_of(t[top * stride + top + 1])) *
                          metal::precise::sqrt(size_of(t[(top + 1) * stride + top]));
  return float2(on_diagonal.x, second ? -imaginary : imaginary);
}

// Writes the eigenvector of row `top` of the Schur form. Rows up to `last` are not zero.
template <typename Threads, typename Rows>
inline void solve_for_eigenvector(Rows t, uint stride, uint n, uint top, uint last, float2 w, device float2* x) {
  const float least = metal::max(FLT_EPSILON * (metal::abs(w.x) + metal::abs(w.y)), kEigFloor);
  x[top * n] = float2(1.0f, 0.0f);
  if (last > top) {
    const float above = to_complex(t[top * stride + last]).x, below = to_complex(t[last * stride + top]).x;
    if (metal::abs(above) >= metal::abs(below)) {
      x[last * n] = float2(0.0f, w.y / above);
    } else {
      x[top * n] = float2(-w.y / below, 0.0f);
      x[last * n] = float2(0.0f, 1.0f);
    }
  }
  for (uint below = top; below > 0;) {  // the rows from here on are done
    const uint second = below - 1;
    const uint first = second > 0 && begins_pair<Threads>(t, stride, n, second - 1) ? second - 1 : second;
    float2 s1 = float2(0.0f), s2 = float2(0.0f);
    for (uint j = below; j <= last; ++j) {
      const float2 entry = x[j * n];
      s1 = add_product(s1, -t[first * stride + j], entry);
      s2 = add_product(s2, -t[second * stride + j], entry);
    }
    // [p q; r u] (x1, x2) = (s1, s2), with the larger one of p and r as the pivot.
    float2 p = to_complex(t[first * stride + first]) - w, u = to_complex(t[second * stride + second]) - w;
    if (first != second) {
      float2 q = to_complex(t[first * stride + second]), r = to_complex(t[second * stride + first]);
      if (size_of(r) > size_of(p)) {
        const float2 row[3] = {p, q, s1};
        p = r, q = u, s1 = s2;
        r = row[0], u = row[1], s2 = row[2];
      }
      const float2 multiplier = quotient(r, p);
      u -= times(multiplier, q);
      s2 -= times(multiplier, s1);
      if (size_of(u) < least) u = float2(least, 0.0f);
      const float2 factors = factors_before(size_of(s2), size_of(u));
      s2 = s2 * factors.x * factors.y;
      s1 = s1 * factors.x * factors.y;
      float2 x2 = quotient(s2, u);
      s1 -= times(q, x2);
      const float2 more = factors_before(size_of(s1), size_of(p));
      x2 = x2 * more.x * more.y;
      const float2 x1 = quotient(s1 * more.x * more.y, p);
      if (metal::any(factors != 1.0f) || metal::any(more != 1.0f))
        for (uint j = below; j <= last; ++j) x[j * n] = x[j * n] * factors.x * factors.y * more.x * more.y;
      x[first * n] = x1;
      x[second * n] = x2;
    } else {
      if (size_of(u) < least) u = float2(least, 0.0f);
      const float2 factors = factors_before(size_of(s2), size_of(u));
      if (metal::any(factors != 1.0f))
        for (uint j = below; j <= last; ++j) x[j * n] = x[j * n] * factors.x * factors.y;
      x[second * n] = quotient(s2 * factors.x * factors.y, u);
    }
    below = first;
  }
}

// Writes column `top` of P D Z X, with norm one, if `turns` with a real largest entry, and for a pair with the
// conjugate beside it. P brings row i to row order[i]. Rows of `vectors` have n numbers.
template <typename Number>
inline void write_eigenvector(device const Number* z, threadgroup const float* d, threadgroup const ushort* order,
                              device const float2* x, uint n, uint last, bool turns, bool is_pair,
                              device float2* vectors) {
  float most = 0.0f;
  for (uint i = 0; i < n; ++i) {
    float2 sum = float2(0.0f);
    for (uint j = 0; j <= last; ++j) sum = add_product(sum, z[j * n + i], x[j * n]);
    sum *= d[i];
    vectors[order[i] * n] = sum;
    most = metal::max(most, size_of(sum));
  }
  const float scale = scale_to_one(most);
  float squares = 0.0f, largest = 0.0f;
  float2 turn = float2(1.0f, 0.0f);
  for (uint i = 0; i < n; ++i) {
    const float2 entry = vectors[i * n] * scale;
    const float square = metal::fma(entry.x, entry.x, entry.y * entry.y);
    squares += square;
    if (square > largest) {
      largest = square;
      turn = entry;
    }
  }
  // The conjugate of the largest entry's direction, over the norm.
  const float norm = metal::precise::sqrt(squares);
  const float2 factor = turns ? conjugate(turn) / (metal::precise::sqrt(largest) * norm) : float2(1.0f / norm, 0.0f);
  for (uint i = 0; i < n; ++i) {
    const float2 entry = vectors[i * n] * scale;
    // The largest entry is real without a rounding error.
    const float2 turned = float2(times(entry, factor).x, metal::all(entry == turn) ? 0.0f : times(entry, factor).y);
    vectors[i * n] = turned;
    if (is_pair) vectors[i * n + 1] = float2(turned.x, -turned.y);
  }
}

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
