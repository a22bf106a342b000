// LU, and with it A X = B, by one threadgroup: of matrices that fit its registers, and of the blocked variant's panels.
// row_threads threads hold a row each of the columns 4 (g + G j) + {0, 1, 2, 3}, j in QUADS, where G is how many times
// row_threads there are threads, and g which of these times a thread belongs to. B's columns follow A's, from a whole
// quad on. The threads of a simdgroup have one g, so that what they read of the pivot's row is the same for all of them.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

// Four elements of a row, of which `count` are there.
inline float4 load_quad(device const float* from, long stride, int count, bool vectors) {
  if (vectors && count >= 4) return *(device const float4*)from;
  float4 quad;
#pragma unroll
  for (int e = 0; e < 4; ++e) quad[e] = e < count ? from[e * stride] : 0.0f;
  return quad;
}

inline void store_quad(float4 quad, device float* row, long stride, uint column, uint columns, bool vectors) {
  if (vectors && column + 4 <= columns) {
    *(device float4*)(row + column) = quad;
    return;
  }
#pragma unroll
  for (uint e = 0; e < 4; ++e)
    if (column + e < columns) row[(column + e) * stride] = quad[e];
}

template <uint QUADS, uint THREADS>
struct Shared {
  float4 pivot_row[2 * QUADS * THREADS / 32];  // QUADS for each g; two of them for the back substitution
  float column_of[2][THREADS];                 // column k: the one before may still be read
  float diagonal[THREADS];
  uint2 largest[32];
  Divisor pivot_divisor;
};

