// Products of numbers of 8 and 4 bits with scales on a grid and some rows of x, by the matrix units.
#include <metal_stdlib>
using namespace metal;

#include "mul_tiles.h"
#include "scaled_rows.h"

#define SCALED_TILES_KERNEL(x_rows)                                                                                 \
  template <typename F, typename T>                                                                                 \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * QUANT_TILE##x_rows##_SIMDGROUPS)]] void scaled_tiles##x_rows( \
      SCALED_ARGUMENTS, device const uint4* x [[buffer(5)]], device T* y [[buffer(6)]],                             \
      constant QuantMvParams& p [[buffer(10)]], uint group [[threadgroup_position_in_grid]],                        \
      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {                \
    threadgroup uint4 tiles[QUANT_TILE##x_rows##_SIMDGROUPS * x_rows / 8 * kTilePitch];                             \
    threadgroup float parts[QUANT_TILE##x_rows##_SIMDGROUPS * x_rows * QUANT_TILE_ROWS];                            \
    const typename F::Rows rows = {packed, {scales, byte_scales, factor}, scaled, 0};                               \
    multiply_tiles<F, T, x_rows / 8>(rows, x, y, p, tiles, parts, parts, group, thread_index, threads / 32);        \
  }
SCALED_TILES_KERNEL(8)
SCALED_TILES_KERNEL(16)

#define SCALED_TILES(F, x_rows, T, name)                                                                    \
  template [[host_name("quant_tiles" #x_rows "_" #F "_" name)]] [[kernel]] void scaled_tiles##x_rows<F, T>( \
      SCALED_TYPES, device const uint4*, device T*, constant QuantMvParams&, uint, uint, uint);
FOR_TILES(SCALED_TILES, E4M3)
FOR_TILES(SCALED_TILES, E5M2)
FOR_TILES(SCALED_TILES, E2M1)
