// Products of numbers in blocks of 4 bits and few rows of x. A slice of 32 numbers is 16 bytes, and lies in one block.
#include <metal_stdlib>
using namespace metal;

#include "blockwise.h"
#include "blockwise_scales.h"
#include "mul_mv.h"

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
  static constexpr constant float bias = 0.0f, unit = 1.0f, upper_unit = 1.0f;
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

#define BLOCKWISE_MV_KERNEL(M, simdgroups_at_most, step_rows)                                                        \
  template <typename F>                                                                                              \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * simdgroups_at_most)]] void blockwise_mv##M(                    \
      device const uint4* packed [[buffer(0)]], device const uint4* x [[buffer(1)]],                                 \
      device float* floats [[buffer(2)]], device ushort* halves [[buffer(3)]],                                       \
      device const float* absmax [[buffer(4)]], device const uchar* packed_scales [[buffer(5)]],                     \
      device const float* code [[buffer(6)]], device const float* offset [[buffer(7)]],                              \
      constant QuantMvParams& p [[buffer(8)]], constant BlockwiseParams& blocks [[buffer(9)]],                       \
      uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],                \
      uint threads [[threads_per_threadgroup]]) {                                                                    \
    threadgroup float memory[F::entries + simdgroups_at_most * QUANT_MV_RESULTS];                                    \
    const typename F::Rows rows = {packed, {absmax, packed_scales, code, offset}, blocks.shift, 0};                  \
    multiply<F, M, step_rows>(rows, x, floats, halves, nullptr, p, memory + F::entries, memory, group, thread_index, \
                              threads / 32);                                                                         \
  }
BLOCKWISE_MV_KERNEL(1, QUANT_MV1_SIMDGROUPS, QUANT_MV1_STEP)
BLOCKWISE_MV_KERNEL(2, QUANT_MV2_SIMDGROUPS, QUANT_MV2_STEP)
BLOCKWISE_MV_KERNEL(4, QUANT_MV4_SIMDGROUPS, QUANT_MV4_STEP)

#define BLOCKWISE_MV_OF(F, M)                                                                       \
  template [[host_name("quant_mv" #M "_" #F)]] [[kernel]] void blockwise_mv##M<F>(                  \
      device const uint4*, device const uint4*, device float*, device ushort*, device const float*, \
      device const uchar*, device const float*, device const float*, constant QuantMvParams&,       \
      constant BlockwiseParams&, uint, uint, uint);
#define BLOCKWISE_MV(F) BLOCKWISE_MV_OF(F, 1) BLOCKWISE_MV_OF(F, 2) BLOCKWISE_MV_OF(F, 4)
BLOCKWISE_MV(NF4)
BLOCKWISE_MV(FP4)
BLOCKWISE_MV(NF4_nested)
BLOCKWISE_MV(FP4_nested)
