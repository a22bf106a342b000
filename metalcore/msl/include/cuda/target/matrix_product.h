// The product of two 8 by 8 matrices that are spread over a simdgroup, on tensor cores. Floats are multiplied as sums
// of bfloats, which loses no bits that float32 would keep. Where the compiler knows that floats were converted from
// half or bfloat, as in programs that hold everything in float, they are multiplied as such.
#pragma once

#include "metal/matrix_place.h"
#include "metal/vec.h"
#include "target/lanes.h"
#include "target/math.h"
#include "target/formats.h"

// The tensor cores' instructions. They multiply 16 by 8 or 16 by 16 matrices by ones of 8 columns, so the product of
// two 8 by 8 matrices takes the upper half of the rows, or uses the lower half for other parts of the left matrix. A
// lane holds two neighbouring elements of a row of each 8 by 8 block (see lanes.h). The assembly is volatile,
// because lanes that reach it together must stay together.
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

// A lane's two elements of a transposed 8 by 8 matrix, in the lanes' order of the tensor cores: lane 4 r + c has the
// elements 2 c and 2 c + 1 of row r. Two shuffles fetch them; movmatrix does the same for 16-bit elements, in several
// times as many cycles.

// The program's row (see lanes.h) that is a row of the tensor cores, and the other way round.
METAL_FUNC uint32_t exchanged_row(uint32_t row) { return (row & 4) | (row >> 1 & 1) | (row << 1 & 2); }

// Marks in NVRTC's PTX that a kernel has matrices, for which lanes that are numbered for fragments are wrong.
METAL_FUNC void mark_matrices() {
#ifdef MSL_FRAGMENT_LANES
  asm volatile("// msl.matrix");
#endif
}

// Only whole simdgroups, which are renumbered, have matrices.
METAL_FUNC MatrixPlace place_of_lane() {
  mark_matrices();
  return {exchanged_row(warp_lane() / 4), warp_lane() % 4 * 2};
}

// The lane that has this lane's column in row 2 c; the lane of the row after it is kNextRow further.
constexpr uint32_t kNextRow = 8;
METAL_FUNC int lane_of_column() { return int((warp_lane() & 2u) << 3 | (warp_lane() & 1u) << 2 | warp_lane() >> 3); }
METAL_FUNC uint32_t is_in_odd_row() { return warp_lane() & 4u; }
// Which halves of the two lanes' pairs are in this lane's column.
METAL_FUNC uint32_t halves_of_column() { return is_in_odd_row() ? 0x7632 : 0x5410; }

// Lanes of even rows take their first element from an even row and their second one from an odd row, and the others
// take them the other way round. So in each shuffle a lane gives only one of its elements.
METAL_FUNC metal::vec<float, 2> transposed(metal::vec<float, 2> v) {
  const bool odd = is_in_odd_row(), gives_odd = warp_lane() & kNextRow;
  const int lane = lane_of_column() | (odd ? kNextRow : 0);
  const float same = __shfl_sync(0xffffffffu, gives_odd ? v.y : v.x, lane);
  const float other = __shfl_sync(0xffffffffu, gives_odd ? v.x : v.y, lane ^ kNextRow);
  return metal::vec<float, 2>(odd ? other : same, odd ? same : other);
}

using Floats = metal::vec<float, 2>;

METAL_FUNC uint32_t upper_halves(Floats v) { return __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632); }
// The same by shifts, which the compiler undoes where the floats were made by shifts.
METAL_FUNC uint32_t packed_bfloats(Floats v) {
  uint32_t pair;
  asm("mov.b32 %0, {%1, %2};"
      : "=r"(pair)
      : "h"(uint16_t(__float_as_uint(v.x) >> 16)), "h"(uint16_t(__float_as_uint(v.y) >> 16)));
  return pair;
}
METAL_FUNC uint32_t packed_halves(Floats v) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(v.y), "f"(v.x));
  return pair;
}

// A pair of floats as a sum of three pairs of bfloats, which have 8 bits each of the 24. The first one is cut off
// towards zero, so that no number overflows. An infinite one or a NaN has only a first part, which multiplies only the
// other matrix's first part: zeros would make an infinite one a NaN. `finite` is the first part without these.
struct Parts {
  uint32_t first, finite, second, third;
};
METAL_FUNC Floats without_first_bits(Floats v) {
  return Floats(v.x - __uint_as_float(__float_as_uint(v.x) & 0xffff0000u),
                v.y - __uint_as_float(__float_as_uint(v.y) & 0xffff0000u));
}
METAL_FUNC float if_finite(float x) { return ::fabsf(x) < math::kInfinity ? x : 0.0f; }
METAL_FUNC Parts parts_of(Floats v) {
  const Floats finite(if_finite(v.x), if_finite(v.y)), rest = without_first_bits(finite);
  return {upper_halves(v), upper_halves(finite), upper_halves(rest), upper_halves(without_first_bits(rest))};
}

// Tensor cores round towards zero. So they sum the large products, which fit into a float but for bits far below, and
// the small ones by themselves, and the sums are added as float32 adds.
METAL_FUNC Floats product_of_parts(const Parts& a, const Parts& b, Floats c, uint32_t parts_of_b) {
  Accumulator large = {}, small = {};
  if (parts_of_b == 1) {
    add_product(small, bfloat(), a.third, a.second, b.finite);
  } else {
    if (parts_of_b == 3) add_product(small, bfloat(), a.finite, a.second, b.third);
    add_products(small, bfloat(), a.third, a.finite, a.second, a.second, b.finite, b.second);
  }
  uint32_t unused;
  add_product(large, bfloat(), a.first, unused, b.first);
  return Floats(c.x + (large.upper[0] + (small.upper[0] + small.lower[0])),
                c.y + (large.upper[1] + (small.upper[1] + small.lower[1])));
}

