// How each type of GGML packs weights. A row consists of blocks; all types are read in slices of 32 weights, two runs
// of 16 with a scale each: weight = scale * q, or scale * q + offset. Products are exact in float32, because scale and
// q have few bits, so that every way to compute a weight gives the same number.
//
// A reader has
//   number        GGML's
//   Word          what its blocks are multiples of: memory is read as such words
//   bytes         of a block
//   slices        of a block, 8 or 1
//   apart         the distance of a slice's two runs
//   unit          how many units 1 is in the first run; `upper_unit` in the second one
//   bias          what q is less than the packed integer
//   zero          what is added to a weight: 0, so that none is -0, or -0 where some are
//   has_offset    whether weights are scale * q + offset
//   entries       of the table that q is looked up in, or 0
//   load(at, s)   the packed bytes that slice s of the block at `at` needs
//   decode(p, s)  their numbers; decode(p, s, table) where there is a table
//
// Source of the layouts: github.com/ggml-org/ggml, src/ggml-common.h.
#pragma once

#include "slices.h"

struct Block32 {
  typedef uint Word;
  static constexpr constant float unit = kUnit, upper_unit = kUnit, zero = 0.0f;
  static constexpr constant uint slices = 1, apart = 16, entries = 0;
  static uint first(uint) { return 0; }
};
struct Block256 {
  typedef uint Word;
  static constexpr constant float unit = kUnit, upper_unit = kUnit, zero = 0.0f;
  static constexpr constant uint slices = 8, apart = 32, entries = 0;
  static uint first(uint s) { return s / 2 * 64 + s % 2 * 16; }
};

