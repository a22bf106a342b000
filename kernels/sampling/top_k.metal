// The k largest or smallest numbers of each row, in their order, with their indices. A threadgroup has a row: it finds
// the k-th number, collects what lies before it and as many equal ones as are needed, and sorts these few. Where k is
// small, it collects what may be among them instead. Of equal numbers those with lower indices come first. Below, the
// same search keeps the largest numbers of a row where they are.
#include "sampling/candidates.h"
#include "sampling/sampling.h"
#include "sampling/selected.h"

template <typename T>
struct Candidates {
  device const T* x;
  uint length;
  bool smallest;
  uint least;

  static float number(float value) { return value + 0.0f; }
  float at(uint i) const { return number(x[i]); }
  // NaN is larger than all numbers.
  uint ordered(float value) const {
    const uint bits = isnan(value) ? ~0u : ordered_bits(value);
    return smallest ? ~bits : bits;
  }
  static float mass(float) { return 1.0f; }
};

// Writes the k largest numbers of a row and their places, in no order, and lets what lies behind them come last.
template <typename T, typename Memory>
inline void collect(Candidates<T> numbers, uint k, uint count, Memory keys, Memory places, threadgroup uint2* counts,
                    Threadgroup team) {
  const uint wanted = selected<false, T>(numbers, k, team) >> kLastShift<T>;
  // Each simdgroup has a part of the row. It counts what comes before the k-th number, and what equals it.
  const uint simdgroups = team.threads / 32, part = (numbers.length + team.threads - 1) / team.threads * 32;
  const uint begin = min(team.simdgroup * part, numbers.length), end = min(begin + part, numbers.length);
  uint before = 0, equal = 0;
  for (uint i = begin + team.lane; i < end; i += 32) {
    const uint digits = numbers.ordered(numbers.at(i)) >> kLastShift<T>;
    before += digits > wanted;
    equal += digits == wanted;
  }
  const uint2 own = uint2(simd_sum(before), simd_sum(equal));
  if (team.lane == 0) counts[team.simdgroup] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint2 place = uint2(0), all = uint2(0);
  for (uint s = 0; s < simdgroups; ++s) {
    place = s == team.simdgroup ? all : place;
    all += counts[s];
  }
  for (uint first = begin; first < end; first += 32) {
    const uint i = first + team.lane;
    const uint key = i < end ? numbers.ordered(numbers.at(i)) : 0;
    const uint digits = key >> kLastShift<T>;
    const bool is_before = i < end && digits > wanted, is_equal = i < end && digits == wanted;
    const uint2 ahead = uint2(simd_prefix_exclusive_sum(uint(is_before)), simd_prefix_exclusive_sum(uint(is_equal)));
    const uint to = is_before ? place.x + ahead.x : is_equal ? all.x + place.y + ahead.y : k;
    if (to < k) keys[to] = key, places[to] = i;
    place += uint2(simd_sum(uint(is_before)), simd_sum(uint(is_equal)));
  }
  for (uint i = k + team.thread_index; i < count; i += team.threads) keys[i] = 0, places[i] = ~0u;
}

