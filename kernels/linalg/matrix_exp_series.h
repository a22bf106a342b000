// What the kernels of matrix_exp share: Taylor's polynomial of degree 12, and how often a result is squared.
#pragma once

#include <metal_stdlib>

// 1 / k!
constant constexpr float kExpCoefficients[13] = {
    1.0f,        1.0f,         1.0f / 2,      1.0f / 6,       1.0f / 24,       1.0f / 120,      1.0f / 720,
    1.0f / 5040, 1.0f / 40320, 1.0f / 362880, 1.0f / 3628800, 1.0f / 39916800, 1.0f / 479001600};

// The number of halvings that bring a norm, which has these bits, below one. NaN and infinity have none.
inline uint squarings_of(uint bits) { return bits < 0x7f800000 && bits >> 23 > 126 ? (bits >> 23) - 126 : 0; }
