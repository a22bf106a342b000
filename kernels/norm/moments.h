// Mean and variance in one walk: threads merge counts, means and sums of squared deviations of parts, as Chan, Golub
// and LeVeque do ("Algorithms for computing the sample variance", 1983), so that no large sums are subtracted.
#pragma once

#include "common/held.h"

// How many elements of float4 number n are in a row that ends before element `end`, and these elements' differences
// from `mean`; 0 for the others.
template <bool aligned, typename T, uint N>
inline float count_of(Slice<aligned, T, N> slice, uint n, uint end) {
  if (aligned) return slice.holds(n, end) ? 4.0f : 0.0f;
  float count = 0.0f;
  for (uint k = 0; k < 4; ++k) count += slice.first + slice.behind(n, k) < end ? 1.0f : 0.0f;
  return count;
}
template <bool aligned, typename T, uint N>
inline float4 deviations(Slice<aligned, T, N> slice, float4 value, float mean, uint n, uint end) {
  float4 d = value - mean;
  if (aligned) return slice.holds(n, end) ? d : float4(0.0f);
  for (uint k = 0; k < 4; ++k) d[k] = slice.first + slice.behind(n, k) < end ? d[k] : 0.0f;
  return d;
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
  for (uint n = 0; n < N; ++n) {
    const float4 d = deviations(slice, v[n], mean, n, end);
    squares += sum4(d * d);
  }
  seen.add(count, mean, squares);
}
