// Draws a class from the distribution of each row of logits, without a sort. A threadgroup has a row.
//
// With a small top_k it is drawn from the logits that may be among the k largest, in their order, and with top_p alone
// from a few of the largest if these have that mass. Else the k-th largest logit and the one at which the largest have
// a mass of top_p are found digit by digit of their ordered bits: one walk sums the logits' counts or masses by the
// digit's 16 values. The class is then where the sum of the masses of what is left reaches a random part of the whole,
// in the order of the threads.
#include "sampling/draw.h"

// So many of the largest logits often have a mass of top_p.
constexpr constant uint kNucleus = 256;

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void sample_rows(
    device const T* x [[buffer(0)]], device const float* uniform [[buffer(1)]], device long* classes [[buffer(2)]],
    constant SampleParams& params [[buffer(3)]], device const SampleOptions* own_options [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kScratch];
  threadgroup float totals[32 + 1];
  threadgroup uint keys[2 * kCandidates];
  threadgroup uint* const places = keys + kCandidates;
  threadgroup atomic_uint counters[2];
  const Threadgroup team(thread_index, threads, scratch);
  const SampleOptions options = {params.per_row ? own_options[row].temperature : params.options.temperature,
                                 params.per_row ? own_options[row].top_k : params.options.top_k,
                                 params.per_row ? own_options[row].top_p : params.options.top_p,
                                 params.per_row ? own_options[row].min_p : params.options.min_p};
  const float length = static_cast<float>(params.length);
  const bool greedy = options.temperature <= 0.0f;
  const float scale = greedy ? 1.0f : 1.0f / options.temperature;
  Logits<Row<T>> logits = {{x + row * params.x_stride}, params.length, scale, -INFINITY, 0, -INFINITY};
  const bool limited = options.top_k > 0.0f && options.top_k < length;
  const bool nucleus = !limited && options.top_p < 1.0f && params.length > kNucleus;
  if (!greedy && (nucleus || (limited && options.top_k <= static_cast<float>(TOP_K_MOST)))) {
    const uint k = nucleus ? kNucleus : static_cast<uint>(ceil(options.top_k));
    const uint past = (params.start + row * params.x_stride) % kPackElements<T>;
    const uint count = candidates<T>(logits, logits.source.x, past, k, keys, places, counters, team);
    if (count <= kCandidates) {
      const Logits<Keys> few = {{keys}, count, scale, number_of(keys[0]), keys[k - 1], -INFINITY};
      float top_p = options.top_p;
      bool enough = true;
      if (nucleus) {
        Logits<Row<T>> whole = logits;
        whole.maximum = few.maximum;
        const float all = Sums(own_mass<kAhead>(whole, Own(params.length, false, team)), totals, team).all;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float of_few = Sums(own_mass<1>(few, Own(count, true, team)), totals, team).all;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        enough = of_few >= top_p * all;
        top_p = min(top_p * all / of_few, 1.0f);
      }
      if (enough) {
        const uint place = few.maximum == -INFINITY ? (thread_index == 0 ? 0 : ~0u)
                                                    : drawn<T>(few, options, top_p, uniform[row], totals, team);
        if (place != ~0u) classes[row] = places[place];
        return;
      }
    }
  }
  logits.maximum = largest_of(logits, team);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (greedy || logits.maximum == -INFINITY) {
    const uint first = first_of_largest(logits, places, team);
    if (thread_index == 0) classes[row] = first;
    return;
  }
  if (limited) logits.least = selected<false, T>(logits, options.top_k, team);
  const uint place = drawn<T>(logits, options, options.top_p, uniform[row], totals, team);
  if (place != ~0u) classes[row] = place;
}

// Draws a class from all logits of each row, where there are few rows: threadgroups share a row. The first kernel finds
// the largest logit of each part of a row and the sum of the part's masses. The second one draws a part, and a class of
// that part.
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

INSTANTIATE("sample_float", sample_rows<float>)
INSTANTIATE("sample_half", sample_rows<half>)
INSTANTIATE("sample_bfloat", sample_rows<bfloat>)
INSTANTIATE("sample_parts_float", sample_parts<float>)
INSTANTIATE("sample_parts_half", sample_parts<half>)
INSTANTIATE("sample_parts_bfloat", sample_parts<bfloat>)
INSTANTIATE("sample_of_parts_float", sample_of_parts<float>)
INSTANTIATE("sample_of_parts_half", sample_of_parts<half>)
INSTANTIATE("sample_of_parts_bfloat", sample_of_parts<bfloat>)
