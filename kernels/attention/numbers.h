// Numbers of a type that is known at run time, for arguments that are read or written once.
#pragma once

#include <metal_stdlib>

#include "attention/decode.h"
#include "attention/logarithm.h"

using namespace metal;

inline float number_at(device const uchar* numbers, ulong i, uint type) {
  if (type == NUMBER_HALF) return static_cast<float>(reinterpret_cast<device const half*>(numbers)[i]);
  if (type == NUMBER_BFLOAT) return static_cast<float>(reinterpret_cast<device const bfloat*>(numbers)[i]);
  return reinterpret_cast<device const float*>(numbers)[i];
}

inline void store_number(device uchar* numbers, ulong i, uint type, float value) {
  if (type == NUMBER_HALF)
    reinterpret_cast<device half*>(numbers)[i] = static_cast<half>(value);
  else if (type == NUMBER_BFLOAT)
    reinterpret_cast<device bfloat*>(numbers)[i] = static_cast<bfloat>(value);
  else
    reinterpret_cast<device float*>(numbers)[i] = value;
}

// A score with a mask's element.
inline float plus_mask_at(float score, device const uchar* mask, ulong i, uint type) {
  if (type == NUMBER_BOOL) return mask[i] ? score : -INFINITY;
  return plus_mask(score, number_at(mask, i, type));
}
