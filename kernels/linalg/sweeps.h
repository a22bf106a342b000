// The Schur form of an upper Hessenberg matrix h by QR sweeps, with two shifts at a time for a real one and one shift
// for a complex one. The real form is upper triangular, except for 2 x 2 blocks with equal diagonal entries and a pair
// of complex eigenvalues.
//
// A sweep chases a bulge down the rows lo to hi that are not yet reduced. Only these rows and columns decide how it
// goes on. Its reflectors are kept, and afterwards applied to the rest of h and to Z, where each row or column is one
// thread's own.
#pragma once

#include <metal_stdlib>

#include "francis.h"
#include "hessenberg.h"
#include "single_shift.h"

// Entries below this count as zero: h's largest entry is about one.
constant constexpr float kEigFloor = 0x1p-100f;

// Whether the subdiagonal entry of row k is so small that it may be zero (Ahues and Tisseur 1997).
template <typename Rows>
inline bool is_negligible(Rows h, uint stride, uint n, uint k) {
  const float below = length_of(h[k * stride + k - 1]);
  if (below <= kEigFloor) return true;
  const auto first = h[(k - 1) * stride + k - 1], second = h[k * stride + k];
  float sum = length_of(first) + length_of(second);
  if (sum == 0.0f) {
    if (k >= 2) sum += length_of(h[(k - 1) * stride + k - 2]);
    if (k + 1 < n) sum += length_of(h[(k + 1) * stride + k]);
  }
  if (below > FLT_EPSILON * sum) return false;
  const float above = length_of(h[(k - 1) * stride + k]), apart = length_of(first - second);
  const float most = metal::max(below, above), least = metal::min(below, above);
  const float larger = metal::max(length_of(second), apart), smaller = metal::min(length_of(second), apart);
  const float all = larger + most;
  return least * (most / all) <= metal::max(kEigFloor, FLT_EPSILON * (smaller * (larger / all)));
}

inline RealBulge conjugate(thread const RealBulge& r) { return r; }

template <typename Number>
struct BulgeOf;
template <>
struct BulgeOf<float> {
  typedef DoubleShift Type;
};
template <>
struct BulgeOf<float2> {
  typedef SingleShift Type;
};

// Applies the reflectors m to hi - 1 of a sweep to one row or column, whose entries are `step` apart.
template <typename Bulge, bool COLUMN, typename Entries>
inline void reflect_along(Entries x, uint step, uint m, uint hi, threadgroup const float4* reflectors) {
  typename Bulge::Window window = Bulge::window(x + m * step, step);
  typedef decltype(Bulge::Window::first) Number;
  Number next[kAtOnce];
  for (uint begin = m; begin < hi; begin += kAtOnce) {
    for (uint c = 0; c < kAtOnce; ++c) {
      const uint index = begin + c + Bulge::kRows - 1;
      next[c] = index <= hi ? x[index * step] : Number(0.0f);
    }
    for (uint c = 0, k = begin; c < kAtOnce; ++c, ++k)
      if (k < hi) x[k * step] = Bulge::template advance<COLUMN>(window, next[c], reflectors[k]);
  }
  x[hi * step] = window.first;
}

// Makes h its Schur form, all of it if `WHOLE`, or else only its diagonal blocks. With WHOLE, Z becomes Z times the
// reflectors. Rows from `end` on stay as they are. Returns whether all eigenvalues were found.
template <bool WHOLE, typename Threads, typename Rows>
inline bool reduce_to_schur(Rows h, uint stride, uint n, uint end, device typename Threads::Number* z,
                            threadgroup float4* reflectors, thread Threads& team) {
  typedef typename BulgeOf<typename Threads::Number>::Type Bulge;
  typedef typename Threads::Number Number;
  uint tries = 0;
  for (uint step = 0; step < 40 * n && end > 0; ++step) {
    const uint hi = end - 1;
    float found = 0.0f;
    for (uint k = 1 + team.index; k <= hi; k += Threads::kThreads)
      if (is_negligible(h, stride, n, k)) found = metal::max(found, float(k));
    const uint lo = uint(team.max(found));
    const bool sweeps = lo + Bulge::kRows <= hi + 1, is_pair = Bulge::kPairs && lo + 1 == hi;
    tries = sweeps ? tries + 1 : 0;
    typename Bulge::Block block;
    if (is_pair) block = Bulge::block(h, stride, lo, hi);
    typename Bulge::Shift shifts;
    float begin = float(lo);
    if (sweeps) {
      shifts = Bulge::choose(h, stride, lo, hi, tries);
      for (uint m = lo + 1 + team.index; m + Bulge::kRows <= hi + 1; m += Threads::kThreads)
        if (Bulge::may_begin(h, stride, m, shifts)) begin = float(m);
    }
    const uint m = uint(team.max(begin));
    typename Bulge::Column column;
    if (sweeps) column = Bulge::first_column(h, stride, m, shifts);
    team.wait();
    if (team.index == 0 && lo > 0) h[lo * stride + lo - 1] = Number(0.0f);
    if (is_pair) Bulge::template split<WHOLE>(h, stride, n, lo, z, block, team);
    team.wait();
    const uint last = sweeps ? hi : m;
    for (uint k = m; k < last; ++k) {
      const bool is_last = k + Bulge::kRows > hi + 1;      // the bulge has a row less
      Rows before = h + k * stride + k - (k > 0 ? 1 : 0);  // the column before the bulge
      if (k > m) column = Bulge::column(before, stride, is_last);
      const typename Bulge::Reflector r = Bulge::reflector_of(column), of_columns = conjugate(r);
      for (uint j = k + team.index; j <= hi; j += Threads::kThreads)
        Bulge::reflect(h + k * stride + j, stride, is_last, of_columns);
      team.wait();
      if (team.index == 0) {
        if (k > m) {
          before[0] = r.beta;
          before[stride] = Number(0.0f);
          if (Bulge::kRows == 3 && !is_last) before[2 * stride] = Number(0.0f);
        } else if (m > lo) {
          before[0] -= times(of_columns.tau, before[0]);
        }
        if (WHOLE) reflectors[k] = Bulge::packed(r);
      }
      const uint rows = metal::min(k + Bulge::kRows, hi);
      for (uint i = lo + team.index; i <= rows; i += Threads::kThreads)
        Bulge::reflect(h + i * stride + k, 1, is_last, r);
      team.wait();
    }
    if (WHOLE && sweeps) {
      for (uint j = hi + 1 + team.index; j < n; j += Threads::kThreads)
        reflect_along<Bulge, true>(h + j, stride, m, hi, reflectors);
      for (uint i = team.index; i < lo; i += Threads::kThreads)
        reflect_along<Bulge, false>(h + i * stride, 1, m, hi, reflectors);
      for (uint i = team.index; i < n; i += Threads::kThreads) reflect_along<Bulge, false>(z + i, n, m, hi, reflectors);
    }
    if (!sweeps) end = lo;
    team.wait();
  }
  return end == 0;
}
