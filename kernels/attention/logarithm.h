// Scores are logarithms to base 2.
#pragma once

#include <metal_stdlib>

constant constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// A score with a mask's number. Only -inf gives -inf: libraries hide keys by the smallest finite number, and a query
// that sees no other key has equal weights then.
METAL_FUNC float plus_mask(float score, float number) {
  const float sum = metal::fma(number, kLog2E, score);
  return sum == -INFINITY && number > -INFINITY ? -FLT_MAX : sum;
}

// The natural logarithm of a softmax's sum, whose logarithm to base 2 is base + rest.
METAL_FUNC float natural(float base, float rest) { return base == -FLT_MAX ? base : (base + rest) * kLn2; }

// What to subtract from scores up to `maximum`: -inf - -inf would be NaN.
METAL_FUNC float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }
