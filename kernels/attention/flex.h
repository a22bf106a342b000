// Attention with functions that a caller has written (FlexAttention: Dong et al., "Flex Attention", 2024): one changes
// a score, and one says which keys a query sees. metalcore/flex makes MSL of them, and kernels of these templates.
//
// `Mods` has them as methods of a score, its gradient, and the numbers of a batch item, a head, a query and a key:
//   float score(float score, int b, int h, int q, int k) const;
//   float derivative(float score, float gradient, int b, int h, int q, int k) const;  // that of the unchanged score
//   int2 ends(int b, int h, int q) const;  // of the keys that a query may see, where kEnds says that there are such
//   Column column(int b, int h, int k) const;  // what the mask finds for a key, where kColumns says that it finds any
//   Row row(int b, int h, int q) const;  // what it finds for a query
//   bool alike(Column a, Column b) const;  // kByColumn says that the mask reads nothing else of a key
//   bool mask(int b, int h, int q, int k, Column of_key, Row of_query) const;  // what else is true of a score that
//                                                                              // counts, where kMask says so
// For the gradients of keys and values, `ends` is that of the queries that may see a key, `column` is that of a query,
// and `row` that of a key.
// For the gradients of what the first captures: see flex_captured.h.
#pragma once

#include "flex_walk.h"
#include "fragments.h"
#include "logarithm.h"

// The place of a query's number among those of all.
METAL_FUNC int64_t flex_number(constant FlexParams& p, uint batch, uint head, uint query) {
  return (int64_t(batch) * p.heads + head) * p.q_length + query;
}

// The place of a score among the bits of a thread.
constexpr uint flex_bit(uint across, uint m, uint n, uint i) { return (m * across + n) * 2 + i; }

// Returns the bits of all scores of a thread.
template <uint kDown, uint kAcross>
constexpr uint all_bits() {
  return 0xffffffffu >> (32 - 2 * kDown * kAcross);
}

// Returns the bits of a row's scores before `end`, which counts columns from the thread's first one.
template <uint kAcross>
METAL_FUNC uint bits_before(int end) {
  static_assert(2 * kAcross < 32, "a row's bits do not fill a number");
  const uint columns = uint(metal::clamp(end, 0, int(8 * kAcross)));
  return (1u << (columns / 8 * 2 + metal::min(columns % 8, 2u))) - 1u;
}

// What the mask says of the rows of a thread's scores, found again for each tile. The thread's rows are 8 apart.
template <typename Mods>
struct FlexRowsOnDemand {
  static constexpr constant bool kHasLimits = false;
  metal::int4 limits;

  METAL_FUNC metal::int2 ends(thread const Mods& mods, int b, int h, uint first, uint m) const {
    return mods.ends(b, h, int(first + m * 8));
  }
  METAL_FUNC typename Mods::Row row(thread const Mods& mods, int b, int h, uint first, uint m) const {
    return mods.row(b, h, int(first + m * 8));
  }
};

// The same, found once for all tiles and held in threadgroup memory: two ends, and 16 bytes at most.
template <typename Mods>
struct FlexHeldRow {
  metal::int2 ends;
  typename Mods::Row row;
};
constexpr constant uint kHeldRowBytes = 24;
template <uint kRows, typename Mods>
struct FlexHeldRows {
  static_assert(kRows <= 32 && sizeof(FlexHeldRow<Mods>) <= kHeldRowBytes, "a lane finds what a row needs");
  static constexpr constant bool kHasLimits = true;
  threadgroup const FlexHeldRow<Mods>* held;  // of the thread's first row
  // The least and the largest first column of the simdgroup's rows, and the least and the largest one behind the last.
  metal::int4 limits;