// Two elements of each matrix as bfloats and as halves; only those of the right type are computed in the end.
struct Pairs {
  uint32_t left, right;
};

// joined_products.py joins these products in NVRTC's PTX: it reads the first line, and writes other instructions in
// place of the rest, in which the lower half of the rows is wasted. `not_bfloat` is 0 where the elements are bfloats.
METAL_FUNC Floats product_of_pairs(Pairs bfloats, Pairs halves, uint32_t not_bfloat, Floats c) {
  asm volatile(
      "// msl.product %0 %1 %2 %3 %4 %5 %6\n\t"
      "{ .reg .pred is_bfloat; .reg .b32 left, right, first, second; .reg .f32 lower<2>;\n\t"
      "setp.eq.u32 is_bfloat, %6, 0;\n\t"
      "selp.b32 left, %2, %4, is_bfloat;\n\t"
      "selp.b32 right, %3, %5, is_bfloat;\n\t"
      "shfl.sync.idx.b32 first, right, %7, 31, -1;\n\t"
      "shfl.sync.idx.b32 second, right, %8, 31, -1;\n\t"
      "prmt.b32 right, first, second, %9;\n\t"
      "mov.f32 lower0, 0f00000000; mov.f32 lower1, 0f00000000;\n\t"
      "@is_bfloat mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, lower0, lower1}, {left, left}, {right}, {%0, %1, lower0, lower1};\n\t"
      "@!is_bfloat mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, lower0, lower1}, {left, left}, {right}, {%0, %1, lower0, lower1}; }"
      : "+f"(c.x), "+f"(c.y)
      : "r"(bfloats.left), "r"(bfloats.right), "r"(halves.left), "r"(halves.right), "r"(not_bfloat),
        "r"(lane_of_column()), "r"(lane_of_column() + kNextRow), "r"(halves_of_column()));
  return c;
}

#if __CUDA_ARCH__ >= 800

// This lane's two elements of a * b + c, in float.
template <class A, class B>
METAL_FUNC Floats matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b, Floats c, uint32_t) {
  mark_matrices();
  if constexpr (std::is_same_v<A, B> && !std::is_same_v<A, float>) {
    const Pairs pairs = {bit_cast<uint32_t>(a), bit_cast<uint32_t>(b)};
    return product_of_pairs(pairs, pairs, std::is_same_v<A, half>, c);
  } else {
    const Floats left(float(a.x), float(a.y)), right(float(b.x), float(b.y));
    const bool right_is_bfloat = is_bfloat(right.x) & is_bfloat(right.y);
    const bool right_is_half = is_half(right.x) & is_half(right.y);
    const uint32_t not_bfloat = is_unknown(right_is_bfloat & is_bfloat(left.x) & is_bfloat(left.y));
    const uint32_t not_half = is_unknown(right_is_half & is_half(left.x) & is_half(left.y));
    if (!(not_bfloat & not_half))
      return product_of_pairs({packed_bfloats(left), packed_bfloats(right)},
                              {packed_halves(left), packed_halves(right)}, not_bfloat, c);
    const uint32_t parts = is_known(right_is_bfloat) ? 1 : is_known(right_is_half) ? 2 : 3;
    return product_of_parts(parts_of(left), parts_of(transposed(right)), c, parts);
  }
}

#else

// The two elements of a matrix that a lane of the warp has.
template <class T>
METAL_FUNC metal::vec<T, 2> pair_of(const metal::vec<T, 2>& pair, uint32_t lane) {
  if constexpr (sizeof(T) == 2)
    return bit_cast<metal::vec<T, 2>>(__shfl_sync(0xffffffffu, bit_cast<uint32_t>(pair), lane));
  else
    return metal::vec<T, 2>(__shfl_sync(0xffffffffu, pair.x, lane), __shfl_sync(0xffffffffu, pair.y, lane));
}

// The same by multiplications and additions in a row: these GPUs have no product of bfloats. Row `exchanged_row(r)` of
// the program is in the warp's lanes from 4 r on.
template <class A, class B>
METAL_FUNC Floats matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b, Floats c, uint32_t) {
  mark_matrices();
  const uint32_t row = warp_lane() & 28u, column = warp_lane() & 3u;
#pragma unroll 1  // the assembler takes minutes for thousands of shuffles in a row
  for (uint32_t k = 0; k < 8; k += 2) {
    const metal::vec<A, 2> left = pair_of(a, row | k / 2);
    const metal::vec<B, 2> first = pair_of(b, exchanged_row(k) * 4 | column);
    const metal::vec<B, 2> second = pair_of(b, exchanged_row(k + 1) * 4 | column);
    c.x = ::fmaf(float(left.y), float(second.x), ::fmaf(float(left.x), float(first.x), c.x));
    c.y = ::fmaf(float(left.y), float(second.y), ::fmaf(float(left.x), float(first.y), c.y));
  }
  return c;
}

#endif

}  // namespace msl
