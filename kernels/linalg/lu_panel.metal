// The panels of the blocked variant. They lie in scratch memory by columns, so that neighbouring threads read
// neighbouring rows. One threadgroup factors a panel: a device-wide barrier for each column would cost more.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

constant constexpr uint kThreads = LU_PANEL_THREADS, kSimdgroups = kThreads / 32;
constant constexpr uint kLoopedThreads = 1024;
constant constexpr float kLeast = 0x1p-60f;

// `zero` is 0, or 1 more than the panel's first column with a zero pivot. The first panel writes, and later ones keep
// what an earlier one found.
inline void note_zero(device int* info, uint matrix, uint first, uint zero) {
  const int before = first > 0 ? info[matrix] : 0;
  info[matrix] = before != 0 || zero == 0 ? before : int(first + zero);
}

template <uint ROWS, uint COLUMNS>
struct PanelRows {
  float held[ROWS][COLUMNS];  // rows thread_index + kThreads r
  uint thread_index, count;

  PanelRows(uint thread_index, uint rows)
      : thread_index(thread_index), count(thread_index < rows ? (rows - thread_index - 1) / kThreads + 1 : 0) {}

  // The host chooses the fewest rows a thread, so that only the second half of them can be missing.
  bool has(uint r) const thread { return r < ROWS / 2 || r < count; }

  void load(device const float* panel, uint pitch, uint first, uint width) thread {
    device const float* column = panel + first * pitch + thread_index;
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c, column += pitch) {
#pragma unroll
      for (uint r = 0; r < ROWS; ++r) held[r][c] = has(r) && first + c < width ? column[kThreads * r] : 0.0f;
    }
  }
  void store(device float* panel, uint pitch, uint first, uint width) const thread {
    device float* column = panel + first * pitch + thread_index;
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c, column += pitch) {
#pragma unroll
      for (uint r = 0; r < ROWS; ++r)
        if (has(r) && first + c < width) column[kThreads * r] = held[r][c];
    }
  }

  // Makes rows of U of the first rows, which are those of simdgroup 0, with the `done` columns on their left.
  void solve_top(device const float* panel, uint pitch, uint rows, uint done, threadgroup float* upper) thread {
    constexpr uint kAhead = COLUMNS < 8 ? COLUMNS : 8;  // columns on their way at once
    for (uint first = 0; first < done; first += kAhead) {
      float factors[kAhead];
#pragma unroll
      for (uint i = 0; i < kAhead; ++i)
        factors[i] = thread_index > first + i && thread_index < rows ? panel[(first + i) * pitch + thread_index] : 0.0f;
#pragma unroll
      for (uint i = 0; i < kAhead; ++i) {
#pragma unroll
        for (uint c = 0; c < COLUMNS; ++c) {
          const float above = simd_broadcast(held[0][c], ushort(first + i));
          if (thread_index > first + i) held[0][c] = fma(-factors[i], above, held[0][c]);
        }
      }
    }
    if (thread_index < done) {
#pragma unroll
      for (uint c = 0; c < COLUMNS; ++c) upper[thread_index * COLUMNS + c] = held[0][c];
    }
  }

  // Subtracts the products of the `done` columns on the left with these rows of U from all other rows.
  void subtract(device const float* panel, uint pitch, uint done, threadgroup const float* upper) thread {
    constexpr uint kAhead = ROWS < 8 ? 16 / (2 * ROWS) : ROWS == 8 ? 2 : 1;  // columns on their way at once
    device const float* column = panel + thread_index;
    for (uint first = 0; first < done; first += kAhead) {
      float factors[kAhead][ROWS];
#pragma unroll
      for (uint i = 0; i < kAhead; ++i, column += pitch) {
#pragma unroll
        for (uint r = 0; r < ROWS; ++r)
          factors[i][r] = has(r) && (r > 0 || thread_index >= 32) ? column[kThreads * r] : 0.0f;
      }
#pragma unroll
      for (uint i = 0; i < kAhead; ++i) {
#pragma unroll
        for (uint c = 0; c < COLUMNS; ++c) {
          const float above = upper[(first + i) * COLUMNS + c];
#pragma unroll
          for (uint r = 0; r < ROWS; ++r)
            if (r > 0 || thread_index >= 32) held[r][c] = fma(-factors[i][r], above, held[r][c]);
        }
      }
    }
  }

  // The largest key of the thread's rows, and its row. Only rows from k on can be pivots, and row k is the first one of
  // thread k. Rows that do not exist are zeros with larger numbers than row k.
  uint2 candidate(uint c, uint k) const thread {
    const bool below = thread_index >= k;
    uint2 best(below ? bits_of(held[0][c]) + 1 : 0, below ? 0 : UINT_MAX);
#pragma unroll
    for (uint r = 1; r < ROWS; ++r) {
      const uint own = bits_of(held[r][c]) + 1;
      best.y = own > best.x ? r : best.y;
      best.x = max(best.x, own);
    }
    return uint2(best.x, best.y != UINT_MAX ? thread_index + kThreads * best.y : UINT_MAX);
  }

  // The thread that has the row publishes it, or gets another one in its place. Row k is its first one.
  void publish_first(threadgroup float* to) const thread {
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c) to[c] = held[0][c];
  }
  void publish(uint row, threadgroup float* to) const thread {
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      if (row != thread_index + kThreads * r) continue;
#pragma unroll
      for (uint c = 0; c < COLUMNS; ++c) to[c] = held[r][c];
    }
  }
  // A branch for each row would make the compiler index the rows, and so put them in memory.
  void replace(uint row, threadgroup const float* from) thread {
    if (row % kThreads != thread_index) return;
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c) {
      const float value = from[c];
#pragma unroll
      for (uint r = 0; r < ROWS; ++r) held[r][c] = row / kThreads == r ? value : held[r][c];
    }
  }

  // Subtracts multiples of the pivot's row from the rows below k.
  void eliminate(uint c, uint k, threadgroup const float* pivot_row, bool pivoting) thread {
    const float diagonal = pivot_row[c];
    float factors[ROWS];
    if (abs(diagonal) > kLeast && abs(diagonal) < 1.0f / kLeast) {  // no power of two is needed
      const float inverse = 1.0f / diagonal;
#pragma unroll
      for (uint r = 0; r < ROWS; ++r) {
        const float quotient = held[r][c] * inverse;
        factors[r] = fma(fma(-quotient, diagonal, held[r][c]), inverse, quotient);
      }
    } else {
      const Divisor by = divisor(diagonal);
#pragma unroll
      for (uint r = 0; r < ROWS; ++r) factors[r] = multiplier(held[r][c], diagonal, by, pivoting);
    }
#pragma unroll
    for (uint r = 0; r < ROWS; ++r)
      if (r > 0 || thread_index > k) held[r][c] = factors[r];
#pragma unroll
    for (uint e = 0; e < COLUMNS; ++e) {
      if (e <= c) continue;
      const float above = pivot_row[e];
#pragma unroll
      for (uint r = 0; r < ROWS; ++r)
        if (r > 0 || thread_index > k) held[r][e] = fma(-factors[r], above, held[r][e]);
    }
  }
};

