// The real Schur form of an upper Hessenberg matrix h by QR sweeps with two shifts at a time (Francis 1961; the tests
// and exceptional shifts are those of LAPACK's lahqr). The form is upper triangular, except for 2 x 2 blocks with equal
// diagonal entries and a pair of complex eigenvalues.
//
// A sweep chases a bulge of three rows down the rows lo to hi that are not yet reduced. Only these rows and columns
// decide how it goes on. Its reflectors are kept, and afterwards applied to the rest of h and to Z, where each row or
// column is one thread's own.
#pragma once

#include <metal_stdlib>

#include "hessenberg.h"

// Entries below this count as zero: h's largest entry is about one.
constant constexpr float kEigFloor = 0x1p-100f;

// Whether the subdiagonal entry of row k is so small that it may be zero (Ahues and Tisseur 1997).
template <typename Rows>
inline bool is_negligible(Rows h, uint stride, uint n, uint k) {
  const float below = metal::abs(h[k * stride + k - 1]);
  if (below <= kEigFloor) return true;
  const float first = h[(k - 1) * stride + k - 1], second = h[k * stride + k];
  float sum = metal::abs(first) + metal::abs(second);
  if (sum == 0.0f) {
    if (k >= 2) sum += metal::abs(h[(k - 1) * stride + k - 2]);
    if (k + 1 < n) sum += metal::abs(h[(k + 1) * stride + k]);
  }
  if (below > FLT_EPSILON * sum) return false;
  const float above = metal::abs(h[(k - 1) * stride + k]), apart = metal::abs(first - second);
  const float most = metal::max(below, above), least = metal::min(below, above);
  const float larger = metal::max(metal::abs(second), apart), smaller = metal::min(metal::abs(second), apart);
  const float all = larger + most;
  return least * (most / all) <= metal::max(kEigFloor, FLT_EPSILON * (smaller * (larger / all)));
}

// The rotation that brings a block [a b; c d] to standard form, and that form.
struct StandardBlock {
  float a, b, c, d, cosine, sine;
};

inline float hypotenuse(float x, float y) {
  const float most = metal::max(metal::abs(x), metal::abs(y));
  if (most == 0.0f) return 0.0f;
  const float ratio = metal::min(metal::abs(x), metal::abs(y)) / most;
  return most * metal::precise::sqrt(metal::fma(ratio, ratio, 1.0f));
}

// The cases are those of LAPACK's lanv2.
inline StandardBlock standard_block(float a, float b, float c, float d) {
  if (c == 0.0f) return {a, b, c, d, 1.0f, 0.0f};
  if (b == 0.0f) return {d, -c, 0.0f, a, 0.0f, 1.0f};
  if (a == d && (b < 0.0f) != (c < 0.0f)) return {a, b, c, d, 1.0f, 0.0f};
  const float difference = a - d, half_of_it = 0.5f * difference;
  const float most = metal::max(metal::abs(b), metal::abs(c));
  const float least = metal::copysign(1.0f, b) * metal::copysign(1.0f, c) * metal::min(metal::abs(b), metal::abs(c));
  const float scale = metal::max(metal::abs(half_of_it), most);
  const float discriminant = half_of_it / scale * half_of_it + most / scale * least;
  if (discriminant >= 4.0f * FLT_EPSILON * scale) {  // two real eigenvalues
    const float root = metal::precise::sqrt(scale) * metal::precise::sqrt(discriminant);
    const float z = half_of_it + metal::copysign(root, half_of_it);
    const float length = hypotenuse(c, z);
    return {d + z, b - c, 0.0f, d - most / z * least, z / length, c / length};
  }
  const float sum = b + c, length = hypotenuse(sum, difference);
  float cosine = metal::precise::sqrt(0.5f * (1.0f + metal::abs(sum) / length));
  float sine = -(half_of_it / (length * cosine)) * metal::copysign(1.0f, sum);
  const float aa = a * cosine + b * sine, bb = b * cosine - a * sine;
  const float cc = c * cosine + d * sine, dd = d * cosine - c * sine;
  StandardBlock s = {
      aa * cosine + cc * sine, bb * cosine + dd * sine, cc * cosine - aa * sine, dd * cosine - bb * sine, cosine, sine};
  const float middle = 0.5f * (s.a + s.d);
  s.a = s.d = middle;
  if (s.c == 0.0f) return s;
  if (s.b == 0.0f) return {middle, -s.c, 0.0f, middle, -sine, cosine};
  if ((s.b < 0.0f) != (s.c < 0.0f)) return s;
  // The eigenvalues are real after all, and nearly equal.
  const float root_b = metal::precise::sqrt(metal::abs(s.b)), root_c = metal::precise::sqrt(metal::abs(s.c));
  const float p = metal::copysign(root_b * root_c, s.c);
  const float tau = metal::precise::rsqrt(metal::abs(s.b + s.c));
  const float c1 = root_b * tau, s1 = root_c * tau;
  return {middle + p, s.b - s.c, 0.0f, middle - p, cosine * c1 - sine * s1, cosine * s1 + sine * c1};
}

