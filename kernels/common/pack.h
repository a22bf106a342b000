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
