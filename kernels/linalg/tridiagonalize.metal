// The reduction of Hermitian matrices to tridiagonal form by Householder's reflectors (LAPACK's sytd2). A dispatch
// handles one column: each threadgroup applies the reflector before it to some rows, makes the column's reflector,
// which all threadgroups do alike, and multiplies its rows by it. So a dispatch reads and writes the matrix once.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "hermitian.h"
#include "scalars.h"
#include "tridiagonalize.h"
#include "tridiagonalize_steps.h"

// Writes both triangles of a matrix from the lower one, and zeros in the padding of the rows.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONALIZE_THREADS)]] void tridiagonal_load(
    device const T* a [[buffer(0)]], device T* out [[buffer(1)]], constant TridiagonalLoadParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = TRIDIAGONALIZE_TILE;
  threadgroup T tile[kTile][kTile + 1];
  const uint matrix = group / (p.tiles * p.tiles), row_tile = group / p.tiles % p.tiles, column_tile = group % p.tiles;
  const bool mirrored = column_tile > row_tile;
  if (p.in_place && column_tile < row_tile) return;
  const uint from_row = (mirrored ? column_tile : row_tile) * kTile, from_column = min(row_tile, column_tile) * kTile;
  a += matrix * p.batch_stride;
  out += ulong(matrix) * p.size * p.pitch;
  for (uint at = thread_index; at < kTile * kTile; at += TRIDIAGONALIZE_THREADS) {
    const uint i = from_row + at / kTile, j = from_column + at % kTile;
    const uint row = max(i, j), column = min(i, j);
    tile[at / kTile][at % kTile] =
        row < p.size ? of_triangle(a[row * p.row_stride + column * p.column_stride], i, j, p.conjugate) : T(0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint at = thread_index; at < kTile * kTile; at += TRIDIAGONALIZE_THREADS) {
    const uint i = at / kTile, j = at % kTile, row = row_tile * kTile + i, column = column_tile * kTile + j;
    if (row < p.size && column < p.pitch)
      out[ulong(row) * p.pitch + column] = mirrored ? conjugate(tile[j][i]) : tile[i][j];
  }
}

#define INSTANTIATE_LOAD(suffix, type)                                                      \
  template [[host_name("tridiagonal_load" suffix)]] [[kernel]] void tridiagonal_load<type>( \
      device const type*, device type*, constant TridiagonalLoadParams&, uint, uint);

INSTANTIATE_LOAD("", float)
INSTANTIATE_LOAD("_complex", float2)