template <typename T, typename Memory>
inline void write(Candidates<T> numbers, uint k, ulong first, Memory places, device T* values, device long* indices,
                  Threadgroup team) {
  for (uint i = team.thread_index; i < k; i += team.threads) {
    values[first + i] = numbers.x[places[i]];
    indices[first + i] = places[i];
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void top_k_rows(
    device const T* x [[buffer(0)]], device T* values [[buffer(1)]], device long* indices [[buffer(2)]],
    constant TopKParams& params [[buffer(3)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kScratch];
  threadgroup uint2 counts[32];
  threadgroup uint keys[2 * kCandidates];
  threadgroup uint* const places = keys + kCandidates;
  threadgroup atomic_uint counters[2];
  const Threadgroup team(thread_index, threads, scratch);
  const Candidates<T> numbers = {x + row * params.x_stride, params.length, params.smallest != 0, 0};
  const uint past = (params.start + row * params.x_stride) % kPackElements<T>;
  if (candidates<T>(numbers, numbers.x, past, params.k, keys, places, counters, team) > kCandidates) {
    const uint count = max(64u, power_of_two(params.k));
    collect<T, threadgroup uint*>(numbers, params.k, count, keys, places, counts, team);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sort_entries<threadgroup uint*>(keys, places, count, team);
  }
  write<T, threadgroup uint*>(numbers, params.k, ulong(row) * params.k, places, values, indices, team);
}

// Selects more values than threadgroup memory holds. `sorted` has the keys and the places of a row side by side,
// each as many as the power of two that k fits.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void top_k_long_rows(
    device const T* x [[buffer(0)]], device T* values [[buffer(1)]], device long* indices [[buffer(2)]],
    constant TopKParams& params [[buffer(3)]], device uint* sorted [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32 * kDigits];
  threadgroup uint2 counts[32];
  const Threadgroup team(thread_index, threads, scratch);
  const Candidates<T> numbers = {x + row * params.x_stride, params.length, params.smallest != 0, 0};
  const uint count = power_of_two(params.k);
  device uint* const keys = sorted + 2 * ulong(row) * count;
  device uint* const places = keys + count;
  collect<T, device uint*>(numbers, params.k, count, keys, places, counts, team);
  threadgroup_barrier(mem_flags::mem_device);
  sort_entries<device uint*>(keys, places, count, team);
  write<T, device uint*>(numbers, params.k, ulong(row) * params.k, places, values, indices, team);
}

// The largest numbers of each row stay: of logits the others become -inf, and of probabilities they become 0, and the
// sum of what is kept becomes 1. A threadgroup has a row.

// A row of logits or of probabilities. NaN counts as -inf, or as 0.
template <typename T>
struct Numbers {
  device const T* x;
  uint length;
  float lowest;
  uint least;

  float at(uint i) const {
    const float value = static_cast<float>(x[i]) + 0.0f;
    return isnan(value) ? lowest : value;
  }
  static uint ordered(float value) { return ordered_bits(value); }
  static float mass(float value) { return max(value, 0.0f); }
};

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void renorm_rows(
    device const T* x [[buffer(0)]], device const float* limits [[buffer(1)]], device T* y [[buffer(2)]],
    constant RenormParams& params [[buffer(3)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32 * kDigits];
  threadgroup float totals[32];
  const Threadgroup team(thread_index, threads, scratch);
  const bool logits = params.kind == RENORM_MASK_TOP_K;
  Numbers<T> numbers = {x + row * params.x_stride, params.length, logits ? -INFINITY : 0.0f, 0};
  const float limit = limits[row];
  if (params.kind == RENORM_TOP_P) {
    if (limit < 1.0f) numbers.least = selected<true, T>(numbers, max(limit, 0.0f), team);
  } else if (limit < static_cast<float>(params.length)) {
    numbers.least = selected<false, T>(numbers, max(limit, 1.0f), team);
  }
  device T* const to = y + ulong(row) * params.length;
  if (logits) {
    for (uint i = thread_index; i < params.length; i += threads) {
      const float value = numbers.at(i);
      to[i] = numbers.ordered(value) >= numbers.least ? static_cast<T>(value) : static_cast<T>(-INFINITY);
    }
    return;
  }
  float own = 0.0f;
  for (uint i = thread_index; i < params.length; i += threads) {
    const float value = numbers.at(i);
    if (numbers.ordered(value) >= numbers.least) own += numbers.mass(value);
  }
  const float sum = Threadgroup(thread_index, threads, totals).sum(own, 0);
  for (uint i = thread_index; i < params.length; i += threads) {
    const float value = numbers.at(i);
    const bool kept = numbers.ordered(value) >= numbers.least && sum > 0.0f;
    to[i] = static_cast<T>(kept ? numbers.mass(value) / sum : 0.0f);
  }
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("top_k_float", top_k_rows<float>)
INSTANTIATE("top_k_half", top_k_rows<half>)
INSTANTIATE("top_k_bfloat", top_k_rows<bfloat>)
INSTANTIATE("top_k_long_float", top_k_long_rows<float>)
INSTANTIATE("top_k_long_half", top_k_long_rows<half>)
INSTANTIATE("top_k_long_bfloat", top_k_long_rows<bfloat>)

INSTANTIATE("renorm_float", renorm_rows<float>)
INSTANTIATE("renorm_half", renorm_rows<half>)
INSTANTIATE("renorm_bfloat", renorm_rows<bfloat>)
