// Tiles of operands in threadgroup memory. Whichever way an operand lies in memory, its tile is stored in rows: a
// thread holds two neighbouring packs of 16 bytes, and stores them as they are or, by pairs, across.
#pragma once

#include <metal_stdlib>

#include "common/matrices.h"
#include "common/pack.h"
#include "gemm/gemm.h"

// Where an operand lies: distances of rows and of columns. Where there are packs, one of the two is 1.
template <typename T>
struct Source {
  device const T* first;
  int64_t row, column;
  bool packs;
};

// What a thread holds of a tile.
template <typename T>
struct Held {
  Pack<T> packs[2];

  // Element k of both packs, as they lie side by side in memory.
  using Pair = metal::conditional_t<sizeof(T) == 4, metal::uint2, uint>;
  Pair pair(uint k) const thread {
    if constexpr (sizeof(T) == 4) return Pair(packs[0].words[k], packs[1].words[k]);
    const uint first = packs[0].words[k / 2], second = packs[1].words[k / 2];
    return Pair(k % 2 == 0 ? (first & 0xffffu) | second << 16 : first >> 16 | (second & 0xffff0000u));
  }
  // Sets an element, once those before it are set.
  void set(uint pack, uint k, T element) thread {
    if constexpr (sizeof(T) == 4)
      packs[pack].words[k] = as_type<uint>(element);
    else if (k % 2 == 0)
      packs[pack].words[k / 2] = as_type<ushort>(element);
    else
      packs[pack].words[k / 2] |= uint(as_type<ushort>(element)) << 16;
  }
};

// Where the tiles of a threadgroup begin, and where the operand ends.
struct Span {
  uint row, column, end_row, end_column;
};

// The tiles of kRows by kColumns of an operand, one behind the other along the terms of the sums, which are its columns
// or else its rows. Terms that do not exist are zero. Of the other dimension the last ones stand for those that do not
// exist, whose sums nobody stores. With kOnlyPacks there always are packs. kReaders threads read packs next to each
// other, or as many as a row or column of the tile has.
template <typename T, uint kRows, uint kColumns, bool kColumnsAreTerms, uint kThreads = GEMM_THREADS,
          bool kOnlyPacks = false, uint kReaders = 2>
struct Tiles {
  static constexpr constant uint kPack = kPackElements<T>;
  static constexpr constant uint kStep = kColumnsAreTerms ? kColumns : kRows;
  static constexpr constant uint kPitch = kColumns + 8;  // the rows of a matrix lie in different banks
  static constexpr constant uint kSize = kRows * kPitch;
  static_assert(kRows * kColumns == 2 * kPack * kThreads, "a thread has two packs");

  Source<T> source;
  Span span;
  bool across;  // whether packs lie along rows
  Place place;  // of the thread's first element in a tile
  device const T* from[2];
  uint term[2];

