// Rows of packed weights as numbers: all of them (dequantize), or those that `rows` names (get_rows).
#include <metal_stdlib>
using namespace metal;

#include "rows.h"

template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_ROWS_THREADS)]] void quant_rows(
    device const typename F::Word* packed [[buffer(0)]], device const long* rows [[buffer(1)]],
    device uint4* results [[buffer(2)]], constant QuantRowsParams& p [[buffer(3)]], uint at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 kept[QUANT_ROWS_THREADS * kUnits];
  write_rows<F>(packed, rows, results, p, kept, at, lane, simdgroup);
}

#define QUANT_ROWS(F)                                                     \
  template [[host_name("quant_rows_" #F)]] [[kernel]] void quant_rows<F>( \
      device const typename F::Word*, device const long*, device uint4*, constant QuantRowsParams&, uint, uint, uint);
FOR_QUANT_TYPES(QUANT_ROWS)
