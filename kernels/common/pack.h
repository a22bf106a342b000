// The elements that a thread moves at once: as many bytes as a GPU's widest load takes. They are words until somebody
// computes with them: a compiler that sees elements of 16 bits takes them apart where they are loaded, and a thread
// that loads ahead would wait there for its loads.
#pragma once

#include <metal_stdlib>

template <typename T>
struct alignas(16) Pack {
  metal::uint4 words;
};

// The elements of a Pack, and the float4s that hold them.
template <typename T>
constexpr constant uint kPackElements = 16 / sizeof(T);
template <typename T>
constexpr constant uint kPackVectors = kPackElements<T> / 4;

template <typename T>
inline void unpack(Pack<T> pack, thread metal::float4 (&values)[2]) {
  values[0] = static_cast<metal::float4>(as_type<metal::vec<T, 4>>(pack.words.xy));
  values[1] = static_cast<metal::float4>(as_type<metal::vec<T, 4>>(pack.words.zw));
}
inline void unpack(Pack<float> pack, thread metal::float4 (&values)[1]) {
  values[0] = as_type<metal::float4>(pack.words);
}

template <typename T>
inline Pack<T> packed(thread const metal::float4 (&values)[2]) {
  return {metal::uint4(as_type<metal::uint2>(static_cast<metal::vec<T, 4>>(values[0])),
                       as_type<metal::uint2>(static_cast<metal::vec<T, 4>>(values[1])))};
}
template <typename T>
inline Pack<float> packed(thread const metal::float4 (&values)[1]) {
  return {as_type<metal::uint4>(values[0])};
}