template <uint QUADS, uint THREADS>
inline void factor_and_solve(device const float* a, device const float* b, device float* lu, device int* pivots,
                             device int* info, device uint* sources, device float* x, constant LuParams& p,
                             threadgroup Shared<QUADS, THREADS>& shared, uint slot, uint thread_index, uint threads) {
  threadgroup float4* const pivot_row = shared.pivot_row;
  threadgroup float* const diagonal = shared.diagonal;
  const uint lane = thread_index % 32;
  const uint simdgroups = p.row_threads / 32;  // that hold one column
  const uint simdgroup = thread_index / 32 % simdgroups;
  const uint g = thread_index / 32 / simdgroups;
  const uint G = threads / p.row_threads;
  const uint row = 32 * simdgroup + lane;
  const uint matrix = slot / p.tiles, tile = slot % p.tiles;
  const uint quads = (p.columns + 3) / 4;  // of A
  const uint first_column = tile * p.tile;
  const uint right_columns = p.right > 0 ? min(p.tile, p.right - first_column) : 0;

  float4 held[QUADS];
  {
    device const float* from = a + matrix * p.a_batch + (p.first + row) * p.a_row + p.first * p.a_column;
    device const float* const b_from = b + matrix * p.b_batch + row * p.b_row + first_column * p.b_column;
#pragma unroll
    for (uint j = 0; j < QUADS; ++j) {
      const uint quad = g + G * j;
      const bool of_a = quad < quads;
      const uint column = 4 * (of_a ? quad : quad - quads);
      const long stride = of_a ? p.a_column : p.b_column;
      const int count = row < p.rows ? int(of_a ? p.columns : right_columns) - int(column) : 0;
      if (!of_a && p.identity != 0)
        held[j] = select(float4(0.0f), float4(1.0f), first_column + column + uint4(0, 1, 2, 3) == row);
      else
        held[j] = load_quad((of_a ? from : b_from) + column * stride, stride, count,
                            (p.vectors & (of_a ? LU_VECTORS_A : LU_VECTORS_B)) != 0);
    }
  }

  const uint steps = min(p.rows, p.columns);
  const bool pivoting = p.pivoting != 0;
  threadgroup float4* const own = pivot_row + QUADS * g;
  uint place = row, zero = 0;  // `place` is where pivoting puts the row

  for (uint j = 0; j < QUADS; ++j) {
    const uint end = min(4 * G * (j + 1), steps);
    for (uint k = 4 * G * j; k < end; ++k) {
      const bool holds = k / 4 - G * j == g;
      threadgroup float* const column = shared.column_of[k & 1];
      const float value = component(held[0], k % 4);
      if (holds) {
        column[row] = value;
        if (pivoting) {
          const uint key = pivot_key(value, place, k, row < p.rows), most = simd_max(key);
          const uint first = ~simd_max(key == most ? ~place : 0);
          if (lane == 0) shared.largest[simdgroup] = uint2(most, first);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint pivot = k;
      if (pivoting) {
        const uint2 of = lane < simdgroups ? shared.largest[lane] : uint2(0, 0);
        pivot = ~simd_max(of.x == simd_max(of.x) ? ~of.y : 0);
      }
      if (place == pivot) {
#pragma unroll
        for (uint i = 0; i < QUADS; ++i) own[i] = held[i];
        if (holds) shared.pivot_divisor = divisor(value);
      }
      place = exchanged(place, k, pivot);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const float on_diagonal = ((threadgroup const float*)(pivot_row + (k / 4 - G * j) * QUADS))[k % 4];
      zero = zero == 0 && on_diagonal == 0.0f ? k + 1 : zero;
      if (thread_index == 0 && tile == 0 && p.factors != 0)
        pivots[ulong(matrix) * p.pivots_batch + p.first + k] = int(p.first + pivot) + 1;
      if (place > k) {
        const float factor = multiplier(column[row], on_diagonal, shared.pivot_divisor, pivoting);
        const uint4 at = 4 * (g + G * j) + uint4(0, 1, 2, 3);
        held[0] = select(held[0], fma(float4(-factor), own[0], held[0]), at > k);
        held[0] = select(held[0], float4(factor), at == k);
#pragma unroll
        for (uint i = 1; i < QUADS; ++i)
          if (i < QUADS - j) held[i] = fma(float4(-factor), own[i], held[i]);
      }
    }
    rotate(held);
  }

  threadgroup_barrier(mem_flags::mem_device);  // panels are factored in place
  if (tile == 0) {
    if (thread_index == 0) {
      const int before = p.first > 0 ? info[matrix] : 0;
      info[matrix] = before != 0 || zero == 0 ? before : int(p.first + zero);
    }
    if (p.sources != 0 && g == 0 && row < p.rows) sources[ulong(matrix) * p.rows + place] = row;
    if (p.factors != 0 && row < p.rows) {
      device float* const to = lu + matrix * p.lu_batch + (p.first + place) * p.lu_row + p.first;
      for (uint j = 0; j < QUADS; ++j) {
        store_quad(held[0], to, 1, 4 * (g + G * j), p.columns, (p.vectors & LU_VECTORS_LU) != 0);
        rotate(held);
      }
    }
  }
  if (p.right == 0) return;

#pragma unroll
  for (uint j = 0; j < QUADS; ++j)
    if (place / 4 == g + G * j) diagonal[place] = component(held[j], place % 4);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint back = 0; back < QUADS; ++back) {
    const uint j = QUADS - 1 - back;
    rotate_back(held);
    // Columns of A behind this quad are not needed any more, and may change with those of B.
    const bool right_here = g + G * j >= quads;
    for (uint k = min(4 * G * (j + 1), steps); k > 4 * G * j;) {
      --k;
      threadgroup float* const column = shared.column_of[k & 1];
      threadgroup float4* const solved = own + (k & 1) * QUADS * G;
      if (k / 4 - G * j == g) column[row] = component(held[0], k % 4);
      if (place == k) {
        const Divisor by = divisor(diagonal[k]);
#pragma unroll
        for (uint i = 0; i < QUADS; ++i)
          if (i < QUADS - j && (i > 0 || right_here)) solved[i] = held[i] = held[i] / by;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (place < k) {
        const float factor = column[row];
        if (right_here) held[0] = fma(float4(-factor), solved[0], held[0]);
#pragma unroll
        for (uint i = 1; i < QUADS; ++i)
          if (i < QUADS - j) held[i] = fma(float4(-factor), solved[i], held[i]);
      }
    }
  }
  if (row < p.rows) {
    device float* const to =
        x + ulong(matrix) * p.rows * p.right + place * p.x_row + first_column * p.x_column;
    for (uint j = 0; j < QUADS; ++j) {
      const uint quad = g + G * j;
      if (quad >= quads)
        store_quad(held[0], to, p.x_column, 4 * (quad - quads), right_columns, (p.vectors & LU_VECTORS_X) != 0);
      rotate(held);
    }
  }
}

// Fewer threads can have more registers each.
#define KERNEL(name, most_threads)                                                                                    \
  template <uint QUADS>                                                                                               \
  [[kernel]] [[max_total_threads_per_threadgroup(most_threads)]] void name(                                           \
      device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* lu [[buffer(2)]],       \
      device int* pivots [[buffer(3)]], device int* info [[buffer(4)]], device uint* sources [[buffer(5)]],           \
      device float* x [[buffer(6)]], constant LuParams& p [[buffer(7)]], uint slot [[threadgroup_position_in_grid]],  \
      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {                  \
    threadgroup Shared<QUADS, most_threads> shared;                                                                   \
    factor_and_solve(a, b, lu, pivots, info, sources, x, p, shared, slot, thread_index, threads);                     \
  }

KERNEL(lu_block_narrow, 1024)
KERNEL(lu_block_wide, 512)

#define INSTANTIATE(kernel, quads)                                                                                    \
  template [[host_name("lu_block_" #quads)]] [[kernel]] void kernel<quads>(device const float*, device const float*,  \
      device float*, device int*, device int*, device uint*, device float*, constant LuParams&, uint, uint, uint);

INSTANTIATE(lu_block_narrow, 4)
INSTANTIATE(lu_block_wide, 8)
INSTANTIATE(lu_block_wide, 16)
INSTANTIATE(lu_block_wide, 17)
