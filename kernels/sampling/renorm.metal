// Keeps the largest numbers of each row: of logits the others become -inf, and of probabilities they become 0, and the
// sum of what is kept becomes 1. A threadgroup has a row.
#include "sampling/selected.h"
#include "sampling/sampling.h"

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

INSTANTIATE("renorm_float", renorm_rows<float>)
INSTANTIATE("renorm_half", renorm_rows<half>)
INSTANTIATE("renorm_bfloat", renorm_rows<bfloat>)
