// A = L D Lᵀ, or L D Lᴴ, of symmetric or Hermitian matrices, with diagonal blocks of one or two rows chosen by Bunch
// and Kaufman's partial pivoting. Results are LAPACK's: sytf2's and hetf2's for the lower triangle.
#include <metal_stdlib>
using namespace metal;

#include "fours.h"
#include "hessenberg.h"
#include "ldl.h"
#include "ldl_block.h"

// A magnitude as LAPACK compares them. A NaN counts as infinite.
inline float key_of(float a) { return isnan(a) ? INFINITY : abs(a); }
inline float key_of(float2 a) { return length_of(a) >= 0.0f ? length_of(a) : INFINITY; }

// The key of a diagonal entry. That of a Hermitian matrix is real.
template <typename Number>
inline float diagonal_key(Number a, bool hermitian) {
  return hermitian ? abs(real_part(a)) : key_of(a);
}

// What the search for a pivot finds: rows `pivot` and k (with two rows: k + 1) change places.
struct Pivot {
  uint row, rows;
  bool is_zero;
};

// The lower triangle is in h, by rows of `stride` numbers. `column` has its column k from row k on.
template <typename Threads, typename Rows>
inline Pivot find_pivot(Rows h, uint stride, uint n, uint k, threadgroup const typename Threads::Number* column,
                        bool hermitian, thread Threads& team) {
  constexpr float kAlpha = 0.6403882032022076f;  // (1 + √17) / 8
  const float diagonal = diagonal_key(h[k * stride + k], hermitian);
  float below = 0.0f;
  for (uint i = k + 1 + team.index; i < n; i += Threads::kThreads) below = max(below, key_of(column[i]));
  const float largest = team.max(below);
  float first = -float(n);
  for (uint i = k + 1 + team.index; i < n; i += Threads::kThreads)
    if (key_of(column[i]) == largest) first = max(first, -float(i));
  const uint row = uint(-team.max(first));
  float beside = 0.0f;  // the largest entry of that row, besides the diagonal's
  if (row < n)
    for (uint j = k + team.index; j < n; j += Threads::kThreads)
      if (j != row) beside = max(beside, key_of(j < row ? h[row * stride + j] : h[j * stride + row]));
  beside = team.max(beside);
  if (!(max(diagonal, largest) > 0.0f) || isnan(diagonal)) return {k, 1, true};
  if (diagonal >= kAlpha * largest || diagonal >= kAlpha * largest * (largest / beside)) return {k, 1, false};
  return {row, diagonal_key(h[row * stride + row], hermitian) >= kAlpha * beside ? 1u : 2u, false};
}

// Exchanges the rows and columns `to` and `from` > to of the lower triangle, from column k on.
template <typename Threads, typename Rows>
inline void exchange(Rows h, uint stride, uint n, uint k, uint to, uint from, bool hermitian, thread Threads& team) {
  typedef typename Threads::Number Number;
  for (uint i = k + team.index; i < n; i += Threads::kThreads) {
    if (i == from) {
      const Number value = h[to * stride + to];
      h[to * stride + to] = h[from * stride + from];
      h[from * stride + from] = value;
      if (hermitian) h[from * stride + to] = conjugate(h[from * stride + to]);
    } else if (i != to) {
      Rows const a = i < to ? h + to * stride + i : h + i * stride + to;
      Rows const b = i < from ? h + from * stride + i : h + i * stride + from;
      const bool crosses = hermitian && i > to && i < from;  // the diagonal
      const Number value = *a;
      *a = crosses ? conjugate(*b) : *b;
      *b = crosses ? conjugate(value) : value;
    }
  }
}

// `columns` has room for two columns of n numbers.
template <typename Threads, typename Rows>
inline void factor_ldl(Rows h, uint stride, threadgroup typename Threads::Number* columns, device int* pivots,
                       device int* info, device const typename Threads::Number* a, constant LdlParams& p, uint n,
                       bool live, thread Threads& team) {
  typedef typename Threads::Number Number;
  const bool hermitian = p.hermitian != 0;
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads) {
      const Number value = j <= i ? a[i * p.row_stride + j * p.column_stride] : Number(0.0f);
      h[i * stride + j] = hermitian && i == j ? number<Number>(real_part(value)) : value;
    }
  team.wait();
  uint zero = 0;
  for (uint k = 0, rows; k < n; k += rows) {
    for (uint i = k + team.index; i < n; i += Threads::kThreads) columns[i] = h[i * stride + k];
    team.wait();
    const Pivot pivot = find_pivot(h, stride, n, k, columns, hermitian, team);
    rows = pivot.rows;
    team.wait();
    const uint to = k + rows - 1;
    if (pivot.row != to) exchange(h, stride, n, k, to, pivot.row, hermitian, team);
    team.wait();
    if (team.index == 0) {
      const int row = int(pivot.row) + 1;
      pivots[k] = rows == 1 ? row : -row;
      if (rows == 2) pivots[k + 1] = -row;
    }
    zero = zero == 0 && pivot.is_zero ? k + 1 : zero;
    const uint rest = pivot.is_zero ? n : k + rows;  // a column of zeros changes no other
    const Block<Number> block = block_at<Number>(h, stride, 1, k, rows, hermitian);
    for (uint i = rest + team.index; i < n; i += Threads::kThreads) {
      const Number second = rows == 2 ? h[i * stride + k + 1] : Number(0.0f);
      const Pair<Number> multiplier = block.divide(h[i * stride + k], second, true);
      columns[i] = multiplier.first;
      columns[n + i] = multiplier.second;
    }
    team.wait();
    // A simdgroup takes a row at a time.
    for (uint i = rest + team.index / 32; i < n; i += Threads::kThreads / 32) {
      const Number first = h[i * stride + k], second = h[i * stride + k + rows - 1];
      for (uint j = rest + team.index % 32; j <= i; j += 32) {
        Number value = add_product(h[i * stride + j], -first, hermitian ? conjugate(columns[j]) : columns[j]);
        if (rows == 2) value = add_product(value, -second, hermitian ? conjugate(columns[n + j]) : columns[n + j]);
        h[i * stride + j] = hermitian && i == j ? number<Number>(real_part(value)) : value;
      }
    }
    team.wait();
    for (uint i = rest + team.index; i < n; i += Threads::kThreads) {
      h[i * stride + k] = columns[i];
      if (rows == 2) h[i * stride + k + 1] = columns[n + i];
    }
    team.wait();
  }
  if (live && team.index == 0) *info = int(zero);
}

