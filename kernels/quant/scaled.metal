// Numbers of 8 and 4 bits with scales on a grid: rows of them as numbers, and products with few rows of x.
#include <metal_stdlib>
using namespace metal;

#include "mul_mv.h"
#include "rows.h"
#include "scaled_rows.h"

template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_ROWS_THREADS)]] void scaled_rows(
    SCALED_ARGUMENTS, device const long* rows [[buffer(5)]], device uint4* results [[buffer(6)]],
    constant QuantRowsParams& p [[buffer(7)]], uint at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 kept[QUANT_ROWS_THREADS * kUnits];
  const typename F::Rows from = {packed, {scales, byte_scales, factor}, scaled, 0};
  write_rows<F>(from, rows, results, p, kept, at, lane, simdgroup);
}

#define SCALED_ROWS(name, F)                                                   \
  template [[host_name("scaled_rows_" #name)]] [[kernel]] void scaled_rows<F>( \
      SCALED_TYPES, device const long*, device uint4*, constant QuantRowsParams&, uint, uint, uint);
SCALED_ROWS(E4M3, E4M3Reader<true>)
SCALED_ROWS(E5M2, E5M2)
SCALED_ROWS(E2M1, E2M1)

#define SCALED_MV_KERNEL(M, simdgroups_at_most, step_rows)                                                           \
  template <typename F>                                                                                              \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * simdgroups_at_most)]] void scaled_mv##M(                       \
      SCALED_ARGUMENTS, device const uint4* x [[buffer(5)]], device float* floats [[buffer(6)]],                     \
      device ushort* halves [[buffer(7)]], device const int* chosen [[buffer(8)]],                                   \
      constant ScaledExpertsParams& each [[buffer(9)]], constant QuantMvParams& p [[buffer(10)]],                    \
      uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],                \
      uint threads [[threads_per_threadgroup]]) {                                                                    \
    threadgroup float memory[simdgroups_at_most * QUANT_MV_RESULTS];                                                 \
    const ScaledMatrices<F::quads> all = {{packed, {scales, byte_scales, factor}, scaled, 0}, each};                 \
    multiply<F, M, step_rows>(all, x, floats, halves, chosen, p, memory, memory, group, thread_index, threads / 32); \
  }
SCALED_MV_KERNEL(1, QUANT_MV1_SIMDGROUPS, QUANT_MV1_STEP)
SCALED_MV_KERNEL(2, QUANT_MV2_SIMDGROUPS, QUANT_MV2_STEP)
SCALED_MV_KERNEL(4, QUANT_MV4_SIMDGROUPS, QUANT_MV4_STEP)

#define SCALED_MV_OF(F, M)                                                                 \
  template [[host_name("quant_mv" #M "_" #F)]] [[kernel]] void scaled_mv##M<F>(            \
      SCALED_TYPES, device const uint4*, device float*, device ushort*, device const int*, \
      constant ScaledExpertsParams&, constant QuantMvParams&, uint, uint, uint);
#define SCALED_MV(F) SCALED_MV_OF(F, 1) SCALED_MV_OF(F, 2) SCALED_MV_OF(F, 4)
SCALED_MV(E4M3)
SCALED_MV(E5M2)
SCALED_MV(E2M1)
