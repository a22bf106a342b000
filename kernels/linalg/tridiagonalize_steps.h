// Steps of the reduction to tridiagonal form.
#pragma once

#include <metal_stdlib>

#include "fours.h"

// The sum of value[lane / (2 BIT / COUNT)] over 2 BIT lanes. A step halves the values of a lane.
template <uint COUNT, uint BIT = 16>
struct SharedSum {
  static float of(thread const float (&value)[COUNT], uint lane) {
    const bool upper = (lane & BIT) != 0;
    float sums[COUNT / 2];
#pragma unroll
    for (uint i = 0; i < COUNT / 2; ++i) {
      const float first = value[i], second = value[i + COUNT / 2];
      sums[i] = (upper ? second : first) + metal::simd_shuffle_xor(upper ? first : second, ushort(BIT));
    }
    return SharedSum<COUNT / 2, BIT / 2>::of(sums, lane);
  }
};
template <uint BIT>
struct SharedSum<1, BIT> {
  static float of(thread const float (&value)[1], uint) {
    float sum = value[0];
#pragma unroll
    for (uint bit = BIT; bit > 0; bit /= 2) sum += metal::simd_shuffle_xor(sum, ushort(bit));
    return sum;
  }
};

inline float4 entries_between(float4 value, uint column, uint begin, uint end) {
  const uint4 columns = column + uint4(0, 1, 2, 3);
  return metal::select(float4(0.0f), value, columns >= begin && columns < end);
}

// The reflector of a column (alpha, rest), given the sum of the rest's squares, and that of the squares times
// kTinyScale². The matrix's largest entry is about one, so that only small squares leave the range. A rest whose
// entries may be subnormal numbers counts as zeros.
constant constexpr float kTinyScale = 0x1p64f;
inline Reflector reflector_of(float alpha, float2 squares, thread float& scale) {
  const bool tiny = metal::fma(alpha, alpha, squares.x) < 0x1p-60f;
  scale = tiny ? kTinyScale : 1.0f;
  const float scaled = !tiny ? squares.x : squares.y < 0x1p-92f ? 0.0f : squares.y;
  return make_reflector(alpha, scaled, scaled, scale);
}

// The phase of a value with this magnitude. Zero has the phase 1.
inline float2 phase_of(float2 value, float size) { return size > 0.0f ? value / size : float2(1.0f, 0.0f); }

// The one of complex columns, which keeps alpha's phase so that tau is real.
struct HermitianReflector {
  float2 beta;
  float tau;
  float2 inverse;
};
inline HermitianReflector reflector_of(float2 alpha, float2 squares, thread float& scale) {
  const bool tiny = add_square(squares.x, alpha) < 0x1p-60f;
  scale = tiny ? kTinyScale : 1.0f;
  const float scaled = !tiny ? squares.x : squares.y < 0x1p-92f ? 0.0f : squares.y;
  if (scaled == 0.0f) return {alpha, 0.0f, float2(0.0f)};
  const float2 a = alpha * scale;
  const float size = metal::precise::sqrt(metal::fma(a.x, a.x, a.y * a.y));
  const float2 phase = phase_of(a, size);
  const float length = metal::precise::sqrt(metal::fma(size, size, scaled)), sum = size + length;
  return {phase * (-length * inverse_of_scale(scale)), sum / length, conjugate(phase) / sum};
}

// i v, for complex numbers.
inline float4 turned(float4 v) { return v; }
inline Complex4 turned(Complex4 v) { return {-v.im, v.re}; }

// A number as its parts.
inline void set_parts(thread float* to, float value) { to[0] = value; }
inline void set_parts(thread float* to, float2 value) {
  to[0] = value.x;
  to[1] = value.y;
}
