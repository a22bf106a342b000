// QR with column pivoting: Householder reflectors, each of the column whose rest is longest (Businger and Golub 1965).
// The rank is found on the way, by an estimate of R's largest and smallest singular value after each step (Bischof
// 1990), as in LAPACK's gelsy. Later steps change nothing.
//
// Columns are contiguous, and a simdgroup works on one at a time. One threadgroup takes a matrix; for large matrices
// the same steps are dispatches, so that many threadgroups share the columns.
#include <metal_stdlib>
using namespace metal;

#include "householder.h"
#include "qr.h"

constant constexpr uint kSimdgroups = QR_PIVOTED_THREADS / 32;

struct Pivoted {
  device float* w;         // the columns
  device float* norms;     // squares of the norms of the columns' rests
  device float* smallest;  // the left singular vectors of the estimates
  device float* largest;
  device float* values;  // the two estimates, whether the rank is known, and the step's tau
  device long* order;
  device long* rank;
  uint rows, columns, width;
  float rcond;

  Pivoted(device float* w, device float* state, device long* order, device long* rank, constant QrPivotedParams& p,
          uint matrix)
      : w(w + ulong(matrix) * p.rows * (p.columns + p.others)),
        norms(state + ulong(matrix) * (3 * p.columns + QR_PIVOTED_STATE)),
        smallest(norms + p.columns),
        largest(smallest + p.columns),
        values(largest + p.columns),
        order(order + ulong(matrix) * p.columns),
        rank(rank + matrix),
        rows(p.rows),
        columns(p.columns),
        width(p.columns + p.others),
        rcond(p.rcond) {}

  device float* column(uint at) const { return w + ulong(at) * rows; }
};

inline void start_column(Pivoted a, uint at, uint lane) {
  float sum = 0.0f;
  for (uint i = lane; i < a.rows; i += 32) sum = fma(a.column(at)[i], a.column(at)[i], sum);
  sum = simd_sum(sum);
  if (lane != 0) return;
  a.norms[at] = sum;
  a.order[at] = at;
  if (at > 0) return;
  *a.rank = 0;
  a.values[2] = 0.0f;
}

