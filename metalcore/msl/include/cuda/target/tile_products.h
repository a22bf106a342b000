// Products of many 8 by 8 matrices of tiles in threadgroup memory. A kernel writes them as functions over arrays of
// simdgroup_matrix, in plain MSL, whose last parameter is a `long`. The functions here have an `int` there, so that a
// call with 0 comes here. They join two matrices below each other, and two beside each other, into one operand of the
// tensor cores, and read tiles with an instruction for that. The elements of a right operand lie as the tensor cores
// have them, and so mean something to these functions alone.
//
//   metalcore_load_matrices(to, tile, pitch, 0)         to[m][k] = the matrix at row 8 m and column 8 k of the tile
//   metalcore_load_right_matrices(to, tile, pitch, 0)   the same, for a right operand
//   metalcore_load_right_transposed(to, tile, pitch, 0) to[k][n] = the transposed matrix at row 8 n and column 8 k
//   metalcore_right_column(row, 0)                      the column of a right operand that a lane gives
//   metalcore_make_right(to, rows, lane, 0)             a right operand, whose lanes give two rows of that column
//   metalcore_multiply_matrices(sums, left, first, right, 0)
//                                                       sums[m][n] += sum over k of left[m][first + k] right[k][n]
//   metalcore_multiply_mixed(sums, left, first, right, 0)
//                                                       the same, where one side has floats and the other has not
//
// Rows of a tile of 16-bit elements begin at multiples of 16 bytes.
#pragma once

#if defined(MSL_MATRIX_LANES) && __CUDA_ARCH__ >= 800

#include "metal/simdgroup_matrix.h"

namespace msl {

template <class T>
constexpr bool is_16_bits = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

// Loads kCount matrices of 16-bit elements; lane 8 i + r has the address of row r of matrix i.
template <bool kTransposed, int kCount>
METAL_FUNC void load_joined(uint32_t (&to)[4], const void* row) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  if constexpr (kCount == 4 && kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2 && kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
  }
}

// The largest of 4, 2 and 1 that divides n and is at most `most`.
constexpr int joined_count(int n, int most) { return n % 4 == 0 && most >= 4 ? 4 : n % 2 == 0 && most >= 2 ? 2 : 1; }

// to[i][j] = the matrix at row 8 i and column 8 j, or for kExchanged at row 8 j and column 8 i. Two matrices below each
// other come into neighbouring registers, where products need them.
template <bool kTransposed, bool kExchanged, class T, uint32_t kDown, uint32_t kAcross>
METAL_FUNC void load_tile(metal::simdgroup_matrix<T, 8, 8> (&to)[kDown][kAcross], const T* tile, uint32_t pitch) {
  constexpr int kHigh = joined_count(kDown, 2), kWide = joined_count(kAcross, 4 / kHigh);
  // The rows of left matrices are in the program's order.
  const uint32_t lane = warp_lane(), row = kTransposed || kExchanged ? lane % 8 : exchanged_row(lane % 8);
  const uint32_t i = lane / 8 % kHigh, j = lane / 8 / kHigh % kWide;
  tile += kExchanged ? (8 * j + row) * pitch + 8 * i : (8 * i + row) * pitch + 8 * j;
  MSL_UNROLL
  for (uint32_t down = 0; down < kDown; down += kHigh) {
    MSL_UNROLL
    for (uint32_t across = 0; across < kAcross; across += kWide) {
      uint32_t words[4];
      load_joined<kTransposed, kWide * kHigh>(
          words, tile + (kExchanged ? 8 * across * pitch + 8 * down : 8 * down * pitch + 8 * across));
      MSL_UNROLL
      for (int part = 0; part < kWide * kHigh; ++part)
        to[down + part % kHigh][across + part / kHigh].thread_elements() = bit_cast<metal::vec<T, 2>>(words[part]);
    }
  }
}

// The elements of a right operand: those of rows 2 c and 2 c + 1 in column r for lane 4 r + c.
template <class T>
METAL_FUNC void load_right(metal::simdgroup_matrix<T, 8, 8>& to, const T* tile, uint32_t down, uint32_t across) {
  tile += warp_lane() % 4 * 2 * down + warp_lane() / 4 * across;
  to.thread_elements() = metal::vec<T, 2>(tile[0], tile[down]);
}

// Two floats in each of two matrices below each other, as parts.
struct JoinedParts {
  Parts upper, lower;
};
// The same products as product_of_parts() adds, for two matrices below each other.
METAL_FUNC void add_product_of_parts(Accumulator& sum, const JoinedParts& a, const Parts& b) {
  Accumulator large = {}, small = {};
  add_products(small, bfloat(), a.upper.finite, a.upper.second, a.lower.finite, a.lower.second, b.third, b.third);
  add_products(small, bfloat(), a.upper.third, a.upper.second, a.lower.third, a.lower.second, b.finite, b.second);
  add_products(small, bfloat(), a.upper.second, a.upper.finite, a.lower.second, a.lower.finite, b.finite, b.second);
  add_product(large, bfloat(), a.upper.first, a.lower.first, b.first);
  MSL_UNROLL
  for (int i = 0; i < 2; ++i) {
    sum.upper[i] += large.upper[i] + small.upper[i];
    sum.lower[i] += large.lower[i] + small.lower[i];
  }
}

