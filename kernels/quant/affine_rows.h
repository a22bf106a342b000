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

// Scales and offsets of groups. Both pointers to the scales, and all three to the offsets, are to the same memory.
struct Affine {
  device const float* scales;
  device const ushort* half_scales;
  device const float* offsets;
  device const ushort* half_offsets;
  device const uchar* zeros;

  static float of(device const float* numbers, device const ushort* halves, ulong group, uint dtype) {
    if (dtype == QUANT_FLOAT) return numbers[group];
    const uint bits = halves[group];
    return dtype == QUANT_HALF ? half_of(bits) : as_type<float>(bits << 16);
  }
  // The bits of a slice's scale and offset.
  uint4 head(ulong slice, AffineParams p) const {
    const ulong group = slice >> p.shift;
    const float scale = of(scales, half_scales, group, p.dtype);
    float offset;
    if (p.zeros == AFFINE_OFFSETS) {
      offset = fma(-p.bias, scale, of(offsets, half_offsets, group, p.dtype));
    } else {
      const uint zero = zeros[group];
      offset =
          -scale * (p.bias + static_cast<float>(p.zeros == AFFINE_ZEROS ? int(zero) : int(as_type<char>(uchar(zero)))));
    }
    return uint4(as_type<uint>(scale), as_type<uint>(offset), 0, 0);
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
    if constexpr (16 % bits == 0) {
      packed.low ^= params.flips;
      if constexpr (bits == 8) packed.high ^= params.flips;
    }
    packed.head = groups.head(at, params);
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
    if constexpr (16 % bits == 0) {  // the halves of a word have as many weights
      constexpr uint apart_in_word = 16 / bits;
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
    slice.scale = float2(as_type<float>(p.head.x));
    slice.offset = float2(as_type<float>(p.head.y));
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
