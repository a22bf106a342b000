// Random numbers for dropout: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Each
// kernel makes those of a place anew.
#pragma once

#include <metal_stdlib>

METAL_FUNC metal::uint4 philox(metal::uint4 counter, metal::uint2 key) {
#pragma unroll 1
  for (uint round = 0; round < 10; ++round) {
    const uint high0 = metal::mulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint high1 = metal::mulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = metal::uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += metal::uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

// The random numbers of a query's weights for an even key and the next one.
METAL_FUNC metal::uint2 random_numbers(metal::uint2 seed, uint batch, uint head, uint query, uint key) {
  const metal::uint4 four = philox(metal::uint4(key / 4, query, head, batch), seed);
  return key & 2 ? four.zw : four.xy;
}
