// How kernels read numbers in blocks of 4 bits, as one of the readers of formats.h. A slice of 32 numbers is 16 bytes,
// and lies in one block.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "blockwise.h"
#include "blockwise_scales.h"
#include "formats.h"

// Packed rows, which lie one after the other, with their scales.
template <bool nested>
struct BlockwiseRows {
  device const uint4* words;
  Scales scales;
  uint shift;
  ulong at;  // byte

  BlockwiseRows plus(ulong bytes) const { return {words, scales, shift, at + bytes}; }
  Packed load() const {
    return {words[at / 16], uint4(0), uint4(as_type<uint>(scales.of(2 * at >> shift, nested)), 0, 0, 0)};
  }
};
template <bool nested>
inline BlockwiseRows<nested> place(BlockwiseRows<nested> rows, ulong bytes) {
  return rows.plus(bytes);
}

template <typename T, bool nested>
struct Blockwise : Block32 {
  typedef BlockwiseRows<nested> Rows;
  static constexpr constant uint number = 0, bytes = 16, entries = 16;
  static constexpr constant float bias = 0.0f, zero = -0.0f, unit = 1.0f, upper_unit = 1.0f;  // no entry is -0
  static constexpr constant bool has_offset = false;
  static Packed load(Rows at, uint) { return at.load(); }
  static Slice decode(Packed p, uint, SharedTable table) {
    Slice slice;
#pragma unroll
    for (uint i = 0; i < 16; ++i) {
      const uint byte = p.low[i / 4] >> (i % 4 * 8);
      slice.q[i / 2][i % 2 * 2] = table.of((byte >> 4) & 0xfu);
      slice.q[i / 2][i % 2 * 2 + 1] = table.of(byte & 0xfu);
    }
    slice.scale = float2(as_type<float>(p.head.x));
    slice.offset = float2(0.0f);
    return slice;
  }
};

// All of a threadgroup's threads come here.
template <typename T, bool nested>
struct Shared<Blockwise<T, nested>, true> {
  typedef Blockwise<T, nested> F;
  SharedTable table;
  Shared(threadgroup float* entries, uint thread_index) : table{entries} {
    if (thread_index < 16) entries[thread_index] = T::of(thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  Slice decode(SliceOf<F> slice, Packed packed) const { return F::decode(packed, slice.s, table); }
};

typedef Blockwise<NF4Table, false> NF4;
typedef Blockwise<FP4Table, false> FP4;
typedef Blockwise<NF4Table, true> NF4_nested;
typedef Blockwise<FP4Table, true> FP4_nested;
