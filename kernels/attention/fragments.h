// Tiles of rows in threadgroup memory, and fragments: simdgroup_matrix of 8 by 8, of which a lane holds some elements.
#pragma once

#include "../common/matrices.h"
#include "../common/pack.h"
#include "sequence.h"
#include <metal_stdlib>
#include <metal_simdgroup_matrix>

// Rows first to first + kRows - 1 on their way into a tile, whose rows are kPitch apart: a thread's share of them. Rows
// from `count` on, and elements from `size` on, are zero. All threads of the threadgroup take part.
template <typename T, uint kRows, uint kSize, uint kPitch, uint kThreads, typename Rows>
struct RowsAhead {
  static constexpr constant uint kPack = 16 / sizeof(T), kPacks = kSize / kPack;
  static constexpr constant uint kShare = (kRows * kPacks + kThreads - 1) / kThreads;
  // A thread's packs are in one column, kStep rows apart, and every one of them is in the tile.
  static constexpr constant bool kColumn = kThreads % kPacks == 0 && kRows * kPacks % kThreads == 0;
  static constexpr constant uint kStep = kThreads / kPacks;

  Rows rows;
  uint count, size;
  bool vectors;  // else elements are loaded where they are stored
  uint thread_index;
  Pack<T> packs[kShare];

  METAL_FUNC RowsAhead(Rows rows, uint count, uint size, bool vectors, uint thread_index)
      : rows(rows), count(count), size(size), vectors(vectors), thread_index(thread_index) {}

  METAL_FUNC void load(uint first) {
    if (!vectors) return;
    if (kColumn && size == kSize && first + kRows <= count) {  // mostly: no row or element is missing
      device const T* from = rows.row(first + thread_index / kPacks) + thread_index % kPacks * kPack;
#pragma unroll
      for (uint s = 0; s < kShare; ++s) {
        packs[s] = *reinterpret_cast<device const Pack<T>*>(from);
        from += kStep * rows.stride;
      }
      return;
    }
#pragma unroll
    for (uint s = 0; s < kShare; ++s) {
      const uint index = s * kThreads + thread_index, row = first + index / kPacks, column = index % kPacks * kPack;
      packs[s] = Pack<T>();
      if (row < count && column < size && index < kRows * kPacks)
        packs[s] = *reinterpret_cast<device const Pack<T>*>(rows.row(row) + column);
    }
  }
  METAL_FUNC void store(threadgroup T* tile, uint first) const {
    if (vectors) {
      threadgroup T* const to = tile + thread_index / kPacks * kPitch + thread_index % kPacks * kPack;
#pragma unroll
      for (uint s = 0; s < kShare; ++s) {
        const uint index = s * kThreads + thread_index;
        if (kColumn)
          *reinterpret_cast<threadgroup Pack<T>*>(to + s * kStep * kPitch) = packs[s];
        else if (index < kRows * kPacks)
          *reinterpret_cast<threadgroup Pack<T>*>(tile + index / kPacks * kPitch + index % kPacks * kPack) = packs[s];
      }
      return;
    }
    for (uint index = thread_index; index < kRows * kSize; index += kThreads) {
      const uint row = first + index / kSize, column = index % kSize;
      tile[index / kSize * kPitch + column] = row < count && column < size ? rows.row(row)[column] : T(0.0f);
    }
  }
};

// Loads rows first to first + kRows - 1 into a tile.
template <typename T, uint kRows, uint kSize, uint kPitch, uint kThreads, typename Rows>
METAL_FUNC void load_rows(threadgroup T* tile, Rows rows, uint first, uint count, uint size, bool vectors,
                          uint thread_index) {
  using Ahead = RowsAhead<T, kRows, kSize, kPitch, kThreads, Rows>;
  if (vectors) {
    Ahead ahead(rows, count, size, true, thread_index);
    ahead.load(first);
    ahead.store(tile, first);
  } else {
    Ahead(rows, count, size, false, thread_index).store(tile, first);
  }
}
// The same between barriers: all threads are done with what was in the tile, and see what comes.
template <typename T, uint kRows, uint kSize, uint kPitch, uint kThreads, typename Rows>
METAL_FUNC void exchange_rows(threadgroup T* tile, Rows rows, uint first, uint count, uint size, bool vectors,
                              uint thread_index) {
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  load_rows<T, kRows, kSize, kPitch, kThreads>(tile, rows, first, count, size, vectors, thread_index);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// Rounds sums to operands of the next product.
template <typename T, uint kDown, uint kAcross>
METAL_FUNC void round_to(thread Fragments<T, kDown, kAcross>& rounded, thread Fragments<float, kDown, kAcross>& sums) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) elements(rounded.at[m][n]) = metal::vec<T, 2>(elements(sums.at[m][n]));
  }
}