template <class T>
METAL_FUNC uint32_t word_of(const metal::simdgroup_matrix<T, 8, 8>& matrix) {
  return bit_cast<uint32_t>(matrix.thread_elements());
}

// sum += {upper[k], lower[k]} right[k][n], for one k or for k and k + 1.
template <uint32_t kJoined, class T, uint32_t kTerms, uint32_t kAcross>
METAL_FUNC void add_joined(Accumulator& sum, const metal::simdgroup_matrix<T, 8, 8>* upper,
                           const metal::simdgroup_matrix<T, 8, 8>* lower,
                           const metal::simdgroup_matrix<T, 8, 8> (&right)[kTerms][kAcross], uint32_t k, uint32_t n) {
  if constexpr (!is_16_bits<T>)
    add_product_of_parts(sum, {parts_of(upper[k].thread_elements()), parts_of(lower[k].thread_elements())},
                         parts_of(right[k][n].thread_elements()));
  else if constexpr (kJoined == 2)
    add_products(sum, T(), word_of(upper[k]), word_of(upper[k + 1]), word_of(lower[k]), word_of(lower[k + 1]),
                 word_of(right[k][n]), word_of(right[k + 1][n]));
  else
    add_product(sum, T(), word_of(upper[k]), word_of(lower[k]), word_of(right[k][n]));
}

// A pair of bfloats, halves or floats as sums of one, two or three pairs of bfloats. Floats that are not finite give
// NaN.
template <class T>
constexpr int parts_in = std::is_same_v<T, bfloat> ? 1
                         : std::is_same_v<T, half> ? 2
                                                   : 3;
struct Words {
  uint32_t part[3];
};
template <class T>
METAL_FUNC Words words_of(const metal::simdgroup_matrix<T, 8, 8>& matrix) {
  const auto pair = matrix.thread_elements();
  if constexpr (std::is_same_v<T, bfloat>) return {{word_of(matrix), 0, 0}};
  const Floats v(float(pair.x), float(pair.y)), rest = without_first_bits(v);
  return {{upper_halves(v), upper_halves(rest), upper_halves(without_first_bits(rest))}};
}

}  // namespace msl