  // `rows` is the simdgroup's part of the memory.
  METAL_FUNC FlexHeldRows(threadgroup FlexHeldRow<Mods>* rows, thread const Mods& mods, uint batch, uint head,
                          uint first, uint lane, Place place) {
    held = rows + place.row;
    if (!Mods::kEnds && !Mods::kMask) return;
    const int b = int(batch), h = int(head), row = int(first + lane % kRows);
    metal::int2 ends(0);
    if (Mods::kEnds) ends = mods.ends(b, h, row);
    limits =
        metal::int4(metal::simd_min(ends.x), metal::simd_max(ends.x), metal::simd_min(ends.y), metal::simd_max(ends.y));
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (lane < kRows) rows[lane] = FlexHeldRow<Mods>{ends, mods.row(b, h, row)};
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  METAL_FUNC metal::int2 ends(thread const Mods&, int, int, uint, uint m) const { return held[m * 8].ends; }
  METAL_FUNC typename Mods::Row row(thread const Mods&, int, int, uint, uint m) const { return held[m * 8].row; }
};

// Returns which of a thread's scores count, a bit for each: those of keys before `end` that the mask shows. Rows of
// scores are those of queries, or of keys. With `kHeld`, `held` has what the mask finds for each of the columns. Where
// all of them are alike, and the mask reads nothing else of a column, a row's scores count all or not at all. `kWhole`
// says that no row and no column is missing.
template <bool kKeysAreRows, bool kWhole, uint kDown, uint kAcross, bool kHeld = false, typename Mods,
          typename Rows = FlexRowsOnDemand<Mods>>
METAL_FUNC uint seen_scores(thread const Mods& mods, bool is_masked, uint batch, uint head, uint first_row,
                            uint first_column, uint end, Place place, uint lane = 0,
                            threadgroup const typename Mods::Column* held = nullptr, Rows rows = {}) {
  static_assert(2 * kDown * kAcross <= 32, "a thread has a bit for each of its scores");
  const int b = int(batch), h = int(head), first = int(first_column + place.column);
  const uint row = first_row + place.row;
  uint seen = kWhole ? all_bits<kDown, kAcross>() : 0;
#pragma unroll
  for (uint m = 0; m < kDown && !kWhole; ++m) {
    const int columns = kKeysAreRows ? (row + m * 8 < end ? int(8 * kAcross) : 0) : int(end) - first;
    seen |= bits_before<kAcross>(columns) << flex_bit(kAcross, m, 0, 0);
  }
  if (!is_masked) return seen;
  if (Mods::kEnds) {
    metal::int2 ends[kDown];
    bool shows_all = true, shows_none = true;  // of the tile's columns
    const int begin = int(first_column), behind = begin + int(8 * kAcross);
#pragma unroll
    for (uint m = 0; m < kDown && !Rows::kHasLimits; ++m) {
      ends[m] = rows.ends(mods, b, h, row, m);
      shows_all &= ends[m].x <= begin && ends[m].y >= behind;
      shows_none &= ends[m].x >= behind || ends[m].y <= begin;
    }
    if (Rows::kHasLimits) {
      shows_all = rows.limits.y <= begin && rows.limits.z >= behind;
      shows_none = rows.limits.x >= behind || rows.limits.w <= begin;
    }
    if (Rows::kHasLimits ? shows_none : metal::simd_all(shows_none)) return 0;
    if (!(Rows::kHasLimits ? shows_all : metal::simd_all(shows_all))) {
#pragma unroll
      for (uint m = 0; m < kDown && Rows::kHasLimits; ++m) ends[m] = rows.ends(mods, b, h, row, m);
      uint between = 0;
#pragma unroll
      for (uint m = 0; m < kDown; ++m)
        between |= (bits_before<kAcross>(ends[m].y - first) & ~bits_before<kAcross>(ends[m].x - first))
                   << flex_bit(kAcross, m, 0, 0);
      seen &= between;
    }
  }
  if (!Mods::kMask || !metal::simd_any(seen != 0)) return seen;
  uint shown = 0;
  if constexpr (kHeld && Mods::kByColumn) {
    bool is_alike = true;
#pragma unroll
    for (uint i = 0; i < 8 * kAcross; i += 32) is_alike &= mods.alike(held[i + lane], held[0]);
    if (metal::simd_all(is_alike)) {
#pragma unroll
      for (uint m = 0; m < kDown; ++m)
        if (mods.mask(b, h, int(row + m * 8), 0, held[0], rows.row(mods, b, h, row, m)))
          shown |= all_bits<1, kAcross>() << flex_bit(kAcross, m, 0, 0);
      return seen & shown;
    }
  }
#pragma unroll
  for (uint n = 0; n < kAcross; ++n) {
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const int column = first + int(n * 8 + i);
      const typename Mods::Column found = kHeld ? held[place.column + n * 8 + i] : mods.column(b, h, column);
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
        const int query = kKeysAreRows ? column : int(row + m * 8), key = kKeysAreRows ? int(row + m * 8) : column;
        const typename Mods::Row of_row = rows.row(mods, b, h, row, m);
        shown |= uint(mods.mask(b, h, query, key, found, of_row)) << flex_bit(kAcross, m, n, i);
      }
    }
  }
  return seen & shown;
}

