// Copies images of 16-bit elements in another order.
#include <metal_stdlib>

#include "conv/conv2d.h"

using namespace metal;

// The channels of a pixel become neighbours, or the pixels of a channel do. Both are transposed matrices, one for each
// image: from `rows` rows of `columns` elements to `columns` rows of `rows` ones.
[[kernel]] [[max_total_threads_per_threadgroup(CONV_ORDER_THREADS)]] void conv2d_order(
    device const ushort* from [[buffer(0)]], device ushort* to [[buffer(1)]], constant ConvOrderParams& p [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kSide = CONV_ORDER_SIDE, kStep = CONV_ORDER_THREADS / kSide;
  threadgroup ushort tile[kSide][kSide + 2];  // lanes that read a column meet in no bank
  const uint row = group.y * kSide, column = group.x * kSide, image = p.first + group.z;
  const uint across = thread_index % kSide, down = thread_index / kSide;
  const int64_t begin = int64_t(image) * p.rows * p.columns;
#pragma unroll
  for (uint i = 0; i < kSide; i += kStep) {
    if (row + down + i < p.rows && column + across < p.columns)
      tile[down + i][across] = from[begin + int64_t(row + down + i) * p.columns + column + across];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < kSide; i += kStep) {
    if (column + down + i < p.columns && row + across < p.rows)
      to[begin + int64_t(column + down + i) * p.rows + row + across] = tile[across][down + i];
  }
}

// The channels of a pixel become neighbours, with zeros before and behind them that fill packs. A thread makes a pack.
[[kernel]] void conv2d_order_packs(device const ushort* from [[buffer(0)]], device uint4* to [[buffer(1)]],
                                   constant ConvOrderPacksParams& p [[buffer(2)]],
                                   uint thread_index [[thread_position_in_grid]]) {
  constexpr uint kPack = 8;
  const uint pack = p.first + thread_index, pixel = pack / p.packs, channel = pack % p.packs * kPack;
  const uint row = pixel / p.size.x, image = row / p.size.y;
  const uint begin = image / p.outputs % p.joined * p.channels;
  device const ushort* const at =
      from + int64_t(image) * p.from.image + int(row % p.size.y) * p.from.y + int(pixel % p.size.x) * p.from.x;
  uint4 words = 0;
#pragma unroll
  for (uint i = 0; i < kPack; ++i)
    if (channel + i - begin < p.channels)
      words[i / 2] |= uint(at[int(channel + i - begin) * p.from.channel]) << i % 2 * 16;
  to[pack] = words;
}