// The column with the longest rest goes to the place `step`. NaN counts as the longest. All threads of a threadgroup
// call it.
inline void choose_pivot(Pivoted a, uint step, uint thread_index, threadgroup float* lengths,
                         threadgroup uint* places) {
  const bool known = a.values[2] != 0.0f;
  float longest = -1.0f;
  uint place = step;
  for (uint at = step + thread_index; at < a.columns; at += QR_PIVOTED_THREADS) {
    const float length = isnan(a.norms[at]) ? INFINITY : a.norms[at];
    if (length > longest) longest = length, place = at;
  }
  const float most = simd_max(longest);
  place = simd_min(longest == most ? place : 0xffffffff);
  if (thread_index % 32 == 0) lengths[thread_index / 32] = most, places[thread_index / 32] = place;
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  longest = lengths[0], place = places[0];
#pragma unroll
  for (uint i = 1; i < kSimdgroups; ++i) {
    const bool better = lengths[i] > longest || (lengths[i] == longest && places[i] < place);
    longest = better ? lengths[i] : longest;
    place = better ? places[i] : place;
  }
  if (!known && place != step) {
    for (uint i = thread_index; i < a.rows; i += QR_PIVOTED_THREADS) {
      const float kept = a.column(step)[i];
      a.column(step)[i] = a.column(place)[i];
      a.column(place)[i] = kept;
    }
    if (thread_index == 0) {
      const long kept = a.order[step];
      a.order[step] = a.order[place];
      a.order[place] = kept;
      a.norms[place] = a.norms[step];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
}

// The larger singular value of ((sigma, alpha), (0, gamma)), and its left singular vector.
inline float3 larger(float sigma, float alpha, float gamma) {
  const float2 ends = float2(sigma + gamma, sigma - gamma);
  const float2 roots = precise::sqrt(ends * ends + alpha * alpha);
  // The vector is (cos t, sin t) with tan 2t = y / x. The larger of the two comes first, without cancellation.
  const float x = ends.x * ends.y + alpha * alpha, y = 2.0f * alpha * gamma, length = precise::sqrt(x * x + y * y);
  const float first = precise::sqrt(0.5f + 0.5f * (abs(x) / length)), second = 0.5f * (abs(y) / length) / first;
  float2 turn = x >= 0.0f ? float2(first, second) : float2(second, first);
  turn.y = copysign(turn.y, y);
  if (length == 0.0f) turn = float2(1.0f, 0.0f);
  return float3(0.5f * (roots.x + roots.y), turn);
}

// The first lane alone writes to this place, so it reads for the whole simdgroup.
inline float from_first(device const float* place, uint lane) { return simd_shuffle(lane == 0 ? *place : 0.0f, 0); }

// Makes the reflector of column `step`, and decides whether R still has full rank with it. A simdgroup calls it.
inline void reflect(Pivoted a, uint step, uint lane) {
  if (from_first(a.values + 2, lane) != 0.0f) return;
  device float* const x = a.column(step);
  const float alpha = from_first(x + step, lane);
  float most = 0.0f;
  for (uint i = step + 1 + lane; i < a.rows; i += 32) most = max(most, abs(x[i]));
  most = simd_max(most);
  const float scale = scale_to_one(max(most, abs(alpha)));
  float squares = 0.0f;
  for (uint i = step + 1 + lane; i < a.rows; i += 32) squares = fma(x[i] * scale, x[i] * scale, squares);
  const Reflector h = make_reflector(alpha, most, simd_sum(squares), scale);
  for (uint i = step + 1 + lane; i < a.rows; i += 32) x[i] = (x[i] * scale) * h.inverse;

  float with_smallest = 0.0f, with_largest = 0.0f;
  for (uint i = lane; i < step; i += 32) {
    with_smallest = fma(a.smallest[i], x[i], with_smallest);
    with_largest = fma(a.largest[i], x[i], with_largest);
  }
  with_smallest = simd_sum(with_smallest), with_largest = simd_sum(with_largest);
  float least = abs(h.beta), greatest = least;
  float2 turn_smallest = float2(0.0f, 1.0f), turn_largest = float2(0.0f, 1.0f);
  if (step > 0) {
    const float smallest_before = from_first(a.values, lane);
    const float3 of_largest = larger(from_first(a.values + 1, lane), with_largest, h.beta);
    const float3 of_smallest = larger(smallest_before, with_smallest, h.beta);
    greatest = of_largest.x;
    least = smallest_before * (least / of_smallest.x);
    turn_largest = of_largest.yz;
    turn_smallest = float2(-of_smallest.z, of_smallest.y);
  }
  for (uint i = lane; i < step; i += 32) a.smallest[i] *= turn_smallest.x, a.largest[i] *= turn_largest.x;
  if (lane != 0) return;
  a.smallest[step] = turn_smallest.y, a.largest[step] = turn_largest.y;
  x[step] = h.beta;
  const bool known = h.beta == 0.0f || least < greatest * a.rcond;  // not where they are NaN
  a.values[0] = least, a.values[1] = greatest, a.values[2] = known ? 1.0f : 0.0f, a.values[3] = h.tau;
  if (!known) *a.rank = step + 1;
}

// Applies the step's reflector to a column behind it.
inline void update_column(Pivoted a, uint at, uint step, uint lane) {
  if (a.values[2] != 0.0f) return;
  device const float* const v = a.column(step);
  device float* const x = a.column(at);
  const float top = lane == 0 ? x[step] : 0.0f;
  float dot = top;
  for (uint i = step + 1 + lane; i < a.rows; i += 32) dot = fma(v[i], x[i], dot);
  const float factor = a.values[3] * simd_sum(dot);
  float sum = 0.0f;
  for (uint i = step + 1 + lane; i < a.rows; i += 32) {
    x[i] = fma(-factor, v[i], x[i]);
    sum = fma(x[i], x[i], sum);
  }
  sum = simd_sum(sum);
  if (lane != 0) return;
  x[step] = top - factor;
  if (at < a.columns) a.norms[at] = sum;
}

[[kernel]] [[max_total_threads_per_threadgroup(QR_PIVOTED_THREADS)]] void qr_pivoted(
    device float* w [[buffer(0)]], device float* state [[buffer(1)]], device long* order [[buffer(2)]],
    device long* rank [[buffer(3)]], constant QrPivotedParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float lengths[kSimdgroups];
  threadgroup uint places[kSimdgroups];
  const Pivoted a(w, state, order, rank, p, matrix);
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  for (uint at = simdgroup; at < a.columns; at += kSimdgroups) start_column(a, at, lane);
  threadgroup_barrier(mem_flags::mem_device);
  for (uint step = 0; step < min(a.rows, a.columns); ++step) {
    choose_pivot(a, step, thread_index, lengths, places);
    if (simdgroup == 0) reflect(a, step, lane);
    threadgroup_barrier(mem_flags::mem_device);
    for (uint at = step + 1 + simdgroup; at < a.width; at += kSimdgroups) update_column(a, at, step, lane);
    threadgroup_barrier(mem_flags::mem_device);
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(QR_PIVOTED_THREADS)]] void qr_pivoted_start(
    device float* w [[buffer(0)]], device float* state [[buffer(1)]], device long* order [[buffer(2)]],
    device long* rank [[buffer(3)]], constant QrPivotedParams& p [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint at = group.x * kSimdgroups + thread_index / 32;
  if (at < p.columns) start_column(Pivoted(w, state, order, rank, p, group.y), at, thread_index % 32);
}

[[kernel]] [[max_total_threads_per_threadgroup(QR_PIVOTED_THREADS)]] void qr_pivoted_step(
    device float* w [[buffer(0)]], device float* state [[buffer(1)]], device long* order [[buffer(2)]],
    device long* rank [[buffer(3)]], constant QrPivotedParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float lengths[kSimdgroups];
  threadgroup uint places[kSimdgroups];
  const Pivoted a(w, state, order, rank, p, matrix);
  choose_pivot(a, p.step, thread_index, lengths, places);
  if (thread_index < 32) reflect(a, p.step, thread_index);
}

[[kernel]] [[max_total_threads_per_threadgroup(QR_PIVOTED_THREADS)]] void qr_pivoted_update(
    device float* w [[buffer(0)]], device float* state [[buffer(1)]], device long* order [[buffer(2)]],
    device long* rank [[buffer(3)]], constant QrPivotedParams& p [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint at = p.step + 1 + group.x * kSimdgroups + thread_index / 32;
  if (at < p.columns + p.others)
    update_column(Pivoted(w, state, order, rank, p, group.y), at, p.step, thread_index % 32);
}
