// Rounding to bfloat16 up or down at random, so that the mean of many roundings is exact.
#pragma once

#include <metal_stdlib>

// Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
inline metal::uint4 philox(metal::uint4 counter, metal::uint2 key) {
  for (uint round = 0; round < 10; ++round) {
    const metal::uint2 high = metal::mulhi(metal::uint2(0xd2511f53u, 0xcd9e8d57u), counter.xz);
    const metal::uint2 low = metal::uint2(0xd2511f53u, 0xcd9e8d57u) * counter.xz;
    counter = metal::uint4(high.y ^ counter.y ^ key.x, low.y, high.x ^ counter.w ^ key.y, low.x);
    key += metal::uint2(0x9e3779b9u, 0xbb67ae85u);
  }
  return counter;
}

// 16 random bits for each of `fields` (1 or 4, or none) values of each of `width` elements, from the element's index in
// its tensor, the tensor's number, the step and a seed.
template <uint fields, uint width>
struct RandomBits {
  static constexpr constant uint kShare = fields == 1 ? 8 : 2;  // elements that share an output of 128 bits

  metal::uint4 words[width / kShare];

  RandomBits(metal::uint2 seed, ulong first, uint tensor, uint step) {
    for (uint i = 0; i < width / kShare; ++i) {
      const ulong index = first / kShare + i;
      words[i] = philox(metal::uint4(static_cast<uint>(index), static_cast<uint>(index >> 32), tensor, step), seed);
    }
  }
  uint bits(uint k, uint field) const {
    const uint index = fields == 1 ? k % 8 : 4 * (k % 2) + field;
    const uint word = words[k / kShare][index / 2];
    return index % 2 != 0 ? word >> 16 : word & 0xffffu;
  }
};
template <uint width>
struct RandomBits<0, width> {
  RandomBits(metal::uint2, ulong, uint, uint) {}
};

// The neighbours of x in bfloat16, each with the probability that its nearness gives. Infinity and NaN stay.
inline bfloat round_at_random(float x, uint bits) {
  const uint word = as_type<uint>(x);
  if ((word & 0x7f800000u) == 0x7f800000u) return static_cast<bfloat>(x);
  return as_type<bfloat>(static_cast<ushort>((word + bits) >> 16));
}
