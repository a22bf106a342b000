// Arguments of the kernel for one row and several matrices, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define JOINED_MATRICES 3
#define JOINED_LINES 2       // columns of a simdgroup
#define JOINED_SIMDGROUPS 8  // of a threadgroup, at most

// result = norm(x) [a b c] + bias + residual, or activation(norm(x) a + bias) (norm(x) b + bias) with a gate.
struct JoinedParams {
  int64_t strides[JOINED_MATRICES];  // of the matrices, from one column to the next
  uint32_t columns[JOINED_MATRICES];
  uint32_t has_bias[JOINED_MATRICES];
  uint32_t terms;
  uint32_t share;  // simdgroups that have the same columns, a power of two
  uint32_t packs;  // whether 16 bytes of x, of the norm's weight and of columns can be read at a time
  uint32_t gate;   // 0, or one of gemm.h's activations
  uint32_t has_residual;
  float eps, offset;
};