// Floats of a tile of any type. Their matrices are loaded and multiplied one by one, as Apple's GPUs do that.
template <uint kDown, uint kAcross>
struct Floats {
  metal::simdgroup_matrix<float, 8, 8> at[kDown][kAcross];
};
template <uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void load(thread Floats<kDown, kAcross>& floats, threadgroup const T* tile) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      metal::simdgroup_matrix<T, 8, 8> one;
      metal::simdgroup_load(one, tile + m * 8 * kPitch + n * 8, kPitch);
      elements(floats.at[m][n]) = metal::float2(elements(one));
    }
  }
}
// Loads a tile whose rows are columns: at[k][n] is at row 8 n and column 8 k.
template <uint kPitch, typename T, uint kTerms, uint kAcross>
METAL_FUNC void load_transposed(thread Floats<kTerms, kAcross>& floats, threadgroup const T* tile) {
#pragma unroll
  for (uint k = 0; k < kTerms; ++k) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      metal::simdgroup_matrix<T, 8, 8> one;
      metal::simdgroup_load(one, tile + n * 8 * kPitch + k * 8, kPitch, ulong2(0), true);
      elements(floats.at[k][n]) = metal::float2(elements(one));
    }
  }
}
template <typename Left, uint kDown, uint kTerms, uint kAcross>
METAL_FUNC void multiply(thread Fragments<float, kDown, kAcross>& sums, thread const Left& a, uint first,
                         thread const Floats<kTerms, kAcross>& b) {
  metalcore_multiply_matrices(sums.at, a.at, first, b.at, 0L);
}

// The rows of a narrow kernel's simdgroup, which stay in threadgroup memory.
template <typename T, uint kDown, uint kDepth>
struct SharedRows {
  threadgroup const T* first;
};
// The same of a wide kernel, whose registers do not hold them beside its sums.
template <typename T, uint kDown, uint kDepth>
struct RowsInTile {
  threadgroup const T* first;
};
template <uint kPitch, typename T, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void multiply_rows(thread Fragments<float, kDown, kAcross>& sums,
                              thread const RowsInTile<T, kDown, kDepth>& a, uint first,
                              thread const RightFragments<T, kTerms, kAcross>& b) {
  Fragments<T, kDown, kTerms> terms;
  load<kPitch>(terms, a.first + first * 8);
  multiply(sums, terms, 0, b);
}
template <uint kPitch, typename T, typename Right, uint kDown, uint kDepth, uint kAcross>
METAL_FUNC void multiply_rows(thread Fragments<float, kDown, kAcross>& sums,
                              thread const Fragments<T, kDown, kDepth>& a, uint first, thread const Right& b) {
  multiply(sums, a, first, b);
}
template <uint kPitch, typename T, uint kDown, uint kDepth, uint kTerms, uint kAcross>
METAL_FUNC void multiply_rows(thread Fragments<float, kDown, kAcross>& sums,
                              thread const SharedRows<T, kDown, kDepth>& a, uint first,
                              thread const Floats<kTerms, kAcross>& b) {
  Floats<kDown, kTerms> terms;
  load<kPitch>(terms, a.first + first * 8);
  multiply(sums, terms, 0, b);
}

// c = a bᵀ, where b is the tile's first 8 * kAcross rows, of which a Right takes some columns at once. The product is a
// sum of those of kPart columns.
template <typename Right, uint kDepth, uint kPart, uint kTerms, uint kPitch, typename Rows, typename T, uint kDown,
          uint kAcross>
