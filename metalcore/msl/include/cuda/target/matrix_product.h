// The product of two 8 by 8 matrices that are spread over a simdgroup. Tensor cores compute it for half and bfloat,
// fused multiply-adds for float.
#pragma once

#include "target/lanes.h"
#include "target/matrix_place.h"

namespace msl {

// Uses mma.sync, for the types that it accepts. The assembly is volatile, because lanes that reach it together must
// stay together.
template <class T>
constexpr bool has_tensor_product = false;
#define MSL_TENSOR_PRODUCT(T, name)                                                                               \
  template <>                                                                                                     \
  constexpr bool has_tensor_product<T> = true;                                                                    \
  /* The upper half of a 16 by 8 matrix times an 8 by 8 one; its lower half is zero. */                           \
  METAL_FUNC metal::vec<float, 2> tensor_product(T, uint32_t a, uint32_t b, metal::vec<float, 2> c) {             \
    [[maybe_unused]] float below[2];                                                                              \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "  \
        "{%0, %1, %7, %7};"                                                                                       \
        : "+f"(c.x), "+f"(c.y), "=f"(below[0]), "=f"(below[1])                                                    \
        : "r"(a), "r"(0u), "r"(b), "f"(0.0f));                                                                    \
    return c;                                                                                                     \
  }
#if __CUDA_ARCH__ >= 800
MSL_TENSOR_PRODUCT(half, "f16")
MSL_TENSOR_PRODUCT(bfloat, "bf16")
#endif
#undef MSL_TENSOR_PRODUCT

METAL_FUNC uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// This lane's two elements of a * b + c, in float.
template <class A, class B>
METAL_FUNC metal::vec<float, 2> matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                                               metal::vec<float, 2> c, uint32_t) {
#ifndef MSL_CONVERGENT
  __syncwarp();
#endif
  if constexpr (std::is_same_v<A, B> && has_tensor_product<A>) {
    auto left = to_tensor_place(bit_cast<uint32_t>(a)), right = transposed(to_tensor_place(bit_cast<uint32_t>(b)));
    return from_tensor_place(tensor_product(A(), left, right, to_tensor_place(c)));
  } else {
    MatrixPlace place = matrix_place(index_of_lane());
#pragma unroll
    for (uint32_t k = 0; k < 8; k += 2) {
      metal::vec<A, 2> left = shuffle<kSimd>(kEveryLane, a, matrix_lane(place.row, k));
      metal::vec<B, 2> first = shuffle<kSimd>(kEveryLane, b, matrix_lane(k, place.column));
      metal::vec<B, 2> second = shuffle<kSimd>(kEveryLane, b, matrix_lane(k + 1, place.column));
      c.x = ::fmaf(float(left.x), float(first.x), c.x);
      c.y = ::fmaf(float(left.x), float(first.y), c.y);
      c.x = ::fmaf(float(left.y), float(second.x), c.x);
      c.y = ::fmaf(float(left.y), float(second.y), c.y);
    }
    return c;
  }
}

}  // namespace msl
