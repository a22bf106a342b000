// The rows of a product with experts, in the order of their experts: a simdgroup finds those of one expert, and one
// more those of experts that do not exist.
#include <metal_stdlib>
using namespace metal;

#include "quant.h"

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
