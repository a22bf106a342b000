// Draws a class from all logits of each row, where there are few rows: threadgroups share a row. The first kernel finds
// the largest logit of each part of a row and the sum of the part's masses. The second one draws a part, and a class of
// that part.
#include "sampling/draw.h"

template <typename T>
inline Logits<Row<T>> part_of(device const T* x, constant SamplePartsParams& params, uint row, uint part) {
  const uint first = part * params.share;
  const float scale = params.temperature > 0.0f ? 1.0f / params.temperature : 1.0f;
  return {
      {x + row * params.x_stride + first}, min(params.share, params.length - first), scale, -INFINITY, 0, -INFINITY};
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SAMPLE_PART_THREADS)]] void sample_parts(
    device const T* x [[buffer(0)]], device float2* parts [[buffer(1)]],
    constant SamplePartsParams& params [[buffer(2)]], uint2 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint2 size [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, size.x, scratch);
  Logits<Row<T>> logits = part_of(x, params, place.y, place.x);
  logits.maximum = largest_of(logits, team);
  const float mass = team.sum(own_mass<kWalkAhead>(logits, Own(logits.length, false, team)), 1);
  if (thread_index == 0) parts[place.y * params.parts + place.x] = float2(logits.maximum, mass);
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SAMPLE_PART_THREADS)]] void sample_of_parts(
    device const T* x [[buffer(0)]], device const float2* parts [[buffer(1)]],
    constant SamplePartsParams& params [[buffer(2)]], device const float* uniform [[buffer(3)]],
    device long* classes [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  threadgroup float totals[32 + 1];
  threadgroup uint places[32];
  threadgroup uint part;
  threadgroup float own_uniform;
  const Threadgroup team(thread_index, threads, scratch);
  const bool greedy = params.temperature <= 0.0f;
  const float2 own = thread_index < params.parts ? parts[row * params.parts + thread_index] : float2(-INFINITY, 0.0f);
  const float maximum = team.maximum(own.x, 0);
  if (maximum == -INFINITY) {
    if (thread_index == 0) classes[row] = 0;
    return;
  }

  const float scale = greedy ? 1.0f : 1.0f / params.temperature;
  const float others = greedy ? 0.0f : own.y * exp((own.x - maximum) * scale);
  const Sums sums(own.x == maximum ? own.y : others, totals, team);
  float point = greedy ? 0.0f : uniform[row] * sums.all;
  point = point < sums.all ? point : 0.0f;
  if (sums.begin <= point && point < sums.end) {
    part = thread_index;
    own_uniform = min((point - sums.begin) / (sums.end - sums.begin), 0x1.fffffep-1f);  // below 1
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Logits<Row<T>> logits = part_of(x, params, row, part);
  logits.maximum = parts[row * params.parts + part].x;
  if (greedy) {
    const uint first = first_of_largest(logits, places, team);
    if (thread_index == 0) classes[row] = part * params.share + first;
    return;
  }
  const SampleOptions all = {params.temperature, 0.0f, 1.0f, 0.0f};
  const uint place = drawn<T>(logits, all, 1.0f, own_uniform, totals, team);
  if (place != ~0u) classes[row] = part * params.share + place;
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("sample_parts_float", sample_parts<float>)
INSTANTIATE("sample_parts_half", sample_parts<half>)
INSTANTIATE("sample_parts_bfloat", sample_parts<bfloat>)
INSTANTIATE("sample_of_parts_float", sample_of_parts<float>)
INSTANTIATE("sample_of_parts_half", sample_of_parts<half>)
INSTANTIATE("sample_of_parts_bfloat", sample_of_parts<bfloat>)