// What the mask finds in captured tensors for the keys of a tile: a thread has that of a key on its way into
// threadgroup memory.
template <uint kKeys, typename Mods>
struct FlexColumns {
  using Column = typename Mods::Column;
  threadgroup Column* held;
  uint thread_index;
  Column own;

  METAL_FUNC void load(thread const Mods& mods, FlexPlace at, FlexWalk walk) {
    if (walk.more() && walk.masked() && thread_index < kKeys)
      own = mods.column(int(at.batch), int(at.head), int(walk.at + thread_index));
  }
  METAL_FUNC void store(bool is_masked) const {
    if (is_masked && thread_index < kKeys) held[thread_index] = own;
  }
};

// For gradients, in the place of a product: a weight of softmax; and in that of a weight's gradient: the one of the
// score before the caller's function. A query that has no keys or does not exist has an infinite `lse`.
template <bool kEdge, bool kWithDerivative, typename Mods>
METAL_FUNC void flex_gradient(thread const Mods& mods, thread float& product, thread float& gradient, float scale,
                              float lse, float subtracted, bool counts, uint batch, uint head, uint query, uint key) {
  const int b = int(batch), h = int(head), q = int(query), k = int(key);
  const float score = product * scale;
  const float changed =
      Mods::kPlain ? metal::fma(product, scale * kLog2E, -lse) : mods.score(score, b, h, q, k) * kLog2E - lse;
  product = metal::fast::exp2(metal::min(changed, 0.0f));
  // The function may make a NaN of a query that does not exist.
  if (!Mods::kPlain) product = lse == INFINITY ? 0.0f : product;
  if (kEdge) product = counts ? product : 0.0f;
  if (!kWithDerivative) return;
  // What is hidden has no slope, also where the function has an infinite one.
  const float slope = mods.derivative(score, product * (gradient - subtracted), b, h, q, k);
  gradient = product == 0.0f ? 0.0f : slope;
}

// RowsAhead where no row and no element is missing, and rows can be loaded 16 bytes at a time. A GPU fetches the code
// of what never happens, too, where it stands between the rest.
template <typename T, uint kRows, uint kSize, uint kPitch, uint kThreads>
struct WholeRowsAhead {
  static constexpr constant uint kPack = 16 / sizeof(T), kPacks = kSize / kPack, kStep = kThreads / kPacks;
  static constexpr constant uint kShare = kRows * kPacks / kThreads;
  static constexpr constant bool kColumn = true;

  StridedRows<T> rows;
  uint thread_index;
  Pack<T> packs[kShare];

  METAL_FUNC WholeRowsAhead(StridedRows<T> rows, uint, uint, bool, uint thread_index)
      : rows(rows), thread_index(thread_index) {}