  // A thread has the packs of two rows, or of two columns.
  Tiles(Source<T> source, Span span, uint thread_index) : source(source), span(span), across(source.column == 1) {
    const uint pairs = (across ? kRows : kColumns) / 2;
    // What more than four threads read along a column and store across would meet in the banks.
    const uint readers = metal::min(kReaders, across ? kColumns / kPack : metal::min(kRows / kPack, 4u));
    const uint pack = thread_index % readers + thread_index / (readers * pairs) * readers;
    const uint pair = thread_index / readers % pairs;
    place = across ? Place{2 * pair, pack * kPack} : Place{pack * kPack, 2 * pair};
    const uint last = kColumnsAreTerms ? span.end_row - (across ? 1 : kPack) : span.end_column - (across ? kPack : 1);
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const uint row = span.row + place.row + (across ? i : 0), column = span.column + place.column + (across ? 0 : i);
      term[i] = kColumnsAreTerms ? column : row;
      from[i] = source.first + (kColumnsAreTerms ? metal::min(row, last) : row) * source.row +
                (kColumnsAreTerms ? column : metal::min(column, last)) * source.column;
    }
  }

  // Loads what the thread has of the next tile.
  Held<T> load() thread {
    Held<T> held;
    if (!kOnlyPacks && !source.packs) return held;
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      held.packs[i] = Pack<T>();
      if (term[i] < (kColumnsAreTerms ? span.end_column : span.end_row))
        held.packs[i] = *reinterpret_cast<device const Pack<T>*>(from[i]);
      term[i] += kStep;
      from[i] += kStep * (kColumnsAreTerms ? source.column : source.row);
    }
    return held;
  }

  // Stores it. Where there are no packs, the elements come here by themselves.
  void store(threadgroup T* tile, thread const Held<T>& held, uint step, uint thread_index) const thread {
    threadgroup T* const to = tile + place.row * kPitch + place.column;
    if (!kOnlyPacks && !source.packs) {
      store_elements(tile, step * kStep, thread_index);
    } else if (across) {
      // NVIDIA's compiler stores by pairs at an address that pairs below are stored at as well. Four words of 16-bit
      // elements would meet in the banks; for float32 whole packs would cost a third of the threads, by their
      // registers.
      constexpr bool kApart = sizeof(T) == 2;
      const uint first = place.row * (kPitch / kPack) + place.column / kPack;
      threadgroup Pack<T>* const packs =
          kApart ? reinterpret_cast<threadgroup Pack<T>*>(tile) + first : reinterpret_cast<threadgroup Pack<T>*>(to);
#pragma unroll
      for (uint i = 0; i < 2; ++i) packs[i * (kPitch / kPack)] = held.packs[i];
    } else {
#pragma unroll
      for (uint k = 0; k < kPack; ++k)
        *reinterpret_cast<threadgroup typename Held<T>::Pair*>(to + k * kPitch) = held.pair(k);
    }
  }
  void store_elements(threadgroup T* tile, uint terms, uint thread_index) const thread {
#pragma unroll(1)
    for (uint i = thread_index; i < kRows * kColumns; i += kThreads) {
      const uint in_row = across ? i / kColumns : i % kRows, in_column = across ? i % kColumns : i / kRows;
      const uint row = span.row + in_row + (kColumnsAreTerms ? 0 : terms);
      const uint column = span.column + in_column + (kColumnsAreTerms ? terms : 0);
      const T value = source.first[metal::min(row, span.end_row - 1) * source.row +
                                   metal::min(column, span.end_column - 1) * source.column];
      const bool exists = kColumnsAreTerms ? column < span.end_column : row < span.end_row;
      tile[in_row * kPitch + in_column] = exists ? value : T(0.0f);
    }
  }
};

// What a simdgroup sums: 8 kDown rows by 8 kAcross columns of a threadgroup's tile of the result, which has kBeside
// simdgroups side by side.
template <uint kDown, uint kAcross, uint kBeside>
struct Sums {
  Fragments<float, kDown, kAcross> sums;
  uint below, row, column;

  // Apple's compiler takes no member of a constructor's object for one of a thread, as clear() asks for.
  Sums(uint simdgroup) : below(simdgroup / kBeside), row(below * 8 * kDown), column(simdgroup % kBeside * 8 * kAcross) {
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) sums.at[m][n] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  // Adds the products of a tile's terms.
  template <typename Left, typename Right, typename T>
  void add(threadgroup const T* left, threadgroup const T* right) thread {
    constexpr uint kDepth = Left::kStep < 16 ? 1 : 2;
#pragma unroll
    for (uint k = 0; k < Left::kStep; k += 8 * kDepth) {
      Fragments<T, kDown, kDepth> l;
      RightFragments<T, kDepth, kAcross> r;
      load<Left::kPitch>(l, left + row * Left::kPitch + k);
      load<Right::kPitch>(r, right + k * Right::kPitch + column);
      multiply(sums, l, 0, r);
    }
  }

  // Stores 8 kPart rows, from `first` matrices below the first row on. Those of the simdgroups lie below each other.
  template <uint kPart>
  void store(threadgroup float* to, uint pitch, uint first) const thread {
#pragma unroll
    for (uint m = 0; m < kPart; ++m) {
#pragma unroll
      for (uint n = 0; n < kAcross; ++n)
        metal::simdgroup_store(sums.at[first + m][n], to + 8 * (below * kPart + m) * pitch + column + 8 * n, pitch);
    }
  }
};