// The two shifts: real ones, or a pair.
struct Shifts {
  float first, second, imaginary;
};

inline Shifts shifts_of(float a, float b, float c, float d) {
  const float size = metal::abs(a) + metal::abs(b) + metal::abs(c) + metal::abs(d);
  if (size == 0.0f) return {0.0f, 0.0f, 0.0f};
  a /= size, b /= size, c /= size, d /= size;
  const float middle = 0.5f * (a + d);
  const float determinant = (a - middle) * (d - middle) - b * c;
  const float root = metal::precise::sqrt(metal::abs(determinant));
  if (determinant >= 0.0f) return {middle * size, middle * size, root * size};
  // Both are the real one that is nearer to d.
  const float nearer = metal::abs(middle + root - d) <= metal::abs(middle - root - d) ? middle + root : middle - root;
  return {nearer * size, nearer * size, 0.0f};
}

template <typename Rows>
inline Shifts choose_shifts(Rows h, uint stride, uint lo, uint hi, uint tries) {
  if (tries % 10 != 0) {
    const Rows above = h + (hi - 1) * stride, last = h + hi * stride;
    return shifts_of(above[hi - 1], above[hi], last[hi - 1], last[hi]);
  }
  // Every tenth sweep has shifts that no cycle repeats, by turns of the first and of the last rows.
  const bool at_top = tries % 20 == 10;
  const uint row = at_top ? lo : hi, at = at_top ? lo + 1 : hi;
  const float s = metal::abs(h[at * stride + at - 1]) +
                  (at_top ? metal::abs(h[(lo + 2) * stride + lo + 1]) : metal::abs(h[(hi - 1) * stride + hi - 2]));
  const float diagonal = 0.75f * s + h[row * stride + row];
  return shifts_of(diagonal, -0.4375f * s, s, diagonal);
}

// A multiple of the first column of (h - first) (h - second), for the rows from m on.
template <typename Rows>
inline float3 first_column(Rows h, uint stride, uint m, thread const Shifts& shifts) {
  const Rows row = h + m * stride + m, next = row + stride, third = next + stride;
  const float s = metal::abs(row[0] - shifts.second) + metal::abs(shifts.imaginary) + metal::abs(next[0]);
  const float below = next[0] / s;
  const float3 v = float3(
      metal::fma(below, row[1],
                 (row[0] - shifts.first) * ((row[0] - shifts.second) / s) + shifts.imaginary * (shifts.imaginary / s)),
      below * (row[0] + next[1] - shifts.first - shifts.second), below * third[1]);
  const float size = metal::abs(v.x) + metal::abs(v.y) + metal::abs(v.z);
  return size > 0.0f ? v / size : float3(1.0f, 0.0f, 0.0f);
}

// Whether a sweep may begin at row m: the entry before it and the bulge's are small together.
template <typename Rows>
inline bool may_begin(Rows h, uint stride, uint m, thread const Shifts& shifts) {
  const float3 v = first_column(h, stride, m, shifts);
  const float sum =
      metal::abs(h[(m - 1) * stride + m - 1]) + metal::abs(h[m * stride + m]) + metal::abs(h[(m + 1) * stride + m + 1]);
  return metal::abs(h[m * stride + m - 1]) * (metal::abs(v.y) + metal::abs(v.z)) <= FLT_EPSILON * metal::abs(v.x) * sum;
}

// The reflector I - tau (1, y, z) (1, y, z)ᵀ that makes v a multiple of e₁.
struct SmallReflector {
  float tau, y, z, beta;
};
inline SmallReflector small_reflector(float3 v) {
  const float largest = metal::max(metal::abs(v.y), metal::abs(v.z));
  const float scale = scale_to_one(metal::max(largest, metal::abs(v.x)));
  const float y = v.y * scale, z = v.z * scale;
  const Reflector r = make_reflector(v.x, largest, metal::fma(y, y, z * z), scale);
  return {r.tau, y * r.inverse, z * r.inverse, r.beta};
}

// Applies it to three entries, of which the third is not there if `of_two`.
template <typename Entries>
inline void reflect_three(Entries x, uint step, bool of_two, thread const SmallReflector& r) {
  const float third = of_two ? 0.0f : x[2 * step];
  const float sum = r.tau * (x[0] + metal::fma(r.y, x[step], r.z * third));
  x[0] -= sum;
  x[step] = metal::fma(-sum, r.y, x[step]);
  if (!of_two) x[2 * step] = metal::fma(-sum, r.z, third);
}