  METAL_FUNC void load(uint first) {
    device const T* from = rows.row(first + thread_index / kPacks) + thread_index % kPacks * kPack;
#pragma unroll
    for (uint s = 0; s < kShare; ++s) {
      packs[s] = *reinterpret_cast<device const Pack<T>*>(from);
      from += kStep * rows.stride;
    }
  }
  METAL_FUNC void store(threadgroup T* tile, uint) const {
    threadgroup T* const to = tile + thread_index / kPacks * kPitch + thread_index % kPacks * kPack;
#pragma unroll
    for (uint s = 0; s < kShare; ++s) *reinterpret_cast<threadgroup Pack<T>*>(to + s * kStep * kPitch) = packs[s];
  }
};
template <bool kWhole, typename T, uint kRows, uint kSize, uint kPitch, uint kThreads>
using FlexRowsAhead = metal::conditional_t<kWhole, WholeRowsAhead<T, kRows, kSize, kPitch, kThreads>,
                                           RowsAhead<T, kRows, kSize, kPitch, kThreads, StridedRows<T>>>;

// The rows of all simdgroups of a threadgroup on their way into fragments.
template <bool kIsWhole, typename T, uint kSize, uint kPitch, uint kDown, uint kSimds>
struct OwnAhead : FlexRowsAhead<kIsWhole, T, 8 * kDown * kSimds, kSize, kPitch, 32 * kSimds> {
  static constexpr constant uint kOwnRows = 8 * kDown * kSimds, kWidth = 32 * kSimds;
  static constexpr constant bool kWhole = kIsWhole;
  using Base = FlexRowsAhead<kWhole, T, kOwnRows, kSize, kPitch, kWidth>;

  METAL_FUNC OwnAhead(StridedRows<T> rows, uint count, uint size, bool vectors, uint thread_index)
      : Base(rows, count, size, vectors, thread_index) {}
};