// Copies rows out of threadgroup memory.
template <typename Threads>
inline void store_rows(threadgroup const typename Threads::Number* h, uint stride, device typename Threads::Number* to,
                       uint n, thread const Threads& team) {
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads) to[ulong(i) * n + j] = h[i * stride + j];
}

template <typename T, uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void ldl_factor_simd(
    device const T* a [[buffer(0)]], device T* ld [[buffer(1)]], device int* pivots [[buffer(2)]],
    device int* info [[buffer(3)]], constant LdlParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kStride = LDL_SIMD + 1, kNumbers = LDL_SIMD * (kStride + 2);
  threadgroup T memory[SIMDGROUPS * kNumbers];
  const uint matrix = group * SIMDGROUPS + simdgroup;
  const bool live = matrix < p.matrices;
  const uint n = live ? p.size : 0;  // a simdgroup without a matrix does nothing
  threadgroup T* const h = memory + simdgroup * kNumbers;
  Team<T, 1, false> team = {nullptr, lane, 0};
  factor_ldl(h, kStride, h + LDL_SIMD * kStride, pivots + ulong(matrix) * n, info + matrix, a + matrix * p.batch_stride,
             p, n, live, team);
  store_rows(h, kStride, ld + ulong(matrix) * n * n, n, team);
}

template <typename T, uint SIZE>
[[kernel]] [[max_total_threads_per_threadgroup(LDL_BLOCK_THREADS)]] void ldl_factor_block(
    device const T* a [[buffer(0)]], device T* ld [[buffer(1)]], device int* pivots [[buffer(2)]],
    device int* info [[buffer(3)]], constant LdlParams& p [[buffer(4)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, LDL_BLOCK_THREADS / 32, false> Threads;
  threadgroup T h[SIZE * (SIZE + 1)];
  threadgroup T columns[2 * SIZE];
  threadgroup float memory[Threads::kFloats];
  Threads team = {memory, thread_index, 0};
  factor_ldl(static_cast<threadgroup T*>(h), SIZE + 1, columns, pivots + ulong(matrix) * p.size, info + matrix,
             a + matrix * p.batch_stride, p, p.size, true, team);
  store_rows(static_cast<threadgroup const T*>(h), SIZE + 1, ld + ulong(matrix) * p.size * p.size, p.size, team);
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(LDL_DEVICE_THREADS)]] void ldl_factor_device(
    device const T* a [[buffer(0)]], device T* ld [[buffer(1)]], device int* pivots [[buffer(2)]],
    device int* info [[buffer(3)]], constant LdlParams& p [[buffer(4)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, LDL_DEVICE_THREADS / 32, true> Threads;
  threadgroup float memory[Threads::kFloats];
  threadgroup T columns[2 * LDL_DEVICE];
  Threads team = {memory, thread_index, 0};
  factor_ldl(ld + ulong(matrix) * p.size * p.size, p.size, columns, pivots + ulong(matrix) * p.size, info + matrix,
             a + matrix * p.batch_stride, p, p.size, true, team);
}

#define ARGUMENTS(type) device const type*, device type*, device int*, device int*, constant LdlParams&, uint, uint
#define INSTANTIATE(name, type, simdgroups, size)                                                                \
  template [[host_name(name "_simd")]] [[kernel]] void ldl_factor_simd<type, simdgroups>(ARGUMENTS(type), uint); \
  template [[host_name(name "_block")]] [[kernel]] void ldl_factor_block<type, size>(ARGUMENTS(type));           \
  template [[host_name(name "_device")]] [[kernel]] void ldl_factor_device<type>(ARGUMENTS(type));

INSTANTIATE("ldl_factor", float, LDL_SIMDGROUPS, LDL_BLOCK)
INSTANTIATE("ldl_factor_complex", float2, LDL_COMPLEX_SIMDGROUPS, LDL_COMPLEX_BLOCK)
