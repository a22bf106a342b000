// Numbers of 8 and 4 bits that are floating-point numbers themselves, with scales on a grid: a scale for all, for each
// row, for each 128 by 128, or for each 32 or 16 numbers of a row. What kernels and host share.
//
// Sources: "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0; "OCP Microscaling Formats (MX)
// Specification", version 1.0; "Pretraining Large Language Models with NVFP4", NVIDIA, 2025.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// What scales are: float32, a power of 2 in 8 bits (E8M0), or E4M3. These have 32 numbers or more, except the last,
// which have 16.
#define SCALED_FLOAT 0u
#define SCALED_E8M0 1u
#define SCALED_E4M3 2u

// Which power of 2 is the scale of numbers whose largest is not a power of 2 times the format's largest.
#define SCALED_FLOOR 0u  // both are compared by their exponents, so that some numbers are beyond the largest
#define SCALED_CEIL 1u   // the least for which none is
#define SCALED_EVEN 2u   // as the first, of the largest number rounded to the format's precision

struct ScaledParams {
  uint32_t slices;         // of a row
  uint32_t scales;         // of a row
  uint32_t rows_shift;     // log2 of the rows that share scales
  uint32_t columns_shift;  // log2 of the runs of 16 numbers that share a scale
  uint32_t kind;           // of scales, as above
  uint32_t factor;         // whether scales are multiplied by another number
};

// With experts there is a matrix for each of them, with scales and a factor of its own.
struct ScaledExpertsParams {
  uint64_t rows;        // of a matrix
  uint64_t scale_rows;  // of a matrix
};

#define SCALED_QUANTIZE_THREADS 128
struct ScaledQuantizeParams {
  uint64_t from;      // the first slice of a dispatch
  uint32_t count;     // slices of a dispatch
  uint32_t dtype;     // of the numbers: QUANT_FLOAT, QUANT_HALF or QUANT_BFLOAT
  uint32_t rounding;  // of powers of 2, as above
};
