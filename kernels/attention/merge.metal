// Merges attention's results over disjoint parts of the keys by the logarithms of their sums.
#include "attention/numbers.h"

constexpr constant uint kMaxSimdgroups = 16;
constexpr constant uint kPartsAtOnce = 512;  // whose weights are in threadgroup memory

// How much a part has of the sum of all, whose logarithm is near `base`.
inline float share_of(device const float* logarithm, float base, long rests) {
  return rests != 0 ? exp2(*logarithm - base + logarithm[rests]) : exp(*logarithm - base);
}

// A threadgroup has a token and a head: each simdgroup 32 elements of the value, and every few parts.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kMaxSimdgroups)]] void attention_merge(
    device const T* parts [[buffer(0)]], device const float* part_lse [[buffer(1)]],
    device const uchar* sinks [[buffer(2)]], device uchar* out [[buffer(3)]], device float* lse [[buffer(4)]],
    constant AttentionMergeParams& params [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint2 threads [[threads_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float shared[kMaxSimdgroups * 32];
  threadgroup float weights[kPartsAtOnce];
  const uint head = group.x;
  const ulong token = group.y;
  const ulong request = token / params.queries;
  const ulong query = token - request * params.queries;
  device const float* const found = part_lse + token * params.in_lse.token + head * params.in_lse.head;
  const bool sinking = params.sink_type != NUMBER_NONE;
  const bool binary = params.rests != 0;
  const float sink = sinking ? number_at(sinks, head, params.sink_type) * (binary ? kLog2E : 1.0f) : -INFINITY;

  float top = -INFINITY;
  for (uint part = lane; part < params.parts; part += 32) top = max(top, found[part * params.in_lse.part]);
  top = max(simd_max(top), sink);
  const float base = base_of(top);
  float total = 0.0f;
  for (uint part = lane; part < params.parts; part += 32)
    total += share_of(found + part * params.in_lse.part, base, params.rests);
  total = simd_sum(total);
  if (sinking) total += binary ? exp2(sink - base) : exp(sink - base);
  const float norm = total == 0.0f ? 0.0f : 1.0f / total;  // a NaN stays

  const uint simdgroups = threads.x / 32;
  const uint columns = min((params.value_size + 31) / 32, simdgroups);  // of 32 elements, at a time
  const uint shares = simdgroups / columns;
  const uint share = simdgroup / columns;
  for (uint start = 0; start < params.value_size; start += 32 * columns) {
    const uint element = start + simdgroup % columns * 32 + lane;
    const ulong in = token * params.in.token + head * params.in.head + min(element, params.value_size - 1);
    float value = 0.0f;
    for (uint first = 0; first < params.parts; first += kPartsAtOnce) {
      const uint count = min(params.parts - first, kPartsAtOnce);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = thread_index; i < count; i += threads.x)
        weights[i] = share_of(found + (first + i) * params.in_lse.part, base, params.rests);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 8
      for (uint i = share; i < count; i += shares)
        value = fma(weights[i], static_cast<float>(parts[in + (first + i) * params.in.part]), value);
    }
    shared[simdgroup * 32 + lane] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup >= columns || element >= params.value_size) continue;
    value = 0.0f;
    for (uint i = 0; i < shares; ++i) value += shared[(i * columns + simdgroup) * 32 + lane];
    // A part that nothing was seen of may hold anything.
    store_number(out, request * params.out.batch + head * params.out.head + query * params.out.token + element,
                 params.out_type, norm == 0.0f ? 0.0f : value * norm);
  }
  if (thread_index == 0)
    lse[request * params.lse.batch + head * params.lse.head + query * params.lse.token] =
        total == 0.0f ? -INFINITY
        : binary      ? natural(base, log2(total))
                      : base + log(total);
}

#define INSTANTIATE(type, T) \
  template [[host_name("attention_merge_" type)]] [[kernel]] decltype(attention_merge<T>) attention_merge<T>;
INSTANTIATE("float", float)
INSTANTIATE("half", half)
INSTANTIATE("bfloat", bfloat)
