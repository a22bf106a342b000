// The types of numbers in blocks, and the blocks' scales.
#pragma once

#include <metal_stdlib>

#include "blockwise.h"
#include "numbers.h"

using namespace metal;

// What four bits stand for.
struct NF4Table {
  static float of(uint i) {
    constexpr float values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
    return values[i];
  }
};
// A sign, and one of eight numbers.
struct FP4Table {
  static float of(uint i) {
    constexpr float values[8] = {0.0f, 0.0625f / 12.0f, 8.0f / 12.0f, 1.0f, 4.0f / 12.0f, 0.5f, 2.0f / 12.0f, 0.25f};
    return i < 8 ? values[i] : 0.0f - values[i % 8];
  }
};

// The scales of blocks, in float32, or in 8 bits with scales and a mean of their own.
struct Scales {
  device const float* absmax;
  device const uchar* packed;
  device const float* code;
  device const float* offset;

  // fma() keeps compilers from contracting the product into the sum, which is rounded once more.
  float unpack(ulong block) const {
    return fma(code[packed[block]], absmax[block >> BLOCKWISE_SCALE_BLOCK], -0.0f) + *offset;
  }
  float of(ulong block, bool nested) const { return nested ? unpack(block) : absmax[block]; }
};