// Applies the reflectors m to hi - 1 of a sweep to one row or column, whose entries m to hi are `step` apart. Two
// entries go from each reflector to the next.
template <typename Entries>
inline void reflect_along(Entries x, uint step, uint m, uint hi, threadgroup const float4* reflectors) {
  float first = x[m * step], second = x[(m + 1) * step];
  for (uint k = m; k < hi; ++k) {
    const float4 r = reflectors[k];
    const float third = k + 2 <= hi ? x[(k + 2) * step] : 0.0f;
    const float sum = r.x * (first + metal::fma(r.y, second, r.z * third));
    x[k * step] = first - sum;
    first = metal::fma(-sum, r.y, second);
    second = metal::fma(-sum, r.z, third);
  }
  x[hi * step] = first;
}

template <typename Entries>
inline void rotate_two(Entries x, uint step, thread const StandardBlock& r) {
  const float first = x[0], second = x[step];
  x[0] = r.cosine * first + r.sine * second;
  x[step] = r.cosine * second - r.sine * first;
}

// Makes h its Schur form, all of it if `WHOLE`, or else only its diagonal blocks. With WHOLE, Z becomes Z times the
// reflectors. Returns whether all eigenvalues were found.
template <bool WHOLE, typename Threads, typename Rows>
inline bool reduce_to_schur(Rows h, uint stride, uint n, device float* z, threadgroup float4* reflectors,
                            thread Threads& team) {
  uint end = n;  // of the rows that are not yet reduced
  uint tries = 0;
  for (uint step = 0; step < 40 * n && end > 0; ++step) {
    const uint hi = end - 1;
    float found = 0.0f;
    for (uint k = 1 + team.index; k <= hi; k += Threads::kThreads)
      if (is_negligible(h, stride, n, k)) found = metal::max(found, float(k));
    const uint lo = uint(team.max(found));
    const bool sweeps = lo + 2 <= hi, is_pair = lo + 1 == hi;
    tries = sweeps ? tries + 1 : 0;
    StandardBlock block = {0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f};
    if (is_pair)
      block = standard_block(h[lo * stride + lo], h[lo * stride + hi], h[hi * stride + lo], h[hi * stride + hi]);
    Shifts shifts = {0.0f, 0.0f, 0.0f};
    float begin = float(lo);
    if (sweeps) {
      shifts = choose_shifts(h, stride, lo, hi, tries);
      for (uint m = lo + 1 + team.index; m + 2 <= hi; m += Threads::kThreads)
        if (may_begin(h, stride, m, shifts)) begin = float(m);
    }
    const uint m = uint(team.max(begin));
    const float3 column = sweeps ? first_column(h, stride, m, shifts) : float3(0.0f);
    team.wait();
    if (team.index == 0 && lo > 0) h[lo * stride + lo - 1] = 0.0f;
    if (is_pair) {
      if (team.index == 0) {
        h[lo * stride + lo] = block.a, h[lo * stride + hi] = block.b;
        h[hi * stride + lo] = block.c, h[hi * stride + hi] = block.d;
      }
      if (WHOLE) {
        for (uint j = hi + 1 + team.index; j < n; j += Threads::kThreads)
          rotate_two(h + lo * stride + j, stride, block);
        for (uint i = team.index; i < lo; i += Threads::kThreads) rotate_two(h + i * stride + lo, 1, block);
        for (uint i = team.index; i < n; i += Threads::kThreads) rotate_two(z + lo * n + i, n, block);
      }
    }
    team.wait();
    const uint last = sweeps ? hi : m;
    for (uint k = m; k < last; ++k) {
      const bool of_two = k + 1 == hi;
      Rows before = h + k * stride + k - (k > 0 ? 1 : 0);  // the column before the bulge
      const float3 v = k == m ? column : float3(before[0], before[stride], of_two ? 0.0f : before[2 * stride]);
      const SmallReflector r = small_reflector(v);
      for (uint j = k + team.index; j <= hi; j += Threads::kThreads)
        reflect_three(h + k * stride + j, stride, of_two, r);
      team.wait();
      if (team.index == 0) {
        if (k > m) {
          before[0] = r.beta;
          before[stride] = 0.0f;
          if (!of_two) before[2 * stride] = 0.0f;
        } else if (m > lo) {
          before[0] *= 1.0f - r.tau;
        }
        if (WHOLE) reflectors[k] = float4(r.tau, r.y, r.z, 0.0f);
      }
      const uint rows = metal::min(k + 3, hi);
      for (uint i = lo + team.index; i <= rows; i += Threads::kThreads) reflect_three(h + i * stride + k, 1, of_two, r);
      team.wait();
    }
    if (WHOLE && sweeps) {
      for (uint j = hi + 1 + team.index; j < n; j += Threads::kThreads) reflect_along(h + j, stride, m, hi, reflectors);
      for (uint i = team.index; i < lo; i += Threads::kThreads) reflect_along(h + i * stride, 1, m, hi, reflectors);
      for (uint i = team.index; i < n; i += Threads::kThreads) reflect_along(z + i, n, m, hi, reflectors);
    }
    if (!sweeps) end = lo;
    team.wait();
  }
  return end == 0;
}