// Sums of a threadgroup, for each thread. `found` is read until the next barrier.
template <uint SIMDGROUPS>
inline float2 sums_of_all(float2 value, threadgroup float2* found, uint thread_index) {
  value = float2(simd_sum(value.x), simd_sum(value.y));
  if (thread_index % 32 == 0) found[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float2 sum = 0.0f;
#pragma unroll
  for (uint i = 0; i < SIMDGROUPS; ++i) sum += found[i];
  return sum;
}

// The entries of a row of a Hermitian matrix from those of its column, and the other way around.
inline float4 conjugates(float4 v) { return v; }
inline Complex4 conjugates(Complex4 v) { return {v.re, -v.im}; }
inline float4 difference(float4 a, float4 b) { return a - b; }
inline Complex4 difference(Complex4 a, Complex4 b) { return {a.re - b.re, a.im - b.im}; }
inline float4 real_parts(float4 v) { return v; }
inline float4 real_parts(Complex4 v) { return v.re; }

// What a row's update reads of the reflector and of w.
template <typename T>
struct TridiagonalRow {
  T v, w;
};

// A thread has four of the columns. The products of complex rows are pairs of floats.
template <uint THREADS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(THREADS)]] void tridiagonal_column(
    device T* a [[buffer(0)]], device T* reflectors [[buffer(1)]], device const T* products [[buffer(2)]],
    device T* new_products [[buffer(3)]], device float* tau [[buffer(4)]], device float* diagonal [[buffer(5)]],
    device T* beside [[buffer(6)]], constant TridiagonalColumnParams& p [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef typename FourOf<T>::Type Four;
  constexpr uint kSimdgroups = THREADS / 32, kParts = FourOf<T>::kParts;
  constexpr uint kRows = kParts == 1 ? 8 : THREADS == 512 ? 2 : 4;  // at once, as the registers allow
  threadgroup float2 found[2 * kSimdgroups];
  threadgroup TridiagonalRow<T> of_rows[TRIDIAGONALIZE_ROWS];
  threadgroup float parts[TRIDIAGONALIZE_ROWS * kParts * kSimdgroups];
  const uint matrix = group / p.parts, part = group % p.parts, n = p.size, column = p.column;
  const uint begin = column + 1 + part * p.rows, end = min(begin + p.rows, n);
  a += ulong(matrix) * n * p.pitch;
  reflectors += ulong(matrix) * p.reflectors * p.pitch;
  products += ulong(matrix) * p.pitch;
  new_products += ulong(matrix) * p.pitch;
  tau += ulong(matrix) * p.reflectors;
  device const T* const old_reflector = reflectors + ulong(kParts * column) * p.pitch;
  device T* const reflector_row = reflectors + ulong(kParts * (column + 1)) * p.pitch;
  const uint at = column / 4 * 4 + 4 * thread_index;
  const uint4 columns = at + uint4(0, 1, 2, 3);
  const Four zero = four_of(T(0.0f));

  // The first rows are under way during all that leads to the reflector.
  Four ahead[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r)
    ahead[r] = begin + r < end && at < n ? four_at(a + ulong(begin + r) * p.pitch + at) : zero;

  // The rank-2 update of the reflector before is A - v wᴴ - w vᴴ.
  Four x = zero, v = zero, w = zero;
  float2 sums = 0.0f;
  if (at < n) {
    x = conjugates(four_at(a + ulong(column) * p.pitch + at));
    if (column > p.start) {
      const bool4 present = columns >= column && columns < n;
      v = choose(zero, four_at(old_reflector + at), present);
      w = choose(zero, four_at(products + at), present);
      sums.x = sum_of(real_parts(products_of(v, w)));
    }
  }
  const bool has_next = column + 1 < n;
  const float old_tau = column > p.start ? tau[kParts * column] : 0.0f;
  T own_product = T(0.0f), alpha = T(0.0f), next_v = T(0.0f), next_product = T(0.0f);
  if (column > p.start) own_product = products[column];
  if (has_next) alpha = conjugate(a[ulong(column) * p.pitch + column + 1]);
  if (has_next && column > p.start) {
    next_v = old_reflector[column + 1];
    next_product = products[column + 1];
  }
  sums = sums_of_all<kSimdgroups>(sums, found, thread_index);
  const float share = 0.5f * old_tau * old_tau * sums.x;
  const T own_w = old_tau * own_product - number<T>(share);  // v's entry there is 1
  const T next_w = old_tau * next_product - share * next_v;
  alpha = add_product(alpha - next_w, -next_v, conjugate(own_w));

  w = minus_product(scaled_by(w, old_tau), number<T>(share), v);
  x = minus_product(difference(x, w), conjugate(own_w), v);
  const Four rest = choose(zero, x, columns >= column + 2 && columns < n);
  sums = float2(sum_of(squares_of(rest)), sum_of(squares_of(scaled_by(rest, kTinyScale))));
#pragma unroll
  for (uint e = 0; e < 4; ++e)
    if (at + e >= begin && at + e < end) of_rows[at + e - begin] = {entry(v, e), entry(w, e)};
  sums = sums_of_all<kSimdgroups>(sums, found + kSimdgroups, thread_index);
  float scale;
  const auto reflector = reflector_of(alpha, sums, scale);
  Four u = times(scaled_by(rest, scale), reflector.inverse);  // the new reflector
#pragma unroll
  for (uint e = 0; e < 4; ++e) {
    if (at + e == column + 1) set_entry(u, e, number<T>(1.0f));
    if (at + e == column && part == 0) diagonal[ulong(matrix) * n + column] = real_part(entry(x, e));
  }
  if (part == 0 && has_next && at < n) {
    set_four_at(reflector_row + at, u);
    if (kParts == 2) set_four_at(reflector_row + p.pitch + at, turned(u));
  }
  if (part == 0 && thread_index == 0 && has_next) {
    for (uint i = 0; i < kParts; ++i) tau[kParts * (column + 1) + i] = reflector.tau;
    beside[ulong(matrix) * (n - 1) + column] = reflector.beta;
  }

  u = conjugates(u), v = conjugates(v), w = conjugates(w);
  for (uint base = begin; base < end; base += kRows) {
    float sum[kRows * kParts];
    Four rows[kRows];
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
      rows[r] = ahead[r];
      const uint row = base + kRows + r;
      ahead[r] = row < end && at < n ? four_at(a + ulong(row) * p.pitch + at) : zero;
    }
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
      const uint row = min(base + r, end - 1);
      const TridiagonalRow<T> of_row = of_rows[row - begin];
      const Four value = minus_product(minus_product(rows[r], of_row.w, v), of_row.v, w);
      if (base + r < end && at < n) set_four_at(a + ulong(row) * p.pitch + at, value);
      set_parts(sum + kParts * r, sum_of(products_of(u, value)));
    }
    const float of_simdgroup = SharedSum<kRows * kParts>::of(sum, thread_index % 32);
    constexpr uint kLanes = 32 / (kRows * kParts);  // of a sum
    const uint index = (base - begin) * kParts + thread_index % 32 / kLanes;
    if (thread_index % kLanes == 0 && index < (end - begin) * kParts)
      parts[index * kSimdgroups + thread_index / 32] = of_simdgroup;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < (end - begin) * kParts) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) sum += parts[thread_index * kSimdgroups + i];
    ((device float*)(new_products + begin))[thread_index] = sum;
  }
}

