// What a Cholesky factorization may divide by.
#pragma once

#include <metal_stdlib>

// Neither zero, negative, NaN nor infinite.
inline bool is_pivot(float value) { return value > 0.0f && value < INFINITY; }
