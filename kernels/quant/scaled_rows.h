// How kernels read numbers of 8 and 4 bits with scales on a grid, as one of the readers of formats.h. A place among
// them is a row in the upper 32 bits, and a slice of it in the lower.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "formats.h"
#include "scaled.h"

// The halves of a word are E4M3's bits: seven of them in a float16's place are 1/256 of the number, except for NaN.
constexpr constant float kE4M3Unit = 256.0f;
inline float2 two_e4m3(uint bits) { return two_halves((bits & 0x00800080u) << 8 | (bits & 0x007f007fu) << 7); }
inline bool any_nan_e4m3(uint bytes) { return (((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0; }

struct GridOfScales {
  device const float* floats;
  device const uchar* bytes;  // the same memory
  device const float* factor;

  static float power_of(uint bits) {
    return as_type<float>(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : bits << 23);
  }
  static float e4m3_of(uint bits) { return any_nan_e4m3(bits) ? NAN : two_e4m3(bits).x * kE4M3Unit; }
  // The bits of the scales of a slice's runs.
  uint4 head(uint row, uint slice, ScaledParams p) const {
    const ulong first = ulong(row >> p.rows_shift) * p.scales;
    const ulong at = first + ((2 * slice) >> p.columns_shift);
    float2 scales;
    if (p.kind == SCALED_FLOAT) scales = float2(floats[at]);
    if (p.kind == SCALED_E8M0) scales = float2(power_of(bytes[at]));
    if (p.kind == SCALED_E4M3)
      scales = float2(e4m3_of(bytes[at]), e4m3_of(bytes[first + ((2 * slice + 1) >> p.columns_shift)]));
    if (p.factor) scales *= factor[0];
    return uint4(as_type<uint2>(scales), 0, 0);
  }
};

// Rows of numbers, of whose slices each has `quads` times 16 bytes, and their scales.
template <uint quads>
struct ScaledRows {
  device const uint4* words;
  GridOfScales grid;
  ScaledParams params;
  ulong at;

  ScaledRows plus(ulong further) const { return {words, grid, params, at + further}; }
  Packed load() const {
    const uint row = uint(at >> 32), slice = uint(at);
    device const uint4* const from = words + (ulong(row) * params.slices + slice) * quads;
    return {from[0], quads == 2 ? from[quads - 1] : uint4(0), grid.head(row, slice, params)};
  }
};
template <uint quads>
inline ScaledRows<quads> place(ScaledRows<quads> rows, ulong further) {
  return rows.plus(further);
}

// Matrices that lie one after the other.
template <uint quads>
struct ScaledMatrices {
  ScaledRows<quads> first;
  ScaledExpertsParams each;
};
template <uint quads>
inline ScaledRows<quads> place(ScaledMatrices<quads> all, ulong expert) {
  const ScaledParams p = all.first.params;
  const GridOfScales grid = all.first.grid;
  const ulong scales = expert * all.each.scale_rows * p.scales;
  return {all.first.words + expert * all.each.rows * p.slices * quads,
          {grid.floats + scales, grid.bytes + scales, grid.factor + (p.factor ? expert : 0)},
          p,
          0};
}

template <uint of_quads>
struct ScaledFormat : Block32 {
  typedef ScaledRows<of_quads> Rows;
  static constexpr constant uint number = 0, bytes = 1, quads = of_quads;
  static constexpr constant float bias = 0.0f, zero = -0.0f;
  static constexpr constant bool has_offset = false;
  static Packed load(Rows at, uint) { return at.load(); }
  static Slice with_scales(Packed p) {
    Slice slice;
    slice.scale = as_type<float2>(p.head.xy);
    slice.offset = float2(0.0f);
    return slice;
  }
};

// In a product a NaN may take the place of its whole slice, which needs fewer registers than its own place does.
template <bool in_place>
struct E4M3Reader : ScaledFormat<2> {
  static constexpr constant float unit = kE4M3Unit, upper_unit = unit;
  static Slice decode(Packed p, uint) {
    Slice slice = with_scales(p);
    bool nan = false;
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      const uint word = i < 4 ? p.low[i % 4] : p.high[i % 4];
      const float2 even = two_e4m3(word);
      const float2 odd = two_halves((word & 0x80008000u) | (word & 0x7f007f00u) >> 1);
      slice.q[i] = float4(even.x, odd.x, even.y, odd.y);
      nan |= any_nan_e4m3(word);
    }
    if constexpr (!in_place) {
      if (nan) slice.scale = float2(NAN);
    } else if (nan) {
#pragma unroll
      for (uint k = 0; k < 32; ++k) {
        const uint word = k < 16 ? p.low[k / 4 % 4] : p.high[k / 4 % 4];
        if (((word >> (k % 4 * 8)) & 0x7fu) == 0x7fu) slice.q[k / 4][k % 4] = NAN;
      }
    }
    return slice;
  }
};
typedef E4M3Reader<false> E4M3;

// The upper half of a float16.
struct E5M2 : ScaledFormat<2> {
  static constexpr constant float unit = 1.0f, upper_unit = unit;
  static Slice decode(Packed p, uint) {
    Slice slice = with_scales(p);
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      const uint word = i < 4 ? p.low[i % 4] : p.high[i % 4];
      const float2 even = two_halves((word & 0x00ff00ffu) << 8), odd = two_halves(word & 0xff00ff00u);
      slice.q[i] = float4(even.x, odd.x, even.y, odd.y);
    }
    return slice;
  }
};

// The first of two numbers is the lower half of a byte.
struct E2M1 : ScaledFormat<1> {
  static constexpr constant float unit = 16384.0f, upper_unit = unit;
  static Slice decode(Packed p, uint) {
    Slice slice = with_scales(p);
#pragma unroll
    for (uint i = 0; i < 16; ++i) {
      const float2 q = MXFP4::two_of(p.low[i / 4] >> (i % 4 * 4));
      slice.q[i / 4 * 2][i % 4] = q.x;
      slice.q[i / 4 * 2 + 1][i % 4] = q.y;
    }
    return slice;
  }
};

// The buffers and bytes of packed numbers, from buffer 0 on, and the reader that a kernel makes of them.
#define SCALED_ARGUMENTS                                                                       \
  device const uint4 *packed [[buffer(0)]], device const float *scales [[buffer(1)]],          \
      device const uchar *byte_scales [[buffer(2)]], device const float *factor [[buffer(3)]], \
      constant ScaledParams &scaled [[buffer(4)]]
#define SCALED_TYPES \
  device const uint4*, device const float*, device const uchar*, device const float*, constant ScaledParams&