#define INSTANTIATE(threads, suffix, type)                                                                            \
  template [[host_name("tridiagonal_column" suffix "_" #threads)]] [[kernel]] void tridiagonal_column<threads, type>( \
      device type*, device type*, device const type*, device type*, device float*, device float*, device type*,       \
      constant TridiagonalColumnParams&, uint, uint);

INSTANTIATE(128, "", float)
INSTANTIATE(256, "", float)
INSTANTIATE(512, "", float)
INSTANTIATE(128, "_complex", float2)
INSTANTIATE(256, "_complex", float2)
INSTANTIATE(512, "_complex", float2)

// Divides eigenvalues by the scales, powers of two, of their matrices.
[[kernel]] void tridiagonal_unscale(device float* eigenvalues [[buffer(0)]], device const float* scales [[buffer(1)]],
                                    constant uint& size [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  eigenvalues[i] *= inverse_of_scale(scales[i / size]);
}

// From complex tridiagonal matrices to real ones, Dᴴ T D with a diagonal D of phases, and the eigenvectors' way back.
//
// Writes the magnitudes of the entries beside the diagonal, and D, whose entries are the products of the phases of the
// entries before them. A simdgroup takes a matrix, and a lane some entries in a row.
[[kernel]] [[max_total_threads_per_threadgroup(32)]] void tridiagonal_phases(
    device const float2* complex_beside [[buffer(0)]], device float* beside [[buffer(1)]],
    device float2* phases [[buffer(2)]], constant TridiagonalPhasesParams& p [[buffer(3)]],
    uint matrix [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  const uint n = p.size, count = (n + 31) / 32, first = min(lane * count, n - 1), end = min(first + count, n - 1);
  complex_beside += ulong(matrix) * (n - 1);
  beside += ulong(matrix) * (n - 1);
  phases += ulong(matrix) * n;
  float2 product = float2(1.0f, 0.0f);
  for (uint i = first; i < end; ++i) {
    const float2 value = complex_beside[i];
    const float size = hypotenuse(value.x, value.y);
    beside[i] = size;
    product = times(product, phase_of(value, size));
  }
  float2 before = float2(1.0f, 0.0f);
  for (uint i = 0; i < 31; ++i) {
    const float2 of_lane = simd_shuffle(product, ushort(i));
    if (i < lane) before = times(before, of_lane);
  }
  before = phase_of(before, hypotenuse(before.x, before.y));
  if (lane == 0) phases[0] = before;
  for (uint i = first; i < end; ++i) {
    before = times(before, phase_of(complex_beside[i], beside[i]));
    phases[i + 1] = before;
  }
}

// Writes D Z of real eigenvectors Z: rows of real parts, each followed by the imaginary parts.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_PHASES_THREADS)]] void tridiagonal_turn(
    device const float* z [[buffer(0)]], device const float2* phases [[buffer(1)]], device float* out [[buffer(2)]],
    constant TridiagonalPhasesParams& p [[buffer(3)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const float2 phase = phases[row];
  for (uint i = thread_index; i < p.size; i += TRIDIAGONAL_PHASES_THREADS) {
    const float value = z[ulong(row) * p.size + i];
    out[(2 * ulong(row)) * p.size + i] = phase.x * value;
    out[(2 * ulong(row) + 1) * p.size + i] = phase.y * value;
  }
}

// Joins such rows to complex ones.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_PHASES_THREADS)]] void tridiagonal_join(
    device const float* parts [[buffer(0)]], device float2* out [[buffer(1)]],
    constant TridiagonalPhasesParams& p [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  for (uint i = thread_index; i < p.size; i += TRIDIAGONAL_PHASES_THREADS)
    out[ulong(row) * p.size + i] =
        float2(parts[(2 * ulong(row)) * p.size + i], parts[(2 * ulong(row) + 1) * p.size + i]);
}
