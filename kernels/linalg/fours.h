// Four neighbouring entries of a row or a column, real (float4) or complex, under one name: FourOf<T>::Type for entries
// of type T, float or float2. Kernels that are templates of T share their code by these functions. An index in
// registers must be a constant.
#pragma once

#include <metal_stdlib>

#include "scalars.h"

struct Complex4 {
  float4 re, im;
};

template <typename T>
struct FourOf;
template <>
struct FourOf<float> {
  static constexpr constant uint kParts = 1;  // floats of an entry
  typedef float4 Type;
};
template <>
struct FourOf<float2> {
  static constexpr constant uint kParts = 2;
  typedef Complex4 Type;
};

inline float real_part(float a) { return a; }
inline float real_part(float2 a) { return a.x; }

// All four entries are the number.
inline float4 four_of(float a) { return float4(a); }
inline Complex4 four_of(float2 a) { return {float4(a.x), float4(a.y)}; }

// Entry e.
inline float entry(float4 v, uint e) { return v[e]; }
inline float2 entry(Complex4 v, uint e) { return float2(v.re[e], v.im[e]); }
inline void set_entry(thread float4& v, uint e, float value) { v[e] = value; }
inline void set_entry(thread Complex4& v, uint e, float2 value) {
  v.re[e] = value.x;
  v.im[e] = value.y;
}

// Entry e, which need not be a constant. It would force the registers into memory.
inline float component(float4 v, uint i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }
inline float2 component(Complex4 v, uint i) { return float2(component(v.re, i), component(v.im, i)); }

// Entry i of consecutive fours in threadgroup memory.
inline float taken(threadgroup const float4* v, uint i) { return ((threadgroup const float*)v)[i]; }
inline float2 taken(threadgroup const Complex4* v, uint i) {
  threadgroup const float* const at = (threadgroup const float*)v + i / 4 * 8 + i % 4;
  return float2(at[0], at[4]);
}
inline void put(threadgroup float4* v, uint i, float value) { ((threadgroup float*)v)[i] = value; }
inline void put(threadgroup Complex4* v, uint i, float2 value) {
  threadgroup float* const at = (threadgroup float*)v + i / 4 * 8 + i % 4;
  at[0] = value.x;
  at[4] = value.y;
}

// Four consecutive numbers in aligned device memory.
inline float4 four_at(device const float* from) { return *(device const float4*)from; }
inline Complex4 four_at(device const float2* from) {
  const float4 a = *(device const float4*)from, b = *(device const float4*)(from + 2);
  return {float4(a.x, a.z, b.x, b.z), float4(a.y, a.w, b.y, b.w)};
}
inline void set_four_at(device float* to, float4 v) { *(device float4*)to = v; }
inline void set_four_at(device float2* to, Complex4 v) {
  *(device float4*)to = float4(v.re.x, v.im.x, v.re.y, v.im.y);
  *(device float4*)(to + 2) = float4(v.re.z, v.im.z, v.re.w, v.im.w);
}

// b where the condition holds, and else a.
inline float4 choose(float4 a, float4 b, bool4 condition) { return metal::select(a, b, condition); }
inline Complex4 choose(Complex4 a, Complex4 b, bool4 condition) {
  return {metal::select(a.re, b.re, condition), metal::select(a.im, b.im, condition)};
}

inline float4 scaled_by(float4 v, float a) { return v * a; }
inline Complex4 scaled_by(Complex4 v, float a) { return {v.re * a, v.im * a}; }

inline float4 times(float4 v, float a) { return v * a; }
inline Complex4 times(Complex4 v, float2 a) {
  return {metal::fma(v.re, float4(a.x), -v.im * a.y), metal::fma(v.re, float4(a.y), v.im * a.x)};
}

// x - a v
inline float4 minus_product(float4 x, float a, float4 v) { return metal::fma(float4(-a), v, x); }
inline Complex4 minus_product(Complex4 x, float2 a, Complex4 v) {
  return {metal::fma(float4(-a.x), v.re, metal::fma(float4(a.y), v.im, x.re)),
          metal::fma(float4(-a.x), v.im, metal::fma(float4(-a.y), v.re, x.im))};
}

// Bits of the entries' magnitudes, which compare as the numbers do, with NaN above infinity.
inline uint4 bits_of(float4 v) { return as_type<uint4>(metal::abs(v)); }
inline uint4 bits_of(Complex4 v) { return metal::max(bits_of(v.re), bits_of(v.im)); }

// The entries' magnitudes, or for complex numbers ones that are up to √2 times as large.
inline float4 lengths_of(float4 v) { return metal::abs(v); }
inline float4 lengths_of(Complex4 v) { return metal::abs(v.re) + metal::abs(v.im); }

inline float4 moved(float4 v, ushort distance) { return metal::simd_shuffle_xor(v, distance); }
inline Complex4 moved(Complex4 v, ushort distance) { return {moved(v.re, distance), moved(v.im, distance)}; }

// The entries' magnitudes, or for complex numbers the larger ones of their parts' magnitudes.
inline float4 sizes_of(float4 v) { return metal::abs(v); }
inline float4 sizes_of(Complex4 v) { return metal::max(metal::abs(v.re), metal::abs(v.im)); }

// The squares of the entries' magnitudes, and sums with them.
inline float4 squares_of(float4 v) { return v * v; }
inline float4 squares_of(Complex4 v) { return metal::fma(v.re, v.re, v.im * v.im); }
inline float4 add_squares(float4 sum, float4 v) { return metal::fma(v, v, sum); }
inline float4 add_squares(float4 sum, Complex4 v) { return metal::fma(v.re, v.re, metal::fma(v.im, v.im, sum)); }

// The products of b's entries with the conjugates of a's.
inline float4 products_of(float4 a, float4 b) { return a * b; }
inline Complex4 products_of(Complex4 a, Complex4 b) {
  return {metal::fma(a.re, b.re, a.im * b.im), metal::fma(a.re, b.im, -a.im * b.re)};
}
// Adds such products to a sum. A sum that came and went by value would take eight more registers in qr_simd_64x32.
inline void add_products(thread float4& sum, float4 a, float4 b) { sum = metal::fma(a, b, sum); }
inline void add_products(thread Complex4& sum, Complex4 a, Complex4 b) {
  sum = {metal::fma(a.re, b.re, metal::fma(a.im, b.im, sum.re)),
         metal::fma(a.re, b.im, metal::fma(-a.im, b.re, sum.im))};
}