struct Q4_0 : Block32 {
  static constexpr constant float upper_unit = kUpperUnit;
  static constexpr constant uint number = 2, bytes = 18;
  static constexpr constant float bias = 8.0f;
  static constexpr constant bool has_offset = false;
  static Packed load(Bytes at, uint) { return {at.quad(2), uint4(0), uint4(at.pair(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
    nibbles(slice, p.low);
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(0.0f);
    return slice;
  }
};

struct Q4_1 : Block32 {
  static constexpr constant float upper_unit = kUpperUnit;
  static constexpr constant uint number = 3, bytes = 20;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  static Packed load(Bytes at, uint) { return {at.aligned(4), uint4(0), uint4(at.tail(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
    nibbles(slice, p.low);
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(half_of(p.head.x >> 16));
    return slice;
  }
};

// The fifth bits of a block's 32 weights are in one word.
inline void nibbles_and_fifth(thread Slice& slice, uint4 low, uint fifth) {
  uint4 first, second;
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    first[i] = spread(fifth, 4 * i) << 4;
    second[i] = spread(fifth, 4 * i + 16) << 4;
  }
  nibbles(slice, low, first, second);
}

struct Q5_0 : Block32 {
  static constexpr constant uint number = 6, bytes = 22;
  static constexpr constant float bias = 16.0f;
  static constexpr constant bool has_offset = false;
  static Packed load(Bytes at, uint) { return {at.quad(6), uint4(at.pair(2) | at.pair(4) << 16), uint4(at.pair(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
    nibbles_and_fifth(slice, p.low, p.high.x);
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(0.0f);
    return slice;
  }
};

struct Q5_1 : Block32 {
  static constexpr constant uint number = 7, bytes = 24;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  static Packed load(Bytes at, uint) { return {at.aligned(8), uint4(at.tail(4)), uint4(at.tail(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
    nibbles_and_fifth(slice, p.low, p.high.x);
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(half_of(p.head.x >> 16));
    return slice;
  }
};

struct Q8_0 : Block32 {
  static constexpr constant uint number = 8, bytes = 34;
  static constexpr constant float bias = 128.0f;
  static constexpr constant bool has_offset = false;
  static Packed load(Bytes at, uint) { return {at.quad(2), at.quad(18), uint4(at.pair(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      slice.q[i] = floats(p.low[i] ^ 0x80808080u);
      slice.q[i + 4] = floats(p.high[i] ^ 0x80808080u);
    }
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(0.0f);
    return slice;
  }
};

// Two bits of 128 weights are in 32 bytes, those of a slice beside those of three others.
inline void crumbs(thread Slice& slice, uint4 low, uint shift, uint4 first, uint4 second) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    slice.q[i] = floats(((low[i] >> shift) & 0x03030303u) | first[i]);
    slice.q[i + 4] = floats(((low[i] >> (shift + 2)) & 0x03030303u) | second[i]);
  }
}

struct Q2_K : Block256 {
  static constexpr constant uint number = 10, bytes = 84;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  static Packed load(Bytes at, uint s) {
    const uint scales = s / 2 * 4 + s % 2;
    return {at.aligned(16 + s / 4 * 32 + s % 2 * 16), uint4(0),
            uint4(at.byte(scales), at.byte(scales + 2), at.tail(80), 0)};
  }
  static Slice decode(Packed p, uint s) {
    Slice slice;
    crumbs(slice, p.low, s / 2 % 2 * 4, uint4(0), uint4(0));
    slice.scale = half_of(p.head.z) * float2(p.head.xy & 0xfu);
    slice.offset = -(half_of(p.head.z >> 16) * float2(p.head.xy >> 4));
    return slice;
  }
};

struct Q3_K : Block256 {
  static constexpr constant uint number = 11, bytes = 110;
  static constexpr constant float bias = 4.0f;
  static constexpr constant bool has_offset = false;
  // The 16 scales have their lower four bits in 8 bytes and their upper two in 4.
  static uint scale(Bytes at, uint i) {
    return ((at.byte(96 + i % 8) >> (i / 8 * 4)) & 0xfu) | ((at.byte(104 + i % 4) >> (i / 4 * 2)) & 3u) << 4;
  }
  static Packed load(Bytes at, uint s) {
    const uint scales = s / 2 * 4 + s % 2;
    return {at.quad(32 + s / 4 * 32 + s % 2 * 16), at.quad(s % 2 * 16),
            uint4(scale(at, scales), scale(at, scales + 2), at.pair(108), 0)};
  }
  static Slice decode(Packed p, uint s) {
    Slice slice;
    const uint4 bit = p.high >> (s / 2 * 2);  // of the first run; the second has the next
    crumbs(slice, p.low, s / 2 % 2 * 4, (bit & 0x01010101u) << 2, ((bit >> 1) & 0x01010101u) << 2);
    slice.scale = half_of(p.head.z) * (float2(p.head.xy) - 32.0f);
    slice.offset = float2(0.0f);
    return slice;
  }
};

// The scales and the minima of a slice's two runs, of 6 bits each. `head` has both factors and then 12 bytes: the lower
// bits of the first four pairs in 8 bytes, and of the others in 4.
inline void scales_of(thread Slice& slice, uint4 head, uint s) {
  const uint shift = s / 2 % 2 * 16;
  const uint d = head.y >> shift, m = head.z >> shift, both = head.w >> shift;
  const bool lower = s < 4;
  const uint scales = lower ? d & 0x3f3fu : (both & 0x0f0fu) | ((d >> 2) & 0x3030u);
  const uint minima = lower ? m & 0x3f3fu : ((both >> 4) & 0x0f0fu) | ((m >> 2) & 0x3030u);
  slice.scale = half_of(head.x) * float2(float(scales & 0xffu), float((scales >> 8) & 0xffu));
  slice.offset = -(half_of(head.x >> 16) * float2(float(minima & 0xffu), float((minima >> 8) & 0xffu)));
}

struct Q4_K : Block256 {
  typedef uint4 Word;
  static constexpr constant float upper_unit = kUpperUnit;
  static constexpr constant uint number = 12, bytes = 144;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  template <typename P>
  static Packed load(P at, uint s) {
    return {at.aligned(16 + s * 16), uint4(0), at.aligned(0)};
  }
  static Slice decode(Packed p, uint s) {
    Slice slice;
    nibbles(slice, p.low);
    scales_of(slice, p.head, s);
    return slice;
  }
};

struct Q5_K : Block256 {
  typedef uint4 Word;
  static constexpr constant uint number = 13, bytes = 176;
  static constexpr constant float bias = 0.0f;
  static constexpr constant bool has_offset = true;
  template <typename P>
  static Packed load(P at, uint s) {
    return {at.aligned(48 + s * 16), at.aligned(16 + s % 2 * 16), at.aligned(0)};
  }
  static Slice decode(Packed p, uint s) {
    Slice slice;
    const uint4 bit = p.high >> (s / 2 * 2);  // of the first run; the second has the next
    nibbles(slice, p.low, (bit & 0x01010101u) << 4, ((bit >> 1) & 0x01010101u) << 4);
    scales_of(slice, p.head, s);
    return slice;
  }
};

struct Q6_K {
  typedef uint Word;
  static constexpr constant float unit = kUnit, upper_unit = kUnit, zero = 0.0f;
  static constexpr constant uint number = 14, bytes = 210, slices = 8, apart = 64, entries = 0;
  static constexpr constant float bias = 32.0f;
  static constexpr constant bool has_offset = false;
  static uint first(uint s) { return s / 4 * 128 + s % 4 * 16; }
  static Packed load(Bytes at, uint s) {
    const uint scales = 192 + s / 4 * 8 + s % 4;
    return {at.quad(s * 16), at.quad(128 + s / 4 * 32 + s % 2 * 16),
            uint4(at.byte(scales), at.byte(scales + 4), at.pair(208), 0)};
  }
  static Slice decode(Packed p, uint s) {
    Slice slice;
    const uint4 bits = p.high >> (s / 2 % 2 * 2);
    nibbles(slice, p.low, (bits & 0x03030303u) << 4, bits & 0x30303030u);
    slice.scale =
        half_of(p.head.z) * float2(float(as_type<char>(uchar(p.head.x))), float(as_type<char>(uchar(p.head.y))));
    slice.offset = float2(0.0f);
    return slice;
  }
};

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
constexpr constant Table kNonlinear = {0x766a5d4f3f2d1801ul, 0xf1d9c5b5a6998d81ul};
struct IQ4_NL : Block32 {
  static constexpr constant uint number = 20, bytes = 18, entries = 16;
  static constexpr constant float bias = 128.0f;
  static constexpr constant bool has_offset = false;
  static Packed load(Bytes at, uint) { return {at.quad(2), uint4(0), uint4(at.pair(0))}; }
  static Slice decode(Packed p, uint s) { return decode(p, s, kNonlinear); }
  template <typename T>
  static Slice decode(Packed p, uint, T table) {
    Slice slice;
    look_up(slice, p.low, table);
    slice.scale = float2(half_of(p.head.x));
    slice.offset = float2(0.0f);
    return slice;
  }
};

struct IQ4_XS : Block32 {
  static constexpr constant uint number = 23, bytes = 136, slices = 8, entries = 16;
  static constexpr constant float bias = 128.0f;
  static constexpr constant bool has_offset = false;
  static uint first(uint s) { return 32 * s; }
  static Packed load(Bytes at, uint s) {
    return {at.aligned(8 + s * 16), uint4(0), uint4(at.tail(0), at.byte(4 + s / 2), 0, 0)};
  }
  static Slice decode(Packed p, uint s) { return decode(p, s, kNonlinear); }
  template <typename T>
  static Slice decode(Packed p, uint s, T table) {
    Slice slice;
    look_up(slice, p.low, table);
    const uint scale = ((p.head.y >> (s % 2 * 4)) & 0xfu) | ((p.head.x >> (16 + 2 * s)) & 3u) << 4;
    slice.scale = float2(half_of(p.head.x) * (float(scale) - 32.0f));
    slice.offset = float2(0.0f);
    return slice;
  }
};

struct MXFP4 : Block32 {
  static constexpr constant uint number = 39, bytes = 17;
  static constexpr constant float bias = 0.0f;
  static constexpr constant float unit = 32768.0f, upper_unit = unit;  // of twice the numbers, as gguf-py has them
  static constexpr constant bool has_offset = false;
  static float2 two_of(uint bits) { return two_halves((bits & 0x00070007u) << 9 | (bits & 0x00080008u) << 12); }
  static Packed load(Bytes at, uint) { return {at.quad(1), uint4(0), uint4(at.byte(0))}; }
  static Slice decode(Packed p, uint) {
    Slice slice;
    // With its sign, two bits of exponent and one of mantissa, a weight is a float16 once its bits are in their places.
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      const float2 a = two_of(p.low[i]), b = two_of(p.low[i] >> 8);
      const float2 c = two_of(p.low[i] >> 4), d = two_of(p.low[i] >> 12);
      slice.q[i] = float4(a.x, b.x, a.y, b.y);
      slice.q[i + 4] = float4(c.x, d.x, c.y, d.y);
    }
    // Half of 2^(e - 127).
    const uint e = p.head.x;
    slice.scale = float2(as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23));
    slice.offset = float2(0.0f);
    return slice;
  }
};

// Calls FOR(type) for every type that has kernels.
#define FOR_QUANT_TYPES(FOR) \
  FOR(Q4_0)                  \
  FOR(Q4_1)                  \
  FOR(Q5_0) FOR(Q5_1) FOR(Q8_0) FOR(Q2_K) FOR(Q3_K) FOR(Q4_K) FOR(Q5_K) FOR(Q6_K) FOR(IQ4_NL) FOR(IQ4_XS) FOR(MXFP4)

// Slice i of a packed row: the block and the slice in it, and the number in the row of its first weight.
template <typename F>
struct SliceOf {
  uint block, s;
  SliceOf(uint i) : block(i / F::slices), s(i % F::slices) {}
  uint first() const { return block * F::slices * 32 + F::first(s); }
  template <typename P>
  Packed load(P row) const {
    return F::load(row.plus(ulong(block) * F::bytes), s);
  }
  Slice decode(Packed packed) const { return F::decode(packed, s); }
};

// Decodes with the type's table in threadgroup memory, if it has one.
template <typename F, bool has_table = F::entries != 0>
struct Shared {
  Shared(threadgroup float*, uint) {}
  Slice decode(SliceOf<F> slice, Packed packed) const { return slice.decode(packed); }
};
template <typename F>
struct Shared<F, true> {
  SharedTable table;
  // All of a threadgroup's threads, 16 at least, come here.
  Shared(threadgroup float* entries, uint thread_index) : table{entries} {
    if (thread_index < F::entries) entries[thread_index] = Table(kNonlinear).of(thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  Slice decode(SliceOf<F> slice, Packed packed) const { return F::decode(packed, slice.s, table); }
};

// Weights 4 i to 4 i + 3 of the slice, in the order of q.
template <typename F>
inline float4 weights(Slice slice, uint i) {
  const uint run = i / 4;
  const float4 q = slice.q[i] * (run ? F::upper_unit : F::unit) + (F::zero - F::bias);
  return F::has_offset ? fma(float4(slice.scale[run]), q, float4(slice.offset[run])) : slice.scale[run] * q;
}