METAL_FUNC void sum_of_parts(thread Fragments<float, kDown, kAcross>& c, thread const Rows& a,
                             threadgroup const T* tile) {
  clear(c);
#pragma unroll
  for (uint begin = 0; begin < kDepth; begin += kPart) {
    Fragments<float, kDown, kAcross> part;
    clear(part);
#pragma unroll
    for (uint k = begin; k < begin + kPart; k += kTerms) {
      Right b;
      load_transposed<kPitch>(b, tile + k * 8);
      multiply_rows<kPitch>(part, a, k, b);
    }
    if (kPart == kDepth) {
      c = part;
      return;
    }
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) elements(c.at[m][n]) += elements(part.at[m][n]);
    }
  }
}
// Sums of float are made of shorter ones, which loses fewer bits.
template <uint kPitch, template <typename, uint, uint> class Rows, typename T, uint kDown, uint kDepth, uint kAcross>
METAL_FUNC void product_transposed(thread Fragments<float, kDown, kAcross>& c, thread const Rows<T, kDown, kDepth>& a,
                                   threadgroup const T* tile) {
  constexpr uint kPart = sizeof(T) == 4 ? 4 : kDepth, kTerms = kDown == 1 ? 4 : 2;
  sum_of_parts<RightFragments<T, kTerms, kAcross>, kDepth, kPart, kTerms, kPitch>(c, a, tile);
}
template <uint kPitch, typename T, uint kDown, uint kDepth, uint kAcross>
METAL_FUNC void product_transposed(thread Fragments<float, kDown, kAcross>& c,
                                   thread const SharedRows<T, kDown, kDepth>& a, threadgroup const T* tile) {
  sum_of_parts<Floats<1, kAcross>, kDepth, 4, 1, kPitch>(c, a, tile);
}

// c = factors c + a b, where b is the tile's first 8 * kDepth rows. The product is summed by itself: a sum over all
// tiles would lose the bits of many small products. Narrow kernels have floats in a, and any type in b.
template <uint kPitch, bool kNarrow, typename M, typename T, uint kDown, uint kDepth, uint kAcross>
METAL_FUNC void add_product(thread Fragments<float, kDown, kAcross>& c, thread const float* factors,
                            thread const Fragments<M, kDown, kDepth>& a, threadgroup const T* tile) {
  constexpr uint kTerms = kNarrow ? 1 : kDown == 1 ? kDepth : kDepth % 2 == 0 ? 2 : 1, kColumns = 4;
  using Right = metal::conditional_t<kNarrow, Floats<kTerms, kColumns>, RightFragments<T, kTerms, kColumns>>;
#pragma unroll
  for (uint n = 0; n < kAcross; n += kColumns) {
    Fragments<float, kDown, kColumns> product;
    clear(product);
#pragma unroll
    for (uint k = 0; k < kDepth; k += kTerms) {
      Right b;
      load<kPitch>(b, tile + k * 8 * kPitch + n * 8);
      multiply(product, a, k, b);
    }
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint i = 0; i < kColumns; ++i)
        elements(c.at[m][n + i]) =
            metal::fma(elements(c.at[m][n + i]), metal::float2(factors[m]), elements(product.at[m][i]));
    }
  }
}

// c += a b in the sums themselves, which lose bits that 16 bits of a result do not have.
template <uint kPitch, typename T, uint kDown, uint kDepth, uint kAcross>
METAL_FUNC void add_to_sums(thread Fragments<float, kDown, kAcross>& c, thread const Fragments<T, kDown, kDepth>& a,
                            threadgroup const T* tile) {
  constexpr uint kTerms = 2, kColumns = 4;
#pragma unroll
  for (uint n = 0; n < kAcross; n += kColumns) {
    Fragments<float, kDown, kColumns> part;
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint i = 0; i < kColumns; ++i) part.at[m][i] = c.at[m][n + i];
    }
#pragma unroll
    for (uint k = 0; k < kDepth; k += kTerms) {
      RightFragments<T, kTerms, kColumns> b;
      load<kPitch>(b, tile + k * 8 * kPitch + n * 8);
      multiply(part, a, k, b);
    }
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint i = 0; i < kColumns; ++i) c.at[m][n + i] = part.at[m][i];
    }
  }
}

