// Solves A X = B by A = L D Lᵀ or L D Lᴴ from ldl_factor, with the exchanges of rows between the columns of L, as
// LAPACK's sytrs and hetrs. A simdgroup or a threadgroup takes some columns of B.
#include <metal_stdlib>
using namespace metal;

#include "hessenberg.h"
#include "ldl.h"
#include "ldl_block.h"

template <typename Threads>
inline float sum_of(float value, thread Threads& team) {
  return team.sum(value);
}
template <typename Threads>
inline float2 sum_of(float2 value, thread Threads& team) {
  const float real = team.sum(value.x);
  return float2(real, team.sum(value.y));
}

// A row of X, with the columns of a tile.
template <typename Number>
struct TileRow {
  Number entries[LDL_TILE];
};

// The row that a pivot names, counted from 1, or with the other sign for a pair. One that does not exist counts as k.
inline uint row_of(int pivot, uint k, uint n) {
  const uint row = uint(abs(pivot)) - 1;
  return row < n ? row : k;
}

// Exchanges two rows of X.
template <typename Threads>
inline void exchange(device typename Threads::Number* x, uint columns, uint width, uint a, uint b,
                     thread const Threads& team) {
  if (team.index < width && a != b) {
    const typename Threads::Number value = x[ulong(a) * columns + team.index];
    x[ulong(a) * columns + team.index] = x[ulong(b) * columns + team.index];
    x[ulong(b) * columns + team.index] = value;
  }
  team.wait_for_device_memory();
}

template <typename Threads>
inline void solve_ldl(device const typename Threads::Number* ld, device const int* pivots,
                      device const typename Threads::Number* b, device typename Threads::Number* x,
                      constant LdlSolveParams& p, uint slot, thread Threads& team) {
  typedef typename Threads::Number Number;
  const uint matrix = slot / p.tiles, first_column = slot % p.tiles * LDL_TILE, n = p.size;
  const uint width = min(uint(LDL_TILE), p.columns - first_column);
  const bool hermitian = p.hermitian != 0;
  ld += matrix * p.ld_batch;
  pivots += ulong(matrix) * n;
  b += matrix * p.b_batch + first_column * p.b_column;
  x += ulong(matrix) * n * p.columns + first_column;
  for (uint i = team.index; i < n; i += Threads::kThreads)
    for (uint c = 0; c < width; ++c) x[ulong(i) * p.columns + c] = b[i * p.b_row + c * p.b_column];
  team.wait_for_device_memory();
  for (uint k = 0, rows; k < n; k += rows) {
    rows = pivots[k] < 0 && k + 1 < n ? 2 : 1;
    exchange(x, p.columns, width, k + rows - 1, row_of(pivots[k], k + rows - 1, n), team);
    TileRow<Number> first, second;
    for (uint c = 0; c < LDL_TILE; ++c) {
      first.entries[c] = c < width ? x[ulong(k) * p.columns + c] : Number(0.0f);
      second.entries[c] = c < width ? x[ulong(k + rows - 1) * p.columns + c] : Number(0.0f);
    }
    for (uint i = k + rows + team.index; i < n; i += Threads::kThreads) {
      const Number a = -ld[i * p.ld_row + k * p.ld_column],
                   other = rows == 2 ? -ld[i * p.ld_row + (k + 1) * p.ld_column] : Number(0.0f);
      for (uint c = 0; c < LDL_TILE; ++c) {
        if (c >= width) continue;
        device Number& value = x[ulong(i) * p.columns + c];
        value = add_product(add_product(value, a, first.entries[c]), other, second.entries[c]);
      }
    }
    team.wait_for_device_memory();
    const Block<Number> block = block_at<Number>(ld, p.ld_row, p.ld_column, k, rows, hermitian);
    for (uint c = 0; c < LDL_TILE; ++c) {
      if (c >= width || team.index != 0) continue;
      const Pair<Number> divided = block.divide(first.entries[c], second.entries[c], false);
      x[ulong(k) * p.columns + c] = divided.first;
      if (rows == 2) x[ulong(k + 1) * p.columns + c] = divided.second;
    }
    team.wait_for_device_memory();
  }
  for (uint end = n, rows; end > 0; end -= rows) {
    rows = pivots[end - 1] < 0 && end > 1 ? 2 : 1;
    const uint k = end - rows;
    TileRow<Number> first, second;
    for (uint c = 0; c < LDL_TILE; ++c) first.entries[c] = second.entries[c] = Number(0.0f);
    for (uint i = end + team.index; i < n; i += Threads::kThreads) {
      const Number a = hermitian ? conjugate(ld[i * p.ld_row + k * p.ld_column]) : ld[i * p.ld_row + k * p.ld_column];
      const Number last = hermitian ? conjugate(ld[i * p.ld_row + (end - 1) * p.ld_column])
                                    : ld[i * p.ld_row + (end - 1) * p.ld_column];
      for (uint c = 0; c < LDL_TILE; ++c) {
        const Number value = c < width ? x[ulong(i) * p.columns + c] : Number(0.0f);
        first.entries[c] = add_product(first.entries[c], a, value);
        second.entries[c] = add_product(second.entries[c], last, value);
      }
    }
    for (uint c = 0; c < LDL_TILE; ++c) {
      const Number of_first = sum_of(first.entries[c], team), of_second = sum_of(second.entries[c], team);
      if (c >= width || team.index != 0) continue;
      x[ulong(k) * p.columns + c] -= of_first;
      if (rows == 2) x[ulong(k + 1) * p.columns + c] -= of_second;
    }
    team.wait_for_device_memory();
    exchange(x, p.columns, width, end - 1, row_of(pivots[k], end - 1, n), team);
  }
}

template <typename T, uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void ldl_solve(
    device const T* ld [[buffer(0)]], device const int* pivots [[buffer(1)]], device const T* b [[buffer(2)]],
    device T* x [[buffer(3)]], constant LdlSolveParams& p [[buffer(4)]], uint slot [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Team<T, SIMDGROUPS, true> Threads;
  threadgroup float memory[Threads::kFloats];
  Threads team = {memory, thread_index, 0};
  solve_ldl(ld, pivots, b, x, p, slot, team);
}

#define INSTANTIATE(name, type, simdgroups)                                 \
  template [[host_name(name)]] [[kernel]] void ldl_solve<type, simdgroups>( \
      device const type*, device const int*, device const type*, device type*, constant LdlSolveParams&, uint, uint);

INSTANTIATE("ldl_solve_simd", float, 1)
INSTANTIATE("ldl_solve_block", float, LDL_DEVICE_THREADS / 32)
INSTANTIATE("ldl_solve_complex_simd", float2, 1)
INSTANTIATE("ldl_solve_complex_block", float2, LDL_DEVICE_THREADS / 32)
