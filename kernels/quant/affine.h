// Weights of 2 to 8 bits in groups: weight = scale * q + offset, with a scale and an offset for each group of
// consecutive weights of a row. A row is a sequence of bits: weight k has the `bits` bits from bit k * bits on, the
// lowest first, so that a slice of 32 weights is `bits` words. MLX's files are so; GPTQ's and AWQ's are put in this
// order. What kernels and host share.
//
// Source of the layouts: github.com/ml-explore/mlx, mlx/ops.cpp (quantize); github.com/AutoGPTQ/AutoGPTQ,
// auto_gptq/nn_modules/qlinear; github.com/casper-hansen/AutoAWQ, awq/modules/linear.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define AFFINE_OFFSETS 0u
#define AFFINE_ZEROS 1u
#define AFFINE_SIGNED_ZEROS 2u

struct AffineParams {
  uint32_t shift;      // log2 of a group's slices
  uint32_t dtype;      // of the scales: QUANT_FLOAT, QUANT_HALF or QUANT_BFLOAT
  uint32_t zeros;      // AFFINE_OFFSETS: offsets of this dtype. Else zero points in 8 bits, offset = -scale * zero
  uint32_t is_signed;  // whether weights are, of 2, 4 or 8 bits
};
