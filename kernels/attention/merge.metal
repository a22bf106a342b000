// Merges attention's results over disjoint parts of the keys by the logarithms of their sums.
#include "attention/numbers.h"
#include "common/earlier.h"

constexpr constant uint kMaxSimdgroups = 16;
constexpr constant uint kPartsAtOnce = ATTENTION_MERGE_PARTS;
constexpr constant uint kEach = ATTENTION_MERGE_ELEMENTS / 32;  // elements of a lane, every 32nd one

inline float exponential(float x, bool binary) { return binary ? exp2(x) : exp(x); }

// A team of simdgroups has a token, a head, and some elements of the value, and a threadgroup has one team or more.
// Each simdgroup has some parts, and asks for their results before it knows what they weigh. The sums of a team's
// simdgroups become one at the end.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kMaxSimdgroups)]] void attention_merge(
    device const T* parts [[buffer(0)]], device const float* part_lse [[buffer(1)]],
    device const uchar* sinks [[buffer(2)]], device uchar* out [[buffer(3)]], device float* lse [[buffer(4)]],
    constant AttentionMergeParams& params [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float values[kMaxSimdgroups * ATTENTION_MERGE_ELEMENTS];
  threadgroup float tops[kMaxSimdgroups];
  threadgroup float totals[kMaxSimdgroups];
  const uint first_simdgroup = simdgroup / params.team * params.team;  // of the team
  const uint chunks = (params.value_size + ATTENTION_MERGE_ELEMENTS - 1) / ATTENTION_MERGE_ELEMENTS;
  const uint unit = group.x * (threads.x / 32 / params.team) + simdgroup / params.team;
  const bool exists = unit < params.heads * chunks;  // the last threadgroup may have too many teams
  const uint head = exists ? unit / chunks : 0;
  const uint token = group.y;
  const uint element = unit % chunks * ATTENTION_MERGE_ELEMENTS + lane;
  const uint each = (params.parts + params.team - 1) / params.team;
  const uint begin = (simdgroup - first_simdgroup) * each;
  const uint end = exists ? min(begin + each, params.parts) : 0;
  const bool binary = params.rests != 0;
  device const float* const logarithms = part_lse + token * params.in_lse.token + head * params.in_lse.head;
  device const T* const results = parts + token * params.in.token + head * params.in.head;
  uint elements[kEach];  // of a lane; one that there is in the place of others
#pragma unroll
  for (uint e = 0; e < kEach; ++e) elements[e] = min(element + e * 32, params.value_size - 1);

  float top = -INFINITY;
  float total = 0.0f;
  float value[kEach] = {};
  for (uint first = begin; first < end; first += kPartsAtOnce) {
    const uint last = end - 1 - first;
    const uint mine = lane % kPartsAtOnce;
    device const float* const logarithm = logarithms + (first + min(mine, last)) * params.in_lse.part;
    device const T* places[kPartsAtOnce];
#pragma unroll
    for (uint i = 0; i < kPartsAtOnce; ++i) places[i] = results + (first + min(i, last)) * params.in.part;
    metalcore_await_earlier_kernels(places, 0);
    const float found = mine <= last ? *logarithm : -INFINITY;
    const float rest = binary ? logarithm[params.rests] : 0.0f;
    T numbers[kPartsAtOnce][kEach];
#pragma unroll
    for (uint i = 0; i < kPartsAtOnce; ++i) {
#pragma unroll
      for (uint e = 0; e < kEach; ++e) {
        numbers[i][e] = T(0.0f);
        if (i <= last) numbers[i][e] = places[i][elements[e]];
      }
    }
    const float raised = max(top, simd_max(found));
    const float base = base_of(raised);
    const float factor = exponential(top - base, binary);
    const float weight = mine <= last ? exponential(found - base + rest, binary) : 0.0f;
    top = raised;
    total = fma(total, factor, weight);
#pragma unroll
    for (uint e = 0; e < kEach; ++e) value[e] *= factor;
#pragma unroll
    for (uint i = 0; i < kPartsAtOnce; ++i) {
      const float of_part = simd_broadcast(weight, static_cast<ushort>(i));
#pragma unroll
      for (uint e = 0; e < kEach; ++e) value[e] = fma(of_part, static_cast<float>(numbers[i][e]), value[e]);
    }
  }
  metalcore_await_earlier_kernels(0);  // where there are no parts
  metalcore_begin_later_kernels(0);
#pragma unroll
  for (uint across = 1; across < kPartsAtOnce; across *= 2)
    total += simd_shuffle_xor(total, static_cast<ushort>(across));

#pragma unroll
  for (uint e = 0; e < kEach; ++e) values[(simdgroup * kEach + e) * 32 + lane] = value[e];
  if (lane == 0) {
    tops[simdgroup] = top;
    totals[simdgroup] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != first_simdgroup || !exists) return;
  const bool sinking = params.sink_type != NUMBER_NONE;
  const float sink = sinking ? number_at(sinks, head, params.sink_type) * (binary ? kLog2E : 1.0f) : -INFINITY;
  top = sink;
  for (uint i = simdgroup; i < simdgroup + params.team; ++i) top = max(top, tops[i]);
  const float base = base_of(top);
  total = sinking ? exponential(sink - base, binary) : 0.0f;
#pragma unroll
  for (uint e = 0; e < kEach; ++e) value[e] = 0.0f;
  for (uint i = simdgroup; i < simdgroup + params.team; ++i) {
    const float factor = exponential(tops[i] - base, binary);
    total = fma(factor, totals[i], total);
#pragma unroll
    for (uint e = 0; e < kEach; ++e) value[e] = fma(factor, values[(i * kEach + e) * 32 + lane], value[e]);
  }
  const uint request = token / params.queries;
  const uint query = token % params.queries;
  const ulong to = request * params.out.batch + head * params.out.head + query * params.out.token;
  const float inverse = 1.0f / total;
#pragma unroll
  for (uint e = 0; e < kEach; ++e) {
    // A part that nothing was seen of may hold anything. A NaN stays.
    if (element + e * 32 < params.value_size)
      store_number(out, to + element + e * 32, params.out_type, total == 0.0f ? 0.0f : value[e] * inverse);
  }
  if (element == 0)
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
