// The two shifts of a QR sweep over a real Hessenberg matrix h (Francis 1961), and the bulge of three rows that they
// make; and the 2 x 2 blocks of the real Schur form. Tests and exceptional shifts are those of LAPACK's lahqr.
#pragma once

#include <metal_stdlib>

#include "scalars.h"

// The rotation that brings a block [a b; c d] to standard form, and that form.
struct StandardBlock {
  float a, b, c, d, cosine, sine;
};

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

template <typename Entries>
inline void rotate_two(Entries x, uint step, thread const StandardBlock& r) {
  const float first = x[0], second = x[step];
  x[0] = r.cosine * first + r.sine * second;
  x[step] = r.cosine * second - r.sine * first;
}

// The reflector I - tau (1, y, z) (1, y, z)ᵀ that makes v a multiple of e₁.
struct RealBulge {
  float tau, y, z, beta;
};

// A real bulge for the driver in sweeps.h.
struct DoubleShift {
  typedef Shifts Shift;
  typedef float3 Column;
  typedef RealBulge Reflector;
  typedef StandardBlock Block;
  static constexpr constant uint kRows = 3;
  static constexpr constant bool kPairs = true;

  template <typename Rows>
  static inline Shifts choose(Rows h, uint stride, uint lo, uint hi, uint tries) {
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
  static inline float3 first_column(Rows h, uint stride, uint m, thread const Shifts& shifts) {
    const Rows row = h + m * stride + m, next = row + stride, third = next + stride;
    const float s = metal::abs(row[0] - shifts.second) + metal::abs(shifts.imaginary) + metal::abs(next[0]);
    const float below = next[0] / s;
    const float3 v = float3(metal::fma(below, row[1],
                                       (row[0] - shifts.first) * ((row[0] - shifts.second) / s) +
                                           shifts.imaginary * (shifts.imaginary / s)),
                            below * (row[0] + next[1] - shifts.first - shifts.second), below * third[1]);
    const float size = metal::abs(v.x) + metal::abs(v.y) + metal::abs(v.z);
    return size > 0.0f ? v / size : float3(1.0f, 0.0f, 0.0f);
  }

  // Whether a sweep may begin at row m: the entry before it and the bulge's are small together.
  template <typename Rows>
  static inline bool may_begin(Rows h, uint stride, uint m, thread const Shifts& shifts) {
    const float3 v = first_column(h, stride, m, shifts);
    const float sum = metal::abs(h[(m - 1) * stride + m - 1]) + metal::abs(h[m * stride + m]) +
                      metal::abs(h[(m + 1) * stride + m + 1]);
    return metal::abs(h[m * stride + m - 1]) * (metal::abs(v.y) + metal::abs(v.z)) <=
           FLT_EPSILON * metal::abs(v.x) * sum;
  }

  static inline Reflector reflector_of(float3 v) {
    const float largest = metal::max(metal::abs(v.y), metal::abs(v.z));
    const float scale = scale_to_one(metal::max(largest, metal::abs(v.x)));
    const float y = v.y * scale, z = v.z * scale;
    const ::Reflector r = make_reflector(v.x, largest, metal::fma(y, y, z * z), scale);
    return {r.tau, y * r.inverse, z * r.inverse, r.beta};
  }

  // Applies it to three entries, of which the third is not there if `of_two`.
  template <typename Entries>
  static inline void reflect(Entries x, uint step, bool of_two, thread const Reflector& r) {
    const float third = of_two ? 0.0f : x[2 * step];
    const float sum = r.tau * (x[0] + metal::fma(r.y, x[step], r.z * third));
    x[0] -= sum;
    x[step] = metal::fma(-sum, r.y, x[step]);
    if (!of_two) x[2 * step] = metal::fma(-sum, r.z, third);
  }

  // The first entries of a row or column that reflectors have changed and later ones change again.
  struct Window {
    float first, second;
  };
  template <typename Entries>
  static inline Window window(Entries x, uint step) {
    return {x[0], x[step]};
  }
  // Applies a reflector to the window and the entry after it. The first entry is done, and is the result.
  template <bool COLUMN>
  static inline float advance(thread Window& x, float third, float4 r) {
    const float sum = r.x * (x.first + metal::fma(r.y, x.second, r.z * third)), done = x.first - sum;
    x = {metal::fma(-sum, r.y, x.second), metal::fma(-sum, r.z, third)};
    return done;
  }

  template <typename Entries>
  static inline float3 column(Entries x, uint step, bool of_two) {
    return float3(x[0], x[step], of_two ? 0.0f : x[2 * step]);
  }

  static inline float4 packed(thread const Reflector& r) { return float4(r.tau, r.y, r.z, 0.0f); }

  template <typename Rows>
  static inline Block block(Rows h, uint stride, uint lo, uint hi) {
    return standard_block(h[lo * stride + lo], h[lo * stride + hi], h[hi * stride + lo], h[hi * stride + hi]);
  }

  // Brings rows lo and lo + 1 of h to standard form.
  template <bool WHOLE, typename Threads, typename Rows>
  static inline void split(Rows h, uint stride, uint n, uint lo, device float* z, thread const Block& to,
                           thread const Threads& team) {
    const uint hi = lo + 1;
    if (team.index == 0) {
      h[lo * stride + lo] = to.a, h[lo * stride + hi] = to.b;
      h[hi * stride + lo] = to.c, h[hi * stride + hi] = to.d;
    }
    if (!WHOLE) return;
    for (uint j = hi + 1 + team.index; j < n; j += Threads::kThreads) rotate_two(h + lo * stride + j, stride, to);
    for (uint i = team.index; i < lo; i += Threads::kThreads) rotate_two(h + i * stride + lo, 1, to);
    for (uint i = team.index; i < n; i += Threads::kThreads) rotate_two(z + lo * n + i, n, to);
  }
};
