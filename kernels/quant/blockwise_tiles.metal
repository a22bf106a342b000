// Products of numbers in blocks of 4 bits and some rows of x, by the matrix units.
#include <metal_stdlib>
using namespace metal;

#include "blockwise_rows.h"
#include "mul_tiles.h"

#define BLOCKWISE_TILES_KERNEL(x_rows)                                                                                 \
  template <typename F, typename T>                                                                                    \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * QUANT_TILE##x_rows##_SIMDGROUPS)]] void blockwise_tiles##x_rows( \
      device const uint4* packed [[buffer(0)]], device const uint4* x [[buffer(1)]], device T* y [[buffer(2)]],        \
      device const float* absmax [[buffer(4)]], device const uchar* packed_scales [[buffer(5)]],                       \
      device const float* code [[buffer(6)]], device const float* offset [[buffer(7)]],                                \
      constant QuantMvParams& p [[buffer(8)]], constant BlockwiseParams& blocks [[buffer(9)]],                         \
      uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],                  \
      uint threads [[threads_per_threadgroup]]) {                                                                      \
    threadgroup uint4 tiles[QUANT_TILE##x_rows##_SIMDGROUPS * x_rows / 8 * kTilePitch];                                \
    threadgroup float parts[QUANT_TILE##x_rows##_SIMDGROUPS * x_rows * QUANT_TILE_ROWS];                               \
    threadgroup float table[F::entries];                                                                               \
    const typename F::Rows rows = {packed, {absmax, packed_scales, code, offset}, blocks.shift, 0};                    \
    multiply_tiles<F, T, x_rows / 8>(rows, x, y, p, tiles, parts, table, group, thread_index, threads / 32);           \
  }
BLOCKWISE_TILES_KERNEL(8)
BLOCKWISE_TILES_KERNEL(16)

#define BLOCKWISE_TILES(F, x_rows, T, name)                                                                    \
  template [[host_name("quant_tiles" #x_rows "_" #F "_" name)]] [[kernel]] void blockwise_tiles##x_rows<F, T>( \
      device const uint4*, device const uint4*, device T*, device const float*, device const uchar*,           \
      device const float*, device const float*, constant QuantMvParams&, constant BlockwiseParams&, uint, uint, uint);
FOR_TILES(BLOCKWISE_TILES, NF4)
FOR_TILES(BLOCKWISE_TILES, FP4)
FOR_TILES(BLOCKWISE_TILES, NF4_nested)
FOR_TILES(BLOCKWISE_TILES, FP4_nested)
