// How kernels read weights of 2 to 8 bits in groups, as one of the readers of formats.h. Its rows are counted in
// slices.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "affine.h"
#include "formats.h"
#include "quant.h"

// What slices of so many bits are whole words of.
template <uint bits>
struct AffineWord {
  typedef uint Word;
};
template <>
struct AffineWord<2> {
  typedef uint2 Word;
};
template <>
struct AffineWord<4> {
  typedef uint4 Word;
};
template <>
struct AffineWord<6> {
  typedef uint2 Word;
};
template <>
struct AffineWord<8> {
  typedef uint4 Word;
};

constexpr constant uint kSigned = 16;  // in Packed's `more`, behind the dtype and the kind of offsets

// Scales and offsets of groups. Both pointers to the scales, and all three to the offsets, are to the same memory.
struct Affine {
  device const float* scales;
  device const ushort* half_scales;
  device const float* offsets;
  device const ushort* half_offsets;
  device const uchar* zeros;

  // Loads what a slice's scale and offset are made of, each width into words of its own. decode() makes the numbers: a
  // load whose result is used in a branch, or goes where another one's may go, lets the next rows' loads wait.
  void load(thread Packed& packed, ulong slice, AffineParams p) const {
    const ulong group = slice >> p.shift;
    const bool wide = p.dtype == QUANT_FLOAT, zero_points = p.zeros != AFFINE_OFFSETS;
    packed.head = uint4(0);
    packed.more = uint2(0, p.dtype | p.zeros << 2 | (p.is_signed ? kSigned : 0u));
    if (wide) packed.head.x = as_type<uint>(scales[group]);
    if (!wide) packed.head.y = half_scales[group];
    if (!zero_points && wide) packed.head.z = as_type<uint>(offsets[group]);
    if (!zero_points && !wide) packed.head.w = half_offsets[group];
    if (zero_points) packed.more.x = zeros[group];
  }
  static float number(uint bits, uint half_bits, uint dtype) {
    const float of_half = half_of(half_bits);
    return as_type<float>(dtype == QUANT_FLOAT ? bits : dtype == QUANT_HALF ? as_type<uint>(of_half) : half_bits << 16);
  }
  // The scale and the offset, of integers that are larger by `bias`.
  static float2 numbers(Packed packed, float bias) {
    const uint dtype = packed.more.y & 3u, kind = packed.more.y >> 2 & 3u;
    const float scale = number(packed.head.x, packed.head.y, dtype);
    const int zero = kind == AFFINE_ZEROS ? int(packed.more.x) : int(packed.more.x << 24) >> 24;
    const float point = -scale * (bias + static_cast<float>(zero));
    const float offset = fma(-bias, scale, number(packed.head.z, packed.head.w, dtype));
    return float2(scale, kind == AFFINE_OFFSETS ? offset : point);
  }
};

// Rows of packed weights, which lie one after the other, with their groups.
template <uint bits>
struct AffineRows {
  typedef typename AffineWord<bits>::Word Word;
  device const Word* words;
  Affine groups;
  AffineParams params;
  ulong at;  // slice

  AffineRows plus(ulong slices) const { return {words, groups, params, at + slices}; }
  Packed load() const {
    device const Word* const from = words + at * (4 * bits / sizeof(Word));
    Packed packed;
    packed.low = packed.high = uint4(0);
    if constexpr (bits % 4 == 0) {
      packed.low = from[0];
      if constexpr (bits == 8) packed.high = from[1];
    } else if constexpr (bits % 2 == 0) {
      packed.low.xy = from[0];
      if constexpr (bits == 6) {
        packed.low.zw = from[1];
        packed.high.xy = from[2];
      }
    } else {
#pragma unroll
      for (uint i = 0; i < bits; ++i) {
        if (i < 4) packed.low[i] = from[i];
        if (i >= 4) packed.high[i - 4] = from[i];
      }
    }
    groups.load(packed, at, params);
    return packed;
  }
};
template <uint bits>
inline AffineRows<bits> place(AffineRows<bits> rows, ulong slices) {
  return rows.plus(slices);
}

template <uint of_bits>
struct AffineFormat : Block32 {
  typedef AffineRows<of_bits> Rows;
  typedef typename Rows::Word Word;
  static constexpr constant uint number = 0, bytes = 1, bits = of_bits, mask = (1u << bits) - 1;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  static Packed load(Rows at, uint) { return at.load(); }
  static uint word(Packed p, uint i) { return i < 4 ? p.low[i] : p.high[i - 4]; }
  static uint field(Packed p, uint k) {
    const uint from = k * bits, shift = from % 32;
    uint value = word(p, from / 32) >> shift;
    if (shift + bits > 32) value |= word(p, from / 32 + 1) << (32 - shift);
    return value & mask;
  }
  static Slice decode(Packed p, uint) {
    Slice slice;
    float above = 0.0f;              // by how much integers are larger than signed ones
    if constexpr (16 % bits == 0) {  // the halves of a word have as many weights
      constexpr uint apart_in_word = 16 / bits;
      const bool is_signed = p.more.y & kSigned;
      const uint flips = is_signed ? ~0u / mask << (bits - 1) : 0;
      above = is_signed ? static_cast<float>(1u << (bits - 1)) : 0.0f;
      p.low ^= flips;
      p.high ^= flips;
#pragma unroll
      for (uint i = 0; i < 16; ++i) {
        const uint k = i / apart_in_word * 2 * apart_in_word + i % apart_in_word, next = k + apart_in_word;
        const float2 q = two((word(p, i / apart_in_word) >> (i % apart_in_word * bits)) & (mask * 0x00010001u));
        slice.q[k / 4][k % 4] = q.x;
        slice.q[next / 4][next % 4] = q.y;
      }
    } else {
#pragma unroll
      for (uint k = 0; k < 32; k += 2) {
        const float2 q = two(field(p, k) | field(p, k + 1) << 16);
        slice.q[k / 4][k % 4] = q.x;
        slice.q[k / 4][k % 4 + 1] = q.y;
      }
    }
    const float2 numbers = Affine::numbers(p, above);
    slice.scale = float2(numbers.x);
    slice.offset = float2(numbers.y);
    return slice;
  }
};

typedef AffineFormat<2> Affine2;
typedef AffineFormat<3> Affine3;
typedef AffineFormat<4> Affine4;
typedef AffineFormat<5> Affine5;
typedef AffineFormat<6> Affine6;
typedef AffineFormat<8> Affine8;

// Calls FOR(format) for every number of bits.
#define FOR_AFFINE(FOR) FOR(Affine2) FOR(Affine3) FOR(Affine4) FOR(Affine5) FOR(Affine6) FOR(Affine8)

// The buffers and bytes of packed weights, from buffer 0 on, and the arguments that a kernel makes of them.
#define AFFINE_ARGUMENTS(F)                                                                      \
  device const typename F::Word *packed [[buffer(0)]], device const float *scales [[buffer(1)]], \
      device const ushort *half_scales [[buffer(2)]], device const float *offsets [[buffer(3)]], \
      device const ushort *half_offsets [[buffer(4)]], device const uchar *zeros [[buffer(5)]],  \
      constant AffineParams &affine [[buffer(6)]]
#define AFFINE_TYPES(F)                                                                           \
  device const typename F::Word*, device const float*, device const ushort*, device const float*, \
      device const ushort*, device const uchar*, constant AffineParams&
