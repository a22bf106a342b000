// Products that the kernel of chunks' gradients is made of. A threadgroup has DELTA_CHUNK_THREADS threads, and the sums
// of a simdgroup stay in registers.
#pragma once

#include "sequence/delta_tiles.h"

constexpr constant uint kThreads = DELTA_CHUNK_THREADS;
constexpr constant uint kRows = 128;                          // of a state, which a chunk's positions meet at once
constexpr constant uint kWidth = 32, kPitch = kWidth + 8;     // of the columns that tiles have at once
constexpr constant uint kTall = kChunk + 4;                   // pitch of products of positions
constexpr constant uint kMemory = (kRows + kChunk) * kPitch;  // floats of tiles

// A simdgroup has 16 positions, and a half of the keys or of the other positions, in parts of four fragments.
using Part = Fragments<float, 2, 4>;
struct Share {
  uint row, half;
  Place place;

  Share(uint thread_index)
      : row(thread_index / 32 % kSimdgroups * kOwn),
        half(thread_index / 32 / kSimdgroups),
        place(place_of(thread_index % 32)) {}
  // The row of a lane in sums, and the column of its first element.
  uint row_of(uint m) const { return row + m * 8 + place.row; }
  template <uint N>
  uint column_of(uint part, uint n) const {
    return (half * N + part) * 32 + n * 8 + place.column;
  }
};

template <uint N>
inline void clear(thread Part (&sums)[N]) {
#pragma unroll
  for (uint part = 0; part < N; ++part) clear(sums[part]);
}

template <typename F>
inline void scale_rows(thread Part (&sums)[2], F factors, float factor, uint lane) {
  scale_rows(sums[0], factors, factor, lane);
  scale_rows(sums[1], factors, factor, lane);
}

