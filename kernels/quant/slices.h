// How packed bytes become numbers: words of memory, the slice that a reader makes of them, and ways to unpack nibbles,
// pieces of bits and entries of tables. formats.h has the readers.
#pragma once

#include <metal_stdlib>

using namespace metal;

// Whether the GPU keeps float16's subnormal numbers. Where it takes them for zero, the backend defines it as 0.
#ifndef METALCORE_HALF_SUBNORMALS
#define METALCORE_HALF_SUBNORMALS 1
#endif

// Words of memory, and a place among them. Blocks of 4-byte words may begin at any byte.
struct Bytes {
  device const uint* words;
  ulong at;

  Bytes plus(ulong bytes) const { return {words, at + bytes}; }
  // The 1 to 4 bytes from `offset` to the end of a word.
  uint tail(uint offset) const { return words[(at + offset) >> 2] >> ((uint(at) + offset) % 4 * 8); }
  uint byte(uint offset) const { return tail(offset) & 0xffu; }
  uint pair(uint offset) const { return tail(offset) & 0xffffu; }
  // 16 bytes from anywhere. No word is read of which no byte is wanted.
  uint4 quad(uint offset) const {
    const ulong place = at + offset;
    device const uint* const from = words + (place >> 2);
    const uint shift = uint(place) % 4 * 8;
    const uint w[5] = {from[0], from[1], from[2], from[3], from[shift ? 4 : 3]};
    uint4 result;
#pragma unroll
    for (uint i = 0; i < 4; ++i) result[i] = uint(as_type<ulong>(uint2(w[i], w[i + 1])) >> shift);
    return result;
  }
  // 16 bytes from a multiple of 4.
  uint4 aligned(uint offset) const {
    device const uint* const from = words + ((at + offset) >> 2);
    return uint4(from[0], from[1], from[2], from[3]);
  }
};
struct Quads {
  device const uint4* words;
  ulong at;

  Quads plus(ulong bytes) const { return {words, at + bytes}; }
  uint4 aligned(uint offset) const { return words[(at + offset) >> 4]; }
};

inline Bytes place(device const uint* words, ulong at) { return {words, at}; }
inline Quads place(device const uint4* words, ulong at) { return {words, at}; }

// What a reader loads of a slice. A type leaves out what it does not need.
struct Packed {
  uint4 low;   // the lower bits of 32 weights
  uint4 high;  // the upper bits
  uint4 head;  // scales
  uint2 more;  // what else it takes to read them
};

struct Slice {
  float4 q[8];    // the first run, and the second, in units, with the type's bias
  float2 scale;   // of the runs
  float2 offset;  // zero without has_offset
};

// Bits below the tenth of a float16 are an integer, in units of the smallest subnormal number. So two bytes of a word
// become numbers by one operation each, after one for both. The unit goes into the scale, where it is exact.
constexpr constant float kUnit = 16777216.0f;  // 2^24: how many of them are 1

// half_of() is a float16 of any bits. two_halves() are the two of a word, and two() those that are such integers.
#if METALCORE_HALF_SUBNORMALS
inline float half_of(uint bits) { return static_cast<float>(as_type<half>(ushort(bits & 0xffffu))); }
inline float2 two_halves(uint bits) { return static_cast<float2>(as_type<half2>(bits)); }
inline float2 two(uint bits) { return two_halves(bits); }
#else
// The same numbers, without an operation that reads or returns a subnormal one. A float16 that is a subnormal number
// has a leading bit too much once it is a float32, and half of its value.
inline float half_of(uint bits) {
  const uint shifted = (bits & 0x7fffu) << 13;
  const float raised = as_type<float>(shifted + 0x38000000u);
  const uint magnitude = as_type<uint>(shifted < 0x00800000u ? 2.0f * raised - 0x1p-14f : raised);
  return as_type<float>(magnitude | (shifted < 0x0f800000u ? 0u : 0x7f800000u) | (bits & 0x8000u) << 16);
}
inline float2 two_halves(uint bits) { return float2(half_of(bits), half_of(bits >> 16)); }
// 1024 is added to the integers, and taken away.
inline float2 two(uint bits) {
  return fma(static_cast<float2>(as_type<half2>(bits | 0x64006400u)), 1.0f / kUnit, -1024.0f / kUnit);
}
#endif

// Four bytes, in units.
inline float4 floats(uint bytes) {
  const float2 even = two(bytes & 0x00ff00ffu), odd = two((bytes >> 8) & 0x00ff00ffu);
  return float4(even.x, odd.x, even.y, odd.y);
}

// Nibbles of 16 bytes: the lower ones are the first run, the upper ones the second. These stay where they are, and so
// have units of a 16th.
constexpr constant float kUpperUnit = kUnit / 16.0f;
inline void nibbles(thread Slice& slice, uint4 low) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const uint odd = low[i] >> 8;
    const float2 a = two(low[i] & 0x000f000fu), b = two(odd & 0x000f000fu);
    const float2 c = two(low[i] & 0x00f000f0u), d = two(odd & 0x00f000f0u);
    slice.q[i] = float4(a.x, b.x, a.y, b.y);
    slice.q[i + 4] = float4(c.x, d.x, c.y, d.y);
  }
}

// The same with upper bits, which stand in the bytes of `first` and `second` where they belong.
inline void nibbles(thread Slice& slice, uint4 low, uint4 first, uint4 second) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    slice.q[i] = floats((low[i] & 0x0f0f0f0fu) | first[i]);
    slice.q[i + 4] = floats(((low[i] >> 4) & 0x0f0f0f0fu) | second[i]);
  }
}

// Bits `at` to `at` + 3 become the lowest bits of four bytes.
inline uint spread(uint bits, uint at) {
  const uint four = (bits >> at) & 0xfu;
  return (four | four << 7 | four << 14 | four << 21) & 0x01010101u;
}

// The entries of a table of 16 numbers from -128 to 127, which are in it with 128 added, in units.
struct Table {
  ulong low, high;
  float of(uint nibble) const {
    const uint entry = uint((nibble & 8 ? high : low) >> (nibble % 8 * 8)) & 0xffu;
    return two(entry).x;
  }
};
// The same in threadgroup memory, where an entry takes one access, and not eight operations. Its entries lie in as many
// banks, so that accesses of a simdgroup do not meet.
struct SharedTable {
  threadgroup const float* entries;
  float of(uint nibble) const { return entries[nibble]; }
};
template <typename T>
inline void look_up(thread Slice& slice, uint4 low, T table) {
#pragma unroll
  for (uint i = 0; i < 16; ++i) {
    const uint byte = low[i / 4] >> (i % 4 * 8);
    slice.q[i / 4][i % 4] = table.of(byte & 0xfu);
    slice.q[4 + i / 4][i % 4] = table.of((byte >> 4) & 0xfu);
  }
}
