// What a simdgroup holds of matrices: fragments of 8 by 8, kDown below each other and kAcross beside each other.
//
// The functions at the top whose last parameter is a `long` are called with a 0, which is an int: where a compiler's
// headers have functions that are the same except for an `int`, these are called. The headers for NVIDIA GPUs have
// them, and join fragments to the larger operands of tensor cores.
#pragma once

#include <metal_stdlib>
#include <metal_simdgroup_matrix>

// to[m][k] = the fragment at row 8 m and column 8 k of a tile, whose rows are `pitch` apart.
template <typename T, uint kDown, uint kAcross>
METAL_FUNC void metalcore_load_matrices(thread metal::simdgroup_matrix<T, 8, 8> (&to)[kDown][kAcross],
                                        threadgroup const T* tile, uint pitch, long) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint k = 0; k < kAcross; ++k) metal::simdgroup_load(to[m][k], tile + m * 8 * pitch + k * 8, pitch);
  }
}

// The same for the right operand of a product, which is of use for metalcore_multiply_matrices() alone.
template <typename T, uint kTerms, uint kAcross>
METAL_FUNC void metalcore_load_right_matrices(thread metal::simdgroup_matrix<T, 8, 8> (&to)[kTerms][kAcross],
                                              threadgroup const T* tile, uint pitch, long) {
  metalcore_load_matrices(to, tile, pitch, 0L);
}

// The same for a tile whose rows are the columns of the operand: to[k][n] is at row 8 n and column 8 k.
template <typename T, uint kTerms, uint kAcross>
METAL_FUNC void metalcore_load_right_transposed(thread metal::simdgroup_matrix<T, 8, 8> (&to)[kTerms][kAcross],
                                                threadgroup const T* tile, uint pitch, long) {
#pragma unroll
  for (uint k = 0; k < kTerms; ++k) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n)
      metal::simdgroup_load(to[k][n], tile + n * 8 * pitch + k * 8, pitch, ulong2(0), true);
  }
}

// The column of a right operand that a lane gives, whose elements have `row` as the number of their row.
METAL_FUNC uint metalcore_right_column(uint row, long) { return row; }

// A right operand whose lanes give the rows place.column and place.column + 1 of the column above.
template <typename T>
METAL_FUNC void metalcore_make_right(thread metal::simdgroup_matrix<T, 8, 8>& to, metal::vec<T, 2> rows, uint lane,
                                     long) {
  // Column c of the row r is in the lane of row c, among the columns of r.
  const uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  const ushort from = (column & 4) * 4 + (column & 2) * 2 + (row & 4) * 2 + (row & 2) / 2;  // the lane of column, row
  const metal::vec<T, 2> first = metal::simd_shuffle(rows, from), second = metal::simd_shuffle(rows, ushort(from + 2));
  to.thread_elements() = metal::vec<T, 2>(row % 2 ? first.y : first.x, row % 2 ? second.y : second.x);
}

// sums[m][n] += sum over k of left[m][first + k] right[k][n].
template <typename T, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void metalcore_multiply_matrices(thread metal::simdgroup_matrix<float, 8, 8> (&sums)[kDown][kAcross],
                                            thread const metal::simdgroup_matrix<T, 8, 8> (&left)[kDown][kDepth],
                                            uint first,
                                            thread const metal::simdgroup_matrix<T, 8, 8> (&right)[kTerms][kAcross],
                                            long) {
#pragma unroll
  for (uint k = 0; k < kTerms; ++k) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
#pragma unroll
      for (uint m = 0; m < kDown; ++m)
        metal::simdgroup_multiply_accumulate(sums[m][n], left[m][first + k], right[k][n], sums[m][n]);
    }
  }
}

template <typename T>
METAL_FUNC metal::simdgroup_matrix<float, 8, 8> metalcore_as_floats(thread const metal::simdgroup_matrix<T, 8, 8>& of) {
  metal::simdgroup_matrix<T, 8, 8> from = of;
  metal::simdgroup_matrix<float, 8, 8> to;
  to.thread_elements() = static_cast<metal::float2>(from.thread_elements());
  return to;
}

// The same for operands of which one has floats and the other has not. NVIDIA's matrix units round sums toward zero, so
// that products are added up apart from the sums, except where these are sums of a FEW_TERMS.
template <bool FEW_TERMS = false, typename A, typename B, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void metalcore_multiply_mixed(thread metal::simdgroup_matrix<float, 8, 8> (&sums)[kDown][kAcross],
                                         thread const metal::simdgroup_matrix<A, 8, 8> (&left)[kDown][kDepth],
                                         uint first,
                                         thread const metal::simdgroup_matrix<B, 8, 8> (&right)[kTerms][kAcross],
                                         long) {
#pragma unroll
  for (uint k = 0; k < kTerms; ++k) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
#pragma unroll
      for (uint m = 0; m < kDown; ++m)
        metal::simdgroup_multiply_accumulate(sums[m][n], metalcore_as_floats(left[m][first + k]),
                                             metalcore_as_floats(right[k][n]), sums[m][n]);
    }
  }
}

// The place of a lane's first element in a fragment; its second one is in the next column. The lanes of a row differ in
// the bits 0 and 3 of their numbers.
struct Place {
  uint row, column;
};
METAL_FUNC Place place_of(uint lane) { return {(lane / 4 & 4) + lane / 2 % 4, (lane / 4 & 2) * 2 + lane % 2 * 2}; }

template <typename T>
METAL_FUNC thread metal::vec<T, 2>& elements(thread metal::simdgroup_matrix<T, 8, 8>& of) {
  return reinterpret_cast<thread metal::vec<T, 2>&>(of.thread_elements());
}

template <typename T, uint kDown, uint kAcross>
struct Fragments {
  metal::simdgroup_matrix<T, 8, 8> at[kDown][kAcross];
};

template <typename T, uint kDown, uint kAcross>
METAL_FUNC void clear(thread Fragments<T, kDown, kAcross>& fragments) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) fragments.at[m][n] = metal::make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f));
  }
}

// The first rows of a tile.
template <uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void load(thread Fragments<T, kDown, kAcross>& fragments, threadgroup const T* tile) {
  metalcore_load_matrices(fragments.at, tile, kPitch, 0);
}

// Fragments of a right operand.
template <typename T, uint kTerms, uint kAcross>
struct RightFragments {
  metal::simdgroup_matrix<T, 8, 8> at[kTerms][kAcross];
};

template <uint kPitch, typename T, uint kTerms, uint kAcross>
METAL_FUNC void load(thread RightFragments<T, kTerms, kAcross>& fragments, threadgroup const T* tile) {
  metalcore_load_right_matrices(fragments.at, tile, kPitch, 0);
}
template <uint kPitch, typename T, uint kTerms, uint kAcross>
METAL_FUNC void load_transposed(thread RightFragments<T, kTerms, kAcross>& fragments, threadgroup const T* tile) {
  metalcore_load_right_transposed(fragments.at, tile, kPitch, 0);
}

// sums += a b, where the columns of a from `first` on take part.
template <typename T, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void multiply(thread Fragments<float, kDown, kAcross>& sums, thread const Fragments<T, kDown, kDepth>& a,
                         uint first, thread const RightFragments<T, kTerms, kAcross>& b) {
  metalcore_multiply_matrices(sums.at, a.at, first, b.at, 0);
}
template <typename A, typename B, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void multiply(thread Fragments<float, kDown, kAcross>& sums, thread const Fragments<A, kDown, kDepth>& a,
                         uint first, thread const RightFragments<B, kTerms, kAcross>& b) {
  metalcore_multiply_mixed(sums.at, a.at, first, b.at, 0);
}