// Loads the 8 * kDown rows of each simdgroup by way of a tile of kRows rows, which several may share in turn.
template <uint kRows, uint kPitch, uint kSimds, typename T, uint kDown, uint kAcross, typename Rows>
METAL_FUNC void load_by_tile(thread Fragments<T, kDown, kAcross>& fragments, threadgroup T* tile, Rows rows, uint first,
                             uint count, uint size, bool vectors, uint thread_index, uint simd) {
#pragma unroll
  for (uint begin = 0; begin < 8 * kDown * kSimds; begin += kRows) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_rows<T, kRows, 8 * kAcross, kPitch, 32 * kSimds>(tile, rows, first + begin, count, size, vectors,
                                                          thread_index);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const uint row = simd * 8 * kDown;
    if (row >= begin && row < begin + kRows) load<kPitch>(fragments, tile + (row - begin) * kPitch);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// Loads rows that stay in `own`: no tile takes a part.
template <uint kPitch, uint kSimds, uint kDown, uint kAcross, typename T, typename Rows>
METAL_FUNC threadgroup const T* load_own(threadgroup T* own, Rows rows, uint first, uint count, uint size, bool vectors,
                                         uint thread_index, uint simd) {
  exchange_rows<T, 8 * kDown * kSimds, 8 * kAcross, kPitch, 32 * kSimds>(own, rows, first, count, size, vectors,
                                                                         thread_index);
  return own + simd * 8 * kDown * kPitch;
}
template <uint kRows, uint kPitch, uint kSimds, typename T, uint kDown, uint kAcross, typename Rows>
METAL_FUNC void load_by_tile(thread SharedRows<T, kDown, kAcross>& shared, threadgroup T* own, Rows rows, uint first,
                             uint count, uint size, bool vectors, uint thread_index, uint simd) {
  shared.first = load_own<kPitch, kSimds, kDown, kAcross>(own, rows, first, count, size, vectors, thread_index, simd);
}
template <uint kRows, uint kPitch, uint kSimds, typename T, uint kDown, uint kAcross, typename Rows>
METAL_FUNC void load_by_tile(thread RowsInTile<T, kDown, kAcross>& shared, threadgroup T* own, Rows rows, uint first,
                             uint count, uint size, bool vectors, uint thread_index, uint simd) {
  shared.first = load_own<kPitch, kSimds, kDown, kAcross>(own, rows, first, count, size, vectors, thread_index, simd);
}
// What a kernel has of its simdgroup's rows.
template <bool kNarrow, typename T, uint kDown, uint kDepth, bool kInTile = false>
using OwnRows =
    metal::conditional_t<kNarrow, SharedRows<T, kDown, kDepth>,
                         metal::conditional_t<kInTile, RowsInTile<T, kDown, kDepth>, Fragments<T, kDown, kDepth>>>;

template <uint kDown>
METAL_FUNC void fill(thread float (&values)[kDown], float value) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) values[m] = value;
}

// Writes factors[m] times the sums to rows of a tensor, and to those of `rests` what rounding takes from them. Rows
// from `count` on, and elements from `size` on, do not exist.
template <bool kRests, typename T, uint kDown, uint kAcross>
METAL_FUNC void store(thread Fragments<float, kDown, kAcross>& sums, thread const float* factors, device T* tensor,
                      int64_t stride, device T* rests, int64_t rests_stride, uint first, uint count, uint size,
                      Place place) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    const uint row = first + m * 8 + place.row;
    if (row >= count) continue;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const uint column = n * 8 + place.column;
      const int64_t to = int64_t(row) * stride + column, rest_to = int64_t(row) * rests_stride + column;
      const metal::float2 values = elements(sums.at[m][n]) * factors[m];
      if (column < size) tensor[to] = T(values.x);
      if (column + 1 < size) tensor[to + 1] = T(values.y);
      if (kRests) {
        if (column < size) rests[rest_to] = T(values.x - float(T(values.x)));
        if (column + 1 < size) rests[rest_to + 1] = T(values.y - float(T(values.y)));
      }
    }
  }
}
template <typename T, uint kDown, uint kAcross>
METAL_FUNC void store(thread Fragments<float, kDown, kAcross>& sums, thread const float* factors, device T* tensor,
                      int64_t stride, uint first, uint count, uint size, Place place) {
  store<false>(sums, factors, tensor, stride, tensor, stride, first, count, size, place);
}
