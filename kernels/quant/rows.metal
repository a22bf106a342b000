// Rows of packed weights as numbers: all of them (dequantize), or those that `rows` names (get_rows); and the order of
// the rows of a product with experts.
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

// The rows of a product with experts, in the order of their experts: a simdgroup finds those of one expert, and one
// more those of experts that do not exist.
inline uint group_of(int expert, uint experts) { return expert < 0 ? experts : min(uint(expert), experts); }

[[kernel]] void quant_groups(device const int* chosen [[buffer(0)]], device int* order [[buffer(1)]],
                             device int* begins [[buffer(2)]], constant QuantGroupsParams& p [[buffer(3)]],
                             uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  uint before = 0;
  for (uint i = lane; i < p.rows; i += 32) before += group_of(chosen[i], p.experts) < group;
  uint at = simd_sum(before);
  if (lane == 0) {
    begins[group] = int(at);
    if (group == p.experts) begins[group + 1] = int(p.rows);
  }
  for (uint first = 0; first < p.rows; first += 32) {
    const uint i = first + lane;
    const uint here = i < p.rows && group_of(chosen[i], p.experts) == group;
    const uint place = at + simd_prefix_exclusive_sum(here);
    if (here) order[place] = int(i);
    at += simd_sum(here);
  }
}