// sums = a bᵀ of rows in device memory.
template <uint N, typename T, typename U>
inline void multiply_rows(thread Part (&sums)[N], threadgroup float* tiles, device const T* a, long stride, uint count,
                          device const U* b, long b_stride, uint b_count, uint size, bool wide, Share share,
                          uint thread_index) {
  threadgroup U* const others = reinterpret_cast<threadgroup U*>(tiles);
  threadgroup T* const own = reinterpret_cast<threadgroup T*>(tiles + kRows * kPitch);
  clear(sums);
  for (uint first = 0; first < size; first += kWidth) {
    Lines<kWidth, kPitch, U, kWidth, 64 * N, kThreads> other_lines;
    Lines<kWidth, kPitch, T, kWidth, kChunk, kThreads> own_lines;
    if (wide) {
      other_lines.load(b, b_stride, b_count, first, size, thread_index);
      own_lines.load(a, stride, count, first, size, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (wide) {
      other_lines.store(others, thread_index);
      own_lines.store(own, thread_index);
    } else {
      fetch_rows<kWidth, kPitch, kWidth, 64 * N, kThreads>(others, b, b_stride, b_count, first, size, false,
                                                           thread_index);
      fetch_rows<kWidth, kPitch, kWidth, kChunk, kThreads>(own, a, stride, count, first, size, false, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint term = 0; term < kWidth; term += 16) {
      Fragments<T, 2, 2> rows;
      load<kPitch>(rows, own + share.row * kPitch + term);
#pragma unroll
      for (uint part = 0; part < N; ++part) {
        RightFragments<U, 2, 4> terms;
        load_transposed<kPitch>(terms, others + (share.half * N + part) * 32 * kPitch + term);
        if constexpr (sizeof(U) == 4)
          metalcore_multiply_mixed(sums[part].at, rows.at, 0, terms.at, 0);  // fewer parts, as in add_lower()
        else
          multiply(sums[part], rows, 0, terms);
      }
    }
  }
}
// The same where `a` is `narrow` or `wide`.
template <uint N, typename T>
inline void multiply_rows(thread Part (&sums)[N], threadgroup float* tiles, device const T* narrow,
                          device const float* wide, bool is_narrow, long stride, uint count, device const float* b,
                          long b_stride, uint b_count, uint size, bool vectors, Share share, uint thread_index) {
  if (is_narrow)
    multiply_rows(sums, tiles, narrow, stride, count, b, b_stride, b_count, size, vectors, share, thread_index);
  else
    multiply_rows(sums, tiles, wide, stride, count, b, b_stride, b_count, size, vectors, share, thread_index);
}

// sums += sign (a b or aᵀ b), where a is the lower triangular tile of scores, and b has rows in device memory, times
// factors.
template <bool TRANSPOSED, typename T>
inline void add_scores(thread Part (&sums)[2], threadgroup const float* scores, threadgroup float* memory, float sign,
                       device const T* x, long stride, uint count, uint first_column, uint size, bool wide,
                       threadgroup const float* factors, Share share, uint thread_index) {
  constexpr uint kPart = 64 / sizeof(T), kTerms = 4 / sizeof(T), kRight = kRows + 16 / sizeof(T);
  threadgroup T* const tile = reinterpret_cast<threadgroup T*>(memory);
#pragma unroll 1
  for (uint first = 0; first < kChunk; first += kPart) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kRows, kRight, kRows, kPart, kThreads>(tile, x + first * stride, stride, max(count, first) - first,
                                                      first_column, size, wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint term = first; term < first + kPart; term += kTerms * 8) {
      if (TRANSPOSED ? term + kTerms * 8 <= share.row : term >= share.row + kOwn) continue;  // zeros
      Fragments<float, 2, kTerms> rows;
#pragma unroll
      for (uint k = 0; k < kTerms; ++k) {
        threadgroup const float* const factor = factors + term + k * 8 + share.place.column;
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          const uint row = share.row + m * 8;
          if (TRANSPOSED)
            simdgroup_load(rows.at[m][k], scores + (term + k * 8) * kTall + row, kTall, ulong2(0), true);
          else
            simdgroup_load(rows.at[m][k], scores + row * kTall + term + k * 8, kTall);
          elements(rows.at[m][k]) *= float2(factor[0], factor[1]) * sign;
        }
      }
#pragma unroll
      for (uint part = 0; part < 2; ++part) {
        RightFragments<T, kTerms, 4> terms;
        load<kRight>(terms, tile + (term - first) * kRight + (share.half * 2 + part) * 32);
        multiply(sums[part], rows, 0, terms);
      }
    }
  }
}

// Adds the products of the rows of sums, times a factor, and of x, with its inverse lengths.
template <typename T>
inline void add_dots(thread float (&products)[2], thread Part (&sums)[2], float factor, device const T* x, long stride,
                     threadgroup const float* lengths, uint count, uint first_column, uint size, bool wide,
                     Share share) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = share.row_of(m);
    device const T* const other = x + row * stride;
    float product = 0.0f;
#pragma unroll
    for (uint part = 0; part < 2; ++part) {
      const uint column = first_column + share.column_of<2>(part, 0);
      if (row < count && wide) {
        vec<T, 2> others[4];  // no load waits behind a branch
#pragma unroll
        for (uint n = 0; n < 4; ++n)
          others[n] = *reinterpret_cast<device const vec<T, 2>*>(other + min(column + n * 8, size - 2));
#pragma unroll
        for (uint n = 0; n < 4; ++n)
          product += column + n * 8 < size ? dot(elements(sums[part].at[m][n]), static_cast<float2>(others[n])) : 0.0f;
      } else if (row < count) {
#pragma unroll
        for (uint n = 0; n < 4; ++n)
          product += dot(elements(sums[part].at[m][n]), pair_of(other + column + n * 8, rest_of(column + n * 8, size)));
      }
    }
    product += simd_shuffle_xor(product, 1);  // over the lanes of the row
    product += simd_shuffle_xor(product, 8);
    products[m] += product * lengths[row] * factor;
  }
}

// Writes the rows of sums that there are.
inline void put(thread Part (&sums)[2], device float* to, long stride, uint count, uint first_column, uint size,
                bool wide, Share share) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = share.row_of(m);
    device float* const own = to + row * stride;
#pragma unroll
    for (uint part = 0; part < 2; ++part) {
#pragma unroll
      for (uint n = 0; n < 4; ++n) {
        const uint column = first_column + share.column_of<2>(part, n), rest = row < count ? rest_of(column, size) : 0;
        const float2 pair = elements(sums[part].at[m][n]);
        if (!wide)
          put_pair(own + column, pair, rest);
        else if (rest > 0)
          *reinterpret_cast<device float2*>(own + column) = pair;
      }
    }
  }
}

// Puts products of positions into a tile.
inline void store_scores(thread Part (&products)[1], threadgroup float* scores, Share share) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < 4; ++n)
      simdgroup_store(products[0].at[m][n], scores + (share.row + m * 8) * kTall + share.half * 32 + n * 8, kTall);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
