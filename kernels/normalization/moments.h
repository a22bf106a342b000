// Mean and variance in one walk: threads merge counts, means and sums of squared deviations of parts, as Chan, Golub
// and LeVeque do ("Algorithms for computing the sample variance", 1983), so that no large sums are subtracted.
#pragma once

#include "common/held.h"
#include "common/sums.h"

// How many elements of float4 number n are in a row that ends before element `end`, and the sum of the squares of these
// elements' differences from `mean`.
template <bool aligned, typename T, uint N>
inline float count_of(Slice<aligned, T, N> slice, uint n, uint end) {
  if (aligned) return slice.holds(n, end) ? 4.0f : 0.0f;
  float count = 0.0f;
  for (uint k = 0; k < 4; ++k) count += slice.first + slice.behind(n, k) < end ? 1.0f : 0.0f;
  return count;
}
template <bool aligned, typename T, uint N>
inline float squares_of(Slice<aligned, T, N> slice, float4 value, float mean, uint n, uint end) {
  float4 d = value - mean;
  if (!aligned) {
    for (uint k = 0; k < 4; ++k) d[k] = slice.first + slice.behind(n, k) < end ? d[k] : 0.0f;
  }
  const float squares = sum4(d * d);
  return slice.holds(n, end) ? squares : 0.0f;
}

// Elements that a thread has seen: how many, their mean, and the sum of the squares of their differences from it.
struct Seen {
  float count = 0.0f;
  float mean = 0.0f;
  float squares = 0.0f;

  void add(float other_count, float other_mean, float other_squares) {
    const float total = count + other_count;
    const float share = total > 0.0f ? other_count / total : 0.0f;
    const float difference = other_mean - mean;
    squares += other_squares + difference * difference * (count * share);
    mean += difference * share;
    count = total;
  }
  float squares_about(float other_mean) const {
    const float difference = mean - other_mean;
    return squares + count * difference * difference;
  }
};

// Adds a slice of a row that ends before element `end`.
template <bool aligned, typename T, uint N, typename Rows>
inline void see(thread Seen& seen, Slice<aligned, T, N> slice, thread const Rows& v, uint end) {
  float count = 0.0f;
  float total = 0.0f;
  for (uint n = 0; n < N; ++n) {
    count += count_of(slice, n, end);
    total += slice.holds(n, end) ? sum4(v[n]) : 0.0f;
  }
  const float mean = total / max(count, 1.0f);
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) squares += squares_of(slice, v[n], mean, n, end);
  seen.add(count, mean, squares);
}

// What a simdgroup has seen of a row in registers that ends before element `end`: 128 N elements or fewer.
template <bool aligned, typename T, uint N, typename Rows>
inline Seen seen_together(Slice<aligned, T, N> slice, thread const Rows& v, uint simdgroup, uint end) {
  const uint begin = simdgroup * 128 * N;
  Seen seen;
  seen.count = static_cast<float>(min(max(end, begin) - begin, 128 * N));
  float total = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const float part = sum4(v[n]);
    total += slice.holds(n, end) ? part : 0.0f;
  }
  seen.mean = fast::divide(simd_sum(total), seen.count);
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) squares += squares_of(slice, v[n], seen.mean, n, end);
  seen.squares = simd_sum(squares);
  return seen;
}

// What the lanes of a simdgroup have seen together, `count` elements.
inline Seen merged(Seen seen, float count) {
  const float mean = simd_sum(seen.count * seen.mean) / max(count, 1.0f);
  return {count, mean, simd_sum(seen.squares_about(mean))};
}

// What a team has seen together, a row of `length` elements, of what each of its simdgroups has. A threadgroup's
// scratch has 3 times 32 floats.
inline Seen merged(Seen seen, uint, Simdgroup) { return seen; }
inline Seen merged(Seen seen, uint length, Threadgroup team) {
  if (team.lane == 0) {
    team.scratch[team.simdgroup] = seen.count;
    team.scratch[32 + team.simdgroup] = seen.mean;
    team.scratch[64 + team.simdgroup] = seen.squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Seen part;
  if (team.lane < team.threads / 32)
    part = {team.scratch[team.lane], team.scratch[32 + team.lane], team.scratch[64 + team.lane]};
  return merged(part, static_cast<float>(length));
}
