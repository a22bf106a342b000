// Products of numbers in blocks of 4 bits and few rows of x.
#include <metal_stdlib>
using namespace metal;

#include "blockwise_rows.h"
#include "mul_mv.h"

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
