// Tiles of rows in threadgroup memory, and what a lane holds of fragments: simdgroup_matrix of 8 by 8.
#pragma once

#include "../common/pack.h"
#include "attention.h"

#include <metal_stdlib>
#include <metal_simdgroup_matrix>

// The rows of one head. load_rows() takes any type with a row(): rows may lie anywhere, as those of pages do.
template <typename T>
struct StridedRows {
  device const T* first;
  int64_t stride;
  device const T* row(uint i) const { return first + int64_t(i) * stride; }
};

// One sequence of a batch.
struct Sequence {
  uint q_first, k_first;    // its first rows in the tensors
  uint q_length, k_length;  // its numbers of rows
};
METAL_FUNC Sequence sequence_of(constant AttentionParams& p, uint batch, device const int* cu_seq_q,
                                device const int* cu_seq_k) {
  if (!p.variable) return {0u, 0u, p.q_length, p.k_length};
  // Offsets outside of the tensors must not lead outside of their memory.
  const uint q_first = metal::min(uint(cu_seq_q[batch]), p.q_length);
  const uint k_first = metal::min(uint(cu_seq_k[batch]), p.k_length);
  const uint q_end = metal::clamp(uint(cu_seq_q[batch + 1]), q_first, p.q_length);
  const uint k_end = metal::clamp(uint(cu_seq_k[batch + 1]), k_first, p.k_length);
  return {q_first, k_first, q_end - q_first, k_end - k_first};
}

// The rows of a head of a batch item's sequence, which begins at row `first`.
template <typename T>
METAL_FUNC StridedRows<T> rows_of(device const T* tensor, AttentionStrides strides, uint batch, uint head, uint first) {
  return {tensor + int64_t(batch) * strides.batch + int64_t(head) * strides.head + int64_t(first) * strides.row,
          strides.row};
}
// The same for writing.
template <typename T>
METAL_FUNC device T* first_row(device T* tensor, AttentionStrides strides, uint batch, uint head, uint first) {
  return tensor + int64_t(batch) * strides.batch + int64_t(head) * strides.head + int64_t(first) * strides.row;
}

// Rows first to first + kRows - 1 on their way into a tile, whose rows are kPitch apart: a thread's share of them. Rows
// from `count` on, and elements from `size` on, are zero. All threads of the threadgroup take part.
template <typename T, uint kRows, uint kSize, uint kPitch, uint kThreads, typename Rows>
struct RowsAhead {
  static constexpr constant uint kPack = 16 / sizeof(T), kPacks = kSize / kPack;
  static constexpr constant uint kShare = (kRows * kPacks + kThreads - 1) / kThreads;

  Rows rows;
  uint count, size;
  bool vectors;  // else elements are loaded where they are stored
  uint thread_index;
  Pack<T> packs[kShare];

  METAL_FUNC RowsAhead(Rows rows, uint count, uint size, bool vectors, uint thread_index)
      : rows(rows), count(count), size(size), vectors(vectors), thread_index(thread_index) {}

  METAL_FUNC void load(uint first) {
    if (!vectors) {
#pragma unroll
      for (uint s = 0; s < kShare; ++s) packs[s] = Pack<T>();
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
#pragma unroll
      for (uint s = 0; s < kShare; ++s) {
        const uint index = s * kThreads + thread_index;
        if (index < kRows * kPacks)
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
