// The shift of a QR sweep over a complex Hessenberg matrix h, and the bulge of two rows that it makes, as LAPACK's
// clahqr has them. The functions are those of DoubleShift.
#pragma once

#include <metal_stdlib>

#include "scalars.h"

// The reflector I - tau (1, y) (1, y)ᴴ.
struct ComplexBulge {
  float2 tau, y, beta;
};

struct SingleShift {
  typedef float2 Shift;
  typedef float4 Column;
  typedef ComplexBulge Reflector;
  struct Block {};
  static constexpr constant uint kRows = 2;
  static constexpr constant bool kPairs = false;

  // The eigenvalue of the last two rows that is nearer to the last entry, or for every tenth sweep one that no cycle
  // repeats.
  template <typename Rows>
  static inline float2 choose(Rows h, uint stride, uint lo, uint hi, uint tries) {
    if (tries % 10 == 0) {
      const bool at_top = tries % 20 == 10;
      const uint row = at_top ? lo : hi, at = at_top ? lo + 1 : hi;
      return h[row * stride + row] + float2(0.75f * length_of(h[at * stride + at - 1]), 0.0f);
    }
    const float2 last = h[hi * stride + hi], above = h[(hi - 1) * stride + hi], below = h[hi * stride + hi - 1];
    const float2 half_apart = 0.5f * (h[(hi - 1) * stride + hi - 1] - last);
    const float s =
        metal::max(size_of(half_apart), metal::precise::sqrt(size_of(above)) * metal::precise::sqrt(size_of(below)));
    if (s == 0.0f) return last;
    const float2 x = half_apart / s;
    float2 root = square_root(times(x, x) + times(above / s, below / s));
    if (metal::dot(x, root) < 0.0f) root = -root;
    return last - times(quotient(above, (x + root) * s), below);
  }

  template <typename Rows>
  static inline float4 first_column(Rows h, uint stride, uint m, float2 shift) {
    const float2 v = h[m * stride + m] - shift, below = h[(m + 1) * stride + m];
    const float size = length_of(v) + length_of(below);
    return size > 0.0f ? float4(v, below) / size : float4(1.0f, 0.0f, 0.0f, 0.0f);
  }

  template <typename Rows>
  static inline bool may_begin(Rows h, uint stride, uint m, float2 shift) {
    const float4 v = first_column(h, stride, m, shift);
    const float sum = length_of(h[m * stride + m]) + length_of(h[(m + 1) * stride + m + 1]);
    return length_of(h[m * stride + m - 1]) * length_of(v.zw) <= FLT_EPSILON * length_of(v.xy) * sum;
  }

  static inline Reflector reflector_of(float4 v) {
    const float largest = size_of(v.zw), scale = scale_to_one(metal::max(largest, size_of(v.xy)));
    const float2 y = v.zw * scale;
    const ComplexReflector r = make_reflector(v.xy, largest, add_square(0.0f, y), scale);
    return {r.tau, times(y, r.inverse), r.beta};
  }
  static inline float4 packed(thread const Reflector& r) { return float4(r.tau, r.y); }

  template <typename Entries>
  static inline float4 column(Entries x, uint step, bool) {
    return float4(x[0], x[step]);
  }

  template <typename Entries>
  static inline void reflect(Entries x, uint step, bool, thread const Reflector& r) {
    const float2 sum = times(r.tau, add_product(x[0], r.y, x[step]));
    x[0] -= sum;
    x[step] = add_product(x[step], -sum, conjugate(r.y));
  }

  struct Window {
    float2 first;
  };
  template <typename Entries>
  static inline Window window(Entries x, uint) {
    return {x[0]};
  }
  template <bool COLUMN>
  static inline float2 advance(thread Window& x, float2 second, float4 r) {
    const float2 tau = COLUMN ? conjugate(r.xy) : r.xy, y = COLUMN ? conjugate(r.zw) : r.zw;
    const float2 sum = times(tau, add_product(x.first, y, second)), done = x.first - sum;
    x.first = add_product(second, -sum, conjugate(y));
    return done;
  }

  template <typename Rows>
  static inline Block block(Rows, uint, uint, uint) {
    return {};
  }
  template <bool WHOLE, typename Threads, typename Rows>
  static inline void split(Rows, uint, uint, uint, device float2*, thread const Block&, thread const Threads&) {}
};

inline ComplexBulge conjugate(thread const ComplexBulge& r) { return {conjugate(r.tau), conjugate(r.y), r.beta}; }