// A panel of up to kThreads ROWS rows, of which the threads hold COLUMNS columns at a time. The columns on the left of
// these come from memory, as in a left-looking factorization.
template <uint ROWS, uint COLUMNS>
[[kernel]] [[max_total_threads_per_threadgroup(LU_PANEL_THREADS)]] void lu_panel(
    device float* a [[buffer(0)]], device int* pivots [[buffer(1)]], device int* info [[buffer(2)]],
    constant LuPanelParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  // What simdgroups publish for step k has two places, so that a step needs one barrier.
  alignas(16) threadgroup float pivot_rows[2][kSimdgroups][COLUMNS];
  alignas(16) threadgroup float top_rows[2][COLUMNS];
  alignas(16) threadgroup float upper[LU_PANEL * COLUMNS];
  threadgroup uint2 largest[2][kSimdgroups];
  threadgroup uint pivot_of[LU_PANEL];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const bool pivoting = p.pivoting != 0;
  device float* const panel = a + ulong(matrix) * LU_PANEL * p.pitch;
  PanelRows<ROWS, COLUMNS> own(thread_index, p.rows);
  uint zero = 0;

  for (uint first = 0; first < p.width; first += COLUMNS) {
    own.load(panel, p.pitch, first, p.width);
    if (COLUMNS < LU_PANEL) {
      if (simdgroup == 0) own.solve_top(panel, p.pitch, p.rows, first, upper);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      own.subtract(panel, p.pitch, first, upper);
    }
#pragma unroll
    for (uint c = 0; c < COLUMNS; ++c) {
      const uint k = first + c, place = c % 2;
      const uint2 best = own.candidate(c, k);
      const uint simd_most = simd_max(best.x);
      const uint simd_row = ~simd_max(best.x == simd_most ? ~best.y : 0);
      if (best.y == simd_row) own.publish(simd_row, pivot_rows[place][simdgroup]);
      if (thread_index == k) own.publish_first(top_rows[place]);
      if (lane == 0) largest[place][simdgroup] = uint2(simd_most, simd_row);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint2 of_simdgroup = lane < kSimdgroups ? largest[place][lane] : uint2(0, UINT_MAX);
      const uint most = simd_max(of_simdgroup.x);
      uint pivot = ~simd_max(of_simdgroup.x == most ? ~of_simdgroup.y : 0);
      if (!pivoting || k >= p.width || pivot >= p.rows) pivot = k;  // zeros beyond the rows may have become NaN
      threadgroup const float* const pivot_row =
          pivot == k ? top_rows[place] : pivot_rows[place][pivot % kThreads / 32];
      if (pivot != k) {
        if (thread_index == k) own.replace(k, pivot_row);
        own.replace(pivot, top_rows[place]);
      }
      if (thread_index == 0) pivot_of[k] = pivot;
      zero = zero == 0 && k < p.width && pivot_row[c] == 0.0f ? k + 1 : zero;
      own.eliminate(c, k, pivot_row, pivoting);
    }
    own.store(panel, p.pitch, first, p.width);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if constexpr (COLUMNS < LU_PANEL) {
      // Exchanges rows in the panel's other columns: a thread moves entries of one of up to 2 COLUMNS rows.
      constexpr uint kAcross = kThreads / (2 * COLUMNS), kShare = (LU_PANEL - COLUMNS + kAcross - 1) / kAcross;
      const uint moved = thread_index % (2 * COLUMNS), top = first + moved % COLUMNS;
      const uint to = moved < COLUMNS ? top : pivot_of[top];
      const bool moves = moved < COLUMNS ? top < p.rows : to >= first + COLUMNS;
      const uint from = source_row(to, first, COLUMNS, pivot_of);
      float entries[kShare];
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        const uint other = i * kAcross + thread_index / (2 * COLUMNS), column = other < first ? other : other + COLUMNS;
        entries[i] = moves && column < p.width ? panel[column * p.pitch + from] : 0.0f;
      }
      threadgroup_barrier(mem_flags::mem_device);
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        const uint other = i * kAcross + thread_index / (2 * COLUMNS), column = other < first ? other : other + COLUMNS;
        if (moves && column < p.width) panel[column * p.pitch + to] = entries[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
  if (thread_index < p.width)
    pivots[ulong(matrix) * p.pivots + p.first + thread_index] = int(p.first + pivot_of[thread_index]) + 1;
  if (thread_index == 0) note_zero(info, matrix, p.first, zero);
}

#define INSTANTIATE(most, rows, columns)                                             \
  template [[host_name("lu_panel_" #most)]] [[kernel]] void lu_panel<rows, columns>( \
      device float*, device int*, device int*, constant LuPanelParams&, uint, uint);

INSTANTIATE(512, 1, 32)
INSTANTIATE(1024, 2, 16)
INSTANTIATE(2048, 4, 8)
INSTANTIATE(4096, 8, 8)
INSTANTIATE(8192, 16, 4)
INSTANTIATE(16384, 32, 2)

// A panel with more rows. It stays in memory, where its rows are exchanged. While one column is eliminated, the next
// column's pivot is searched.
[[kernel]] [[max_total_threads_per_threadgroup(kLoopedThreads)]] void lu_looped_panel(
    device float* a [[buffer(0)]], device int* pivots [[buffer(1)]], device int* info [[buffer(2)]],
    constant LuPanelParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint2 largest[kLoopedThreads / 32];
  threadgroup float pivot_row[LU_PANEL];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const bool pivoting = p.pivoting != 0;
  device float* const panel = a + ulong(matrix) * LU_PANEL * p.pitch;

  uint most = 0, place = UINT_MAX;  // the largest of this thread's rows in the next column
  for (uint i = thread_index; i < p.rows; i += kLoopedThreads) {
    const uint key = pivot_key(panel[i], i, 0, true);
    place = key > most ? i : place;
    most = max(key, most);
  }
  uint zero = 0;
  for (uint k = 0; k < p.width; ++k) {
    const uint simd_most = simd_max(most);
    const uint simd_first = ~simd_max(most == simd_most ? ~place : 0);
    if (lane == 0) largest[simdgroup] = uint2(simd_most, simd_first);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    const uint2 candidate = largest[lane];
    uint pivot = ~simd_max(candidate.x == simd_max(candidate.x) ? ~candidate.y : 0);
    if (!pivoting) pivot = k;
    if (thread_index < p.width) {
      device float* const column = panel + ulong(thread_index) * p.pitch;
      const float value = column[pivot];
      pivot_row[thread_index] = value;
      column[pivot] = column[k];
      column[k] = value;
    }
    if (thread_index == 0) pivots[ulong(matrix) * p.pivots + p.first + k] = int(p.first + pivot) + 1;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    const float diagonal = pivot_row[k];
    const Divisor by = divisor(diagonal);
    zero = zero == 0 && diagonal == 0.0f ? k + 1 : zero;
    most = 0;
    place = UINT_MAX;
    for (uint i = thread_index; i < p.rows; i += kLoopedThreads) {
      if (i <= k) continue;
      device float* const row = panel + i;
      const float factor = multiplier(row[ulong(k) * p.pitch], diagonal, by, pivoting);
      row[ulong(k) * p.pitch] = factor;
      for (uint c = k + 1; c < p.width; ++c)
        row[ulong(c) * p.pitch] = fma(-factor, pivot_row[c], row[ulong(c) * p.pitch]);
      const uint key = k + 1 < p.width ? pivot_key(row[ulong(k + 1) * p.pitch], i, k + 1, true) : 0;
      place = key > most ? i : place;
      most = max(key, most);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  }
  if (thread_index == 0) note_zero(info, matrix, p.first, zero);
}
