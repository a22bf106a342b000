// Weights of 2 to 8 bits in groups: rows of them as numbers, and products with few rows of x.
#include <metal_stdlib>
using namespace metal;

#include "affine_rows.h"
#include "mul_mv.h"
#include "rows.h"

template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_ROWS_THREADS)]] void affine_rows(
    AFFINE_ARGUMENTS(F), device const long* rows [[buffer(7)]], device uint4* results [[buffer(8)]],
    constant QuantRowsParams& p [[buffer(9)]], uint at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 kept[QUANT_ROWS_THREADS * kUnits];
  const typename F::Rows from = {packed, {scales, half_scales, offsets, half_offsets, zeros}, affine, 0};
  write_rows<F>(from, rows, results, p, kept, at, lane, simdgroup);
}

#define AFFINE_ROWS(F)                                                      \
  template [[host_name("affine_rows_" #F)]] [[kernel]] void affine_rows<F>( \
      AFFINE_TYPES(F), device const long*, device uint4*, constant QuantRowsParams&, uint, uint, uint);
FOR_AFFINE(AFFINE_ROWS)

#define AFFINE_MV_KERNEL(M, simdgroups_at_most, step_rows)                                                            \
  template <typename F>                                                                                               \
  [[kernel]] [[max_total_threads_per_threadgroup(32 * simdgroups_at_most)]] void affine_mv##M(                        \
      AFFINE_ARGUMENTS(F), device const uint4* x [[buffer(7)]], device float* floats [[buffer(8)]],                   \
      device ushort* halves [[buffer(9)]], device const int* chosen [[buffer(10)]],                                   \
      constant QuantMvParams& p [[buffer(11)]], uint group [[threadgroup_position_in_grid]],                          \
      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {                  \
    threadgroup float memory[simdgroups_at_most * QUANT_MV_RESULTS];                                                  \
    const typename F::Rows rows = {packed, {scales, half_scales, offsets, half_offsets, zeros}, affine, 0};           \
    multiply<F, M, step_rows>(rows, x, floats, halves, chosen, p, memory, memory, group, thread_index, threads / 32); \
  }
AFFINE_MV_KERNEL(1, QUANT_MV1_SIMDGROUPS, QUANT_MV1_STEP)
AFFINE_MV_KERNEL(2, QUANT_MV2_SIMDGROUPS, QUANT_MV2_STEP)
AFFINE_MV_KERNEL(4, QUANT_MV4_SIMDGROUPS, QUANT_MV4_STEP)

#define AFFINE_MV_OF(F, M)                                                                                             \
  template [[host_name("quant_mv" #M "_" #F)]] [[kernel]] void affine_mv##M<F>(                                        \
      AFFINE_TYPES(F), device const uint4*, device float*, device ushort*, device const int*, constant QuantMvParams&, \
      uint, uint, uint);
#define AFFINE_MV(F) AFFINE_MV_OF(F, 1) AFFINE_MV_OF(F, 2) AFFINE_MV_OF(F, 4)
FOR_AFFINE(AFFINE_MV)
