// The elements that a thread moves at once: as many bytes as a GPU's widest load takes.
#pragma once

#include <metal_stdlib>

template <typename T>
struct alignas(16) Pack {
  metal::vec<T, 4> low, high;
};
template <>
struct Pack<float> {
  metal::float4 elements;
};

// The elements of a Pack, and the float4s that hold them.
template <typename T>
constexpr constant uint kPackElements = 16 / sizeof(T);
template <typename T>
constexpr constant uint kPackVectors = kPackElements<T> / 4;

template <typename T>
inline void unpack(Pack<T> pack, thread metal::float4 (&values)[2]) {
  values[0] = static_cast<metal::float4>(pack.low);
  values[1] = static_cast<metal::float4>(pack.high);
}
inline void unpack(Pack<float> pack, thread metal::float4 (&values)[1]) { values[0] = pack.elements; }

template <typename T>
inline Pack<T> packed(thread const metal::float4 (&values)[2]) {
  return {static_cast<metal::vec<T, 4>>(values[0]), static_cast<metal::vec<T, 4>>(values[1])};
}
template <typename T>
inline Pack<float> packed(thread const metal::float4 (&values)[1]) {
  return {values[0]};
}
