// Products of packed weights of each type of GGML and few rows of x.
#include <metal_stdlib>
using namespace metal;

#include "mul_mv.h"

#define QUANT_MV_KERNEL(M, simdgroups_at_most, step_rows)                                                              \
  template <typename F>                                                                                                \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * simdgroups_at_most)]] void quant_mv##M(                          \
      device const typename F::Word* packed [[buffer(0)]], device const uint4* x [[buffer(1)]],                        \
      device float* floats [[buffer(2)]], device ushort* halves [[buffer(3)]], device const int* chosen [[buffer(4)]], \
      constant QuantMvParams& p [[buffer(5)]], uint group [[threadgroup_position_in_grid]],                            \
      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {                   \
    threadgroup float memory[F::entries + simdgroups_at_most * QUANT_MV_RESULTS];                                      \
    multiply<F, M, step_rows>(packed, x, floats, halves, chosen, p, memory + F::entries, memory, group, thread_index,  \
                              threads / 32);                                                                           \
  }
QUANT_MV_KERNEL(1, QUANT_MV1_SIMDGROUPS, QUANT_MV1_STEP)
// Q3_K's weights and scales come in so many words that two rows of them are more than Apple's registers.
QUANT_MV_KERNEL(2, QUANT_MV2_SIMDGROUPS, (F::number == Q3_K::number ? 1 : QUANT_MV2_STEP))
QUANT_MV_KERNEL(4, QUANT_MV4_SIMDGROUPS, QUANT_MV4_STEP)

#define QUANT_MV_OF(F, M)                                                                                    \
  template [[host_name("quant_mv" #M "_" #F)]] [[kernel]] void quant_mv##M<F>(                               \
      device const typename F::Word*, device const uint4*, device float*, device ushort*, device const int*, \
      constant QuantMvParams&, uint, uint, uint);
#define QUANT_MV(F) QUANT_MV_OF(F, 1) QUANT_MV_OF(F, 2) QUANT_MV_OF(F, 4)
FOR_QUANT_TYPES(QUANT_MV)
