// The tensor cores' instructions. They multiply 16 by 8 or 16 by 16 matrices by ones of 8 columns, so the product of
// two 8 by 8 matrices takes the upper half of the rows, or uses the lower half for other parts of the left matrix. A
// lane holds two neighbouring elements of a row of each 8 by 8 block (see lane_numbers.h). The assembly is volatile,
// because lanes that reach it together must stay together.
#pragma once

#include "metal/vec.h"

namespace msl {

// Two elements of a row in each half of a 16 by 8 matrix.
struct Accumulator {
  float upper[2], lower[2];
};

// For blocks of 8 by 8 elements of half or bfloat, whose type an argument has:
//   sum += {upper, lower} * right
//   sum += {{upper, next_upper}, {lower, next_lower}} * {right, next_right}
#define MSL_TENSOR_PRODUCTS(T, name)                                                                       \
  METAL_FUNC void add_product(Accumulator& sum, T, uint32_t upper, uint32_t lower, uint32_t right) {       \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." name "." name                                     \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "                                                 \
                 "{%0, %1, %2, %3};"                                                                       \
                 : "+f"(sum.upper[0]), "+f"(sum.upper[1]), "+f"(sum.lower[0]), "+f"(sum.lower[1])          \
                 : "r"(upper), "r"(lower), "r"(right));                                                    \
  }                                                                                                        \
  METAL_FUNC void add_products(Accumulator& sum, T, uint32_t upper, uint32_t next_upper, uint32_t lower,   \
                               uint32_t next_lower, uint32_t right, uint32_t next_right) {                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                    \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                                               \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                             \
                 : "+f"(sum.upper[0]), "+f"(sum.upper[1]), "+f"(sum.lower[0]), "+f"(sum.lower[1])          \
                 : "r"(upper), "r"(lower), "r"(next_upper), "r"(next_lower), "r"(right), "r"(next_right)); \
  }
MSL_TENSOR_PRODUCTS(half, "f16")
MSL_TENSOR_PRODUCTS(bfloat, "bf16")
#undef MSL_TENSOR_PRODUCTS

}  // namespace msl
