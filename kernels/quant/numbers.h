// Numbers whose dtype a kernel learns at run time, outside of its loops: float32, float16 or bfloat16.
#pragma once

#include <metal_stdlib>

#include "quant.h"

using namespace metal;

inline uint half_bits(float value, uint dtype) {
  return dtype == QUANT_HALF ? as_type<ushort>(static_cast<half>(value)) : as_type<ushort>(static_cast<bfloat>(value));
}

// Four 16-bit numbers.
inline uint2 halves_of(float4 value, uint dtype) {
  return uint2(half_bits(value.x, dtype) | half_bits(value.y, dtype) << 16,
               half_bits(value.z, dtype) | half_bits(value.w, dtype) << 16);
}
// Both pointers are to the same memory.
inline void store(device float* floats, device ushort* halves, ulong i, float value, uint dtype) {
  if (dtype == QUANT_FLOAT) {
    floats[i] = value;
  } else {
    halves[i] = ushort(half_bits(value, dtype));
  }
}

// Two 16-bit numbers.
inline float2 pair_of(uint bits, uint dtype) {
  return dtype == QUANT_HALF ? static_cast<float2>(as_type<half2>(bits))
                             : as_type<float2>(uint2(bits << 16, bits & 0xffff0000u));
}

// 16 numbers from number `from` on, a multiple of 16.
inline void load16(thread float4* to, device const uint4* numbers, ulong from, uint dtype) {
  if (dtype == QUANT_FLOAT) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) to[i] = as_type<float4>(numbers[from / 4 + i]);
  } else {
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const uint4 bits = numbers[from / 8 + i];
      to[2 * i] = float4(pair_of(bits.x, dtype), pair_of(bits.y, dtype));
      to[2 * i + 1] = float4(pair_of(bits.z, dtype), pair_of(bits.w, dtype));
    }
  }
}
