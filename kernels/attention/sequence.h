// The rows of a sequence and of a head in tensors.
#pragma once

#include "attention.h"
#include <metal_stdlib>

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

// What a threadgroup has.
struct HeadBlock {
  uint batch, head;
  uint number;  // of p.blocks
};
// Returns what threadgroup `index` has, where a batch item has `heads` heads. Of heads that take turns the first blocks
// come before all of the second ones.
METAL_FUNC HeadBlock block_of(constant AttentionParams& p, uint index, uint heads) {
  const uint of_turn = p.turns * p.blocks, turn = index / of_turn, within = index - turn * of_turn;
  const uint head = turn * p.turns + within % p.turns;
  return {head / heads, head % heads, within / p.turns};
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