template <uint kRows, uint kPitch, typename T, typename Ahead>
METAL_FUNC void show_packs(threadgroup T* tile, thread const Ahead& ahead, uint begin) {
  constexpr uint kPacks = Ahead::kPacks, kPack = Ahead::kPack, kStep = Ahead::kStep;
  if constexpr (Ahead::kColumn && kRows % kStep == 0) {
    threadgroup T* const to = tile + ahead.thread_index / kPacks * kPitch + ahead.thread_index % kPacks * kPack;
#pragma unroll
    for (uint s = 0; s < kRows / kStep && begin / kStep + s < Ahead::kShare; ++s)
      *reinterpret_cast<threadgroup Pack<T>*>(to + s * kStep * kPitch) = ahead.packs[begin / kStep + s];
  } else {
#pragma unroll
    for (uint s = 0; s < Ahead::kShare; ++s) {
      const uint index = s * Ahead::kWidth + ahead.thread_index, row = index / kPacks;
      if (row >= begin && row < begin + kRows && row < Ahead::kOwnRows)
        *reinterpret_cast<threadgroup Pack<T>*>(tile + (row - begin) * kPitch + index % kPacks * kPack) =
            ahead.packs[s];
    }
  }
}
// Puts kRows of the rows that the threadgroup has asked for into a tile, from row `begin` of them on. `first` is the
// place of the first row in memory.
template <uint kRows, uint kPitch, typename T, typename Ahead>
METAL_FUNC void flex_show(threadgroup T* tile, thread const Ahead& ahead, uint first, uint begin) {
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if constexpr (Ahead::kWhole) {
    show_packs<kRows, kPitch>(tile, ahead, begin);
  } else if (ahead.vectors) {
    show_packs<kRows, kPitch>(tile, ahead, begin);
  } else {
    load_rows<T, kRows, Ahead::kPacks * Ahead::kPack, kPitch, Ahead::kWidth>(
        tile, ahead.rows, first + begin, ahead.count, ahead.size, false, ahead.thread_index);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// Takes rows that the threadgroup has asked for, by way of a tile of kRows rows.
template <uint kRows, uint kPitch, uint kSimds, typename T, uint kDown, uint kAcross, typename Ahead>
METAL_FUNC void flex_take(thread Fragments<T, kDown, kAcross>& fragments, threadgroup T* tile,
                          thread const Ahead& ahead, uint first, uint simd) {
  const uint own = simd * 8 * kDown;
#pragma unroll
  for (uint begin = 0; begin < 8 * kDown * kSimds; begin += kRows) {
    flex_show<kRows, kPitch>(tile, ahead, first, begin);
    if (own >= begin && own < begin + kRows) load<kPitch>(fragments, tile + (own - begin) * kPitch);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// c = factors c + a b. Sums of 16-bit products of wide kernels are added where they are.
template <bool kDirect>
struct FlexSums {
  template <uint kPitch, bool kNarrow, typename M, typename T, uint kDown, uint kDepth, uint kAcross>
  static METAL_FUNC void add(thread Fragments<float, kDown, kAcross>& c, thread const float* factors,
                             thread const Fragments<M, kDown, kDepth>& a, threadgroup const T* tile) {
    add_product<kPitch, kNarrow>(c, factors, a, tile);
  }
};
template <>
struct FlexSums<true> {
  template <uint kPitch, bool kNarrow, typename T, uint kDown, uint kDepth, uint kAcross>
  static METAL_FUNC void add(thread Fragments<float, kDown, kAcross>& c, thread const float* factors,
                             thread const Fragments<T, kDown, kDepth>& a, threadgroup const T* tile) {
    bool changes = false;
#pragma unroll
    for (uint m = 0; m < kDown; ++m) changes |= factors[m] != 1.0f;
    if (metal::simd_any(changes)) {
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
#pragma unroll
        for (uint n = 0; n < kAcross; ++n) elements(c.at[m][n]) *= factors[m];
      }
    }
    add_to_sums<kPitch>(c, a, tile);
  }
};

// Writes factors[m] times the sums to rows of a new tensor, of which elements follow each other.
template <typename T, uint kDown, uint kAcross>
METAL_FUNC void flex_store(thread Fragments<float, kDown, kAcross>& sums, thread const float* factors, device T* tensor,
                           int64_t stride, uint first, uint count, uint size, Place place) {
  if (size % 2 != 0) {
    store(sums, factors, tensor, stride, first, count, size, place);
    return;
  }
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    const uint row = first + m * 8 + place.row;
    if (row >= count) continue;
    device T* const to = tensor + int64_t(row) * stride + place.column;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      if (n * 8 + place.column < size)
        *reinterpret_cast<device metal::vec<T, 2>*>(to + n * 8) =
            metal::vec<T, 2>(elements(sums.at[m][n]) * factors[m]);
    }
  }
}

// The same by way of a tile that belongs to the simdgroup: neighbouring lanes write 16 bytes each. Rows of the tensor
// begin at multiples of 16 bytes.
template <bool kWhole, uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void flex_store_by_tile(thread Fragments<float, kDown, kAcross>& sums, thread const float* factors,
                                   threadgroup T* tile, device T* tensor, int64_t stride, uint first, uint count,
                                   uint size, uint lane, Place place) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    threadgroup T* const to = tile + (m * 8 + place.row) * kPitch + place.column;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n)
      *reinterpret_cast<threadgroup metal::vec<T, 2>*>(to + n * 8) =
          metal::vec<T, 2>(elements(sums.at[m][n]) * factors[m]);
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  constexpr uint kPack = 16 / sizeof(T), kPacks = 8 * kAcross / kPack;
  if constexpr (kWhole && 32 % kPacks == 0) {  // a lane's packs are in one column
    constexpr uint kStep = 32 / kPacks;
    const uint row = lane / kPacks, column = lane % kPacks * kPack;
    threadgroup const T* const from = tile + row * kPitch + column;
    device T* to = tensor + int64_t(first + row) * stride + column;
#pragma unroll
    for (uint s = 0; s < 8 * kDown / kStep; ++s) {
      *reinterpret_cast<device Pack<T>*>(to) = *reinterpret_cast<threadgroup const Pack<T>*>(from + s * kStep * kPitch);
      to += kStep * stride;
    }
  } else {
#pragma unroll
    for (uint index = lane; index < 8 * kDown * kPacks; index += 32) {
      const uint row = index / kPacks, column = index % kPacks * kPack;
      if (kWhole || (first + row < count && column < size))
        *reinterpret_cast<device Pack<T>*>(tensor + int64_t(first + row) * stride + column) =
            *reinterpret_cast<threadgroup const Pack<T>*>(tile + row * kPitch + column);
    }
  }
}
