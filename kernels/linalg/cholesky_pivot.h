// The pivots by which a Cholesky factorization may divide.
#pragma once

#include <metal_stdlib>

// Whether a value is positive and finite.
inline bool is_pivot(float value) { return value > 0.0f && value < INFINITY; }