namespace metal {

template <class T, uint32_t kDown, uint32_t kAcross>
METAL_FUNC void metalcore_load_matrices(simdgroup_matrix<T, 8, 8> (&to)[kDown][kAcross], const T* tile, uint32_t pitch,
                                        int) {
  if constexpr (msl::is_16_bits<T>) {
    msl::load_tile<false, false>(to, tile, pitch);
  } else {
    MSL_UNROLL
    for (uint32_t m = 0; m < kDown; ++m) {
      MSL_UNROLL
      for (uint32_t k = 0; k < kAcross; ++k) simdgroup_load(to[m][k], tile + 8 * m * pitch + 8 * k, pitch);
    }
  }
}

// A lane's two elements of a right operand are in one column of it: of the rows 2 c and 2 c + 1.
template <class T, uint32_t kDown, uint32_t kAcross>
METAL_FUNC void metalcore_load_right_matrices(simdgroup_matrix<T, 8, 8> (&to)[kDown][kAcross], const T* tile,
                                              uint32_t pitch, int) {
  if constexpr (msl::is_16_bits<T>) {
    msl::load_tile<true, false>(to, tile, pitch);
  } else {
    MSL_UNROLL
    for (uint32_t k = 0; k < kDown; ++k) {
      MSL_UNROLL
      for (uint32_t n = 0; n < kAcross; ++n) msl::load_right(to[k][n], tile + 8 * k * pitch + 8 * n, pitch, 1);
    }
  }
}
template <class T, uint32_t kDown, uint32_t kAcross>
METAL_FUNC void metalcore_load_right_transposed(simdgroup_matrix<T, 8, 8> (&to)[kDown][kAcross], const T* tile,
                                                uint32_t pitch, int) {
  if constexpr (msl::is_16_bits<T>) {
    msl::load_tile<false, true>(to, tile, pitch);
  } else {
    MSL_UNROLL
    for (uint32_t k = 0; k < kDown; ++k) {
      MSL_UNROLL
      for (uint32_t n = 0; n < kAcross; ++n) msl::load_right(to[k][n], tile + 8 * n * pitch + 8 * k, 1, pitch);
    }
  }
}

METAL_FUNC uint32_t metalcore_right_column(uint32_t row, int) { return msl::exchanged_row(row); }
template <class T>
METAL_FUNC void metalcore_make_right(simdgroup_matrix<T, 8, 8>& to, vec<T, 2> rows, uint32_t, int) {
  to.thread_elements() = rows;
}

template <class T, uint32_t kDown, uint32_t kDepth, uint32_t kTerms, uint32_t kAcross>
METAL_FUNC void metalcore_multiply_matrices(simdgroup_matrix<float, 8, 8> (&sums)[kDown][kAcross],
                                            const simdgroup_matrix<T, 8, 8> (&left)[kDown][kDepth], uint32_t first,
                                            const simdgroup_matrix<T, 8, 8> (&right)[kTerms][kAcross], int) {
  constexpr uint32_t kJoined = msl::is_16_bits<T> ? msl::joined_count(kTerms, 2) : 1;
  MSL_UNROLL
  for (uint32_t m = 0; m < kDown; m += 2) {
    // Below a single row of matrices are the same again, and nobody reads their sums.
    const uint32_t below = m + 1 < kDown ? m + 1 : m;
    msl::Accumulator joined[kAcross];
    MSL_UNROLL
    for (uint32_t n = 0; n < kAcross; ++n) {
      const msl::Floats upper = sums[m][n].thread_elements(), lower = sums[below][n].thread_elements();
      joined[n] = {{upper.x, upper.y}, {lower.x, lower.y}};
    }
    MSL_UNROLL
    for (uint32_t k = 0; k < kTerms; k += kJoined) {
      MSL_UNROLL
      for (uint32_t n = 0; n < kAcross; ++n)
        msl::add_joined<kJoined>(joined[n], left[m] + first, left[below] + first, right, k, n);
    }
    MSL_UNROLL
    for (uint32_t n = 0; n < kAcross; ++n) {
      sums[below][n].thread_elements() = msl::Floats(joined[n].lower[0], joined[n].lower[1]);
      sums[m][n].thread_elements() = msl::Floats(joined[n].upper[0], joined[n].upper[1]);
    }
  }
}

// Products of parts that a float's last bit does not show are left out, so that bfloats times floats are three
// products.
template <bool kFewTerms = false, class A, class B, uint32_t kDown, uint32_t kDepth, uint32_t kTerms, uint32_t kAcross>
METAL_FUNC void metalcore_multiply_mixed(simdgroup_matrix<float, 8, 8> (&sums)[kDown][kAcross],
                                         const simdgroup_matrix<A, 8, 8> (&left)[kDown][kDepth], uint32_t first,
                                         const simdgroup_matrix<B, 8, 8> (&right)[kTerms][kAcross], int) {
  constexpr uint32_t kJoined = msl::joined_count(kTerms, 2);
  // Products that do not wait for each other, as far as their parts do not take many registers.
  constexpr uint32_t kTogether = msl::joined_count(kAcross, msl::parts_in<B> == 1 ? 4 : 2);
  MSL_UNROLL
  for (uint32_t m = 0; m < kDown; m += 2) {
    const uint32_t below = m + 1 < kDown ? m + 1 : m;
    MSL_UNROLL
    for (uint32_t k = 0; k < kTerms; k += kJoined) {
      const uint32_t next = k + kJoined - 1;
      const msl::Words upper = msl::words_of(left[m][first + k]), lower = msl::words_of(left[below][first + k]);
      const msl::Words upper_next = msl::words_of(left[m][first + next]),
                       lower_next = msl::words_of(left[below][first + next]);
      MSL_UNROLL
      for (uint32_t begin = 0; begin < kAcross; begin += kTogether) {
        msl::Words terms[kTogether], terms_next[kTogether];
        msl::Accumulator found[kTogether] = {};
        MSL_UNROLL
        for (uint32_t n = 0; kFewTerms && n < kTogether; ++n) {
          const msl::Floats high = sums[m][begin + n].thread_elements(), low = sums[below][begin + n].thread_elements();
          found[n] = {{high.x, high.y}, {low.x, low.y}};
        }
        MSL_UNROLL
        for (uint32_t n = 0; n < kTogether; ++n) {
          terms[n] = msl::words_of(right[k][begin + n]);
          terms_next[n] = msl::words_of(right[next][begin + n]);
        }
        MSL_UNROLL
        for (int parts = 2; parts >= 0; --parts) {
          MSL_UNROLL
          for (int i = 0; i <= parts; ++i) {
            const int j = parts - i;
            if (i >= msl::parts_in<A> || j >= msl::parts_in<B>) continue;
            MSL_UNROLL
            for (uint32_t n = 0; n < kTogether; ++n) {
              if constexpr (kJoined == 2)
                msl::add_products(found[n], bfloat(), upper.part[i], upper_next.part[i], lower.part[i],
                                  lower_next.part[i], terms[n].part[j], terms_next[n].part[j]);
              else
                msl::add_product(found[n], bfloat(), upper.part[i], lower.part[i], terms[n].part[j]);
            }
          }
        }
        MSL_UNROLL
        for (uint32_t n = 0; n < kTogether; ++n) {
          auto& of_upper = sums[m][begin + n].thread_elements();
          auto& of_lower = sums[below][begin + n].thread_elements();
          const msl::Accumulator& own = found[n];
          if constexpr (kFewTerms) {
            of_lower = msl::Floats(own.lower[0], own.lower[1]);
            of_upper = msl::Floats(own.upper[0], own.upper[1]);
          } else {
            const msl::Floats high = of_upper, low = of_lower;
            of_lower = msl::Floats(low.x + own.lower[0], low.y + own.lower[1]);
            of_upper = msl::Floats(high.x + own.upper[0], high.y + own.upper[1]);
          }
        }
      }
    }
  }
}

}  // namespace metal

#endif
