// Numbers of a type that is known at run time, for arguments that are read or written once.
#pragma once

#include <metal_stdlib>

#include "attention/attention.h"
#include "attention/logarithm.h"

using namespace metal;

// Numbers lie at multiples of their size. That a pointer is one to structs tells a compiler so.
template <typename T>
struct Number {
  T value;
};

inline float number_at(device const uchar* numbers, ulong i, uint type) {
  if (type == NUMBER_HALF) return static_cast<float>(reinterpret_cast<device const Number<half>*>(numbers)[i].value);
  if (type == NUMBER_BFLOAT)
    return static_cast<float>(reinterpret_cast<device const Number<bfloat>*>(numbers)[i].value);
  return reinterpret_cast<device const Number<float>*>(numbers)[i].value;
}

template <typename T>
inline float4 numbers_of(device const Number<T>* row, uint i, uint size) {
  float4 found;
#pragma unroll
  for (uint n = 0; n < 4; ++n) {
    const float number = static_cast<float>(row[min(i + n, size - 1)].value);
    found[n] = i + n < size ? number : 0.0f;
  }
  return found;
}
// Numbers i to i + 3 of the `size` in a row that begins at number `row`; 0 past its end.
inline float4 numbers_at(device const uchar* numbers, ulong row, uint i, uint size, uint type) {
  if (type == NUMBER_HALF) return numbers_of(reinterpret_cast<device const Number<half>*>(numbers) + row, i, size);
  if (type == NUMBER_BFLOAT) return numbers_of(reinterpret_cast<device const Number<bfloat>*>(numbers) + row, i, size);
  return numbers_of(reinterpret_cast<device const Number<float>*>(numbers) + row, i, size);
}

inline void store_number(device uchar* numbers, ulong i, uint type, float value) {
  if (type == NUMBER_HALF)
    reinterpret_cast<device Number<half>*>(numbers)[i].value = static_cast<half>(value);
  else if (type == NUMBER_BFLOAT)
    reinterpret_cast<device Number<bfloat>*>(numbers)[i].value = static_cast<bfloat>(value);
  else
    reinterpret_cast<device Number<float>*>(numbers)[i].value = value;
}

// A score with a mask's element.
inline float plus_mask_at(float score, device const uchar* mask, ulong i, uint type) {
  if (type == NUMBER_BOOL) return mask[i] ? score : -INFINITY;
  return plus_mask(score, number_at(mask, i, type));
}
