// The cross entropy of rows of logits, and its derivative. cross_entropy.h says how a row is computed.
//
//   thread   one thread has a row, whose elements may lie apart
//   group    one threadgroup has a row
//
// Both exist for the loss, for the gradient from a saved m and s, and for both at once, where the gradient takes the
// place of the logits or is written ahead of its use, which keeps no logits. Rows without weights and class
// probabilities have one c_j for all classes except the target, 0 without label smoothing: they are read in whole
// vectors.
#include "loss/cross_entropy.h"

template <typename T>
kernel void cross_entropy_thread(device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
                                 device const T* probabilities [[buffer(2)]], device const float* weight [[buffer(3)]],
                                 device T* losses [[buffer(4)]], device float2* results [[buffer(5)]],
                                 device float* saved [[buffer(6)]], constant CrossEntropyParams& params [[buffer(7)]],
                                 uint index [[thread_position_in_grid]]) {
  forward_row(LogitRow<T>(x, targets, probabilities, weight, params, index), losses, results, saved, index, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_group(
    device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
    device const T* probabilities [[buffer(2)]], device const float* weight [[buffer(3)]],
    device T* losses [[buffer(4)]], device float2* results [[buffer(5)]], device float* saved [[buffer(6)]],
    constant CrossEntropyParams& params [[buffer(7)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[4 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  forward_row(LogitRow<T>(x, targets, probabilities, weight, params, index), losses, results, saved, index, team);
}

template <typename T>
kernel void cross_entropy_backward_thread(device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
                                          device const T* probabilities [[buffer(2)]],
                                          device const float* weight [[buffer(3)]], device const T* grad [[buffer(4)]],
                                          device const float* total [[buffer(5)]],
                                          device const float* saved [[buffer(6)]], device T* gradient [[buffer(7)]],
                                          constant CrossEntropyParams& params [[buffer(8)]],
                                          uint index [[thread_position_in_grid]]) {
  backward_row(LogitRow<T>(x, targets, probabilities, weight, params, index), grad, total, saved, gradient, index,
               Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_backward_group(
    device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
    device const T* probabilities [[buffer(2)]], device const float* weight [[buffer(3)]],
    device const T* grad [[buffer(4)]], device const float* total [[buffer(5)]],
    device const float* saved [[buffer(6)]], device T* gradient [[buffer(7)]],
    constant CrossEntropyParams& params [[buffer(8)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const Threadgroup team(thread_index, threads, nullptr);
  backward_row(LogitRow<T>(x, targets, probabilities, weight, params, index), grad, total, saved, gradient, index,
               team);
}

template <typename T>
kernel void cross_entropy_replace_thread(device T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
                                         device const float* weight [[buffer(2)]],
                                         device const float* scales [[buffer(3)]], device float* losses [[buffer(4)]],
                                         constant CrossEntropyParams& params [[buffer(5)]],
                                         uint index [[thread_position_in_grid]]) {
  replace_row(LogitRow<T>(x, targets, x, weight, params, index), x, scales, losses, index, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_replace_group(
    device T* x [[buffer(0)]], device const long* targets [[buffer(1)]], device const float* weight [[buffer(2)]],
    device const float* scales [[buffer(3)]], device float* losses [[buffer(4)]],
    constant CrossEntropyParams& params [[buffer(5)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[4 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  replace_row(LogitRow<T>(x, targets, x, weight, params, index), x, scales, losses, index, team);
}

template <typename T>
kernel void cross_entropy_ahead_thread(device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
                                       device const T* probabilities [[buffer(2)]],
                                       device const float* weight [[buffer(3)]], device T* losses [[buffer(4)]],
                                       device float2* results [[buffer(5)]], device const float* total [[buffer(6)]],
                                       device T* gradient [[buffer(7)]],
                                       constant CrossEntropyParams& params [[buffer(8)]],
                                       constant uint& divided [[buffer(9)]], uint index [[thread_position_in_grid]]) {
  ahead_row(LogitRow<T>(x, targets, probabilities, weight, params, index), losses, results, total, gradient, divided,
            index, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_ahead_group(
    device const T* x [[buffer(0)]], device const long* targets [[buffer(1)]],
    device const T* probabilities [[buffer(2)]], device const float* weight [[buffer(3)]],
    device T* losses [[buffer(4)]], device float2* results [[buffer(5)]], device const float* total [[buffer(6)]],
    device T* gradient [[buffer(7)]], constant CrossEntropyParams& params [[buffer(8)]],
    constant uint& divided [[buffer(9)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[4 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  ahead_row(LogitRow<T>(x, targets, probabilities, weight, params, index), losses, results, total, gradient, divided,
            index, team);
}

template <typename T>
kernel void cross_entropy_finish_thread(device T* gradient [[buffer(0)]], device const long* targets [[buffer(1)]],
                                        device const T* grad [[buffer(2)]], device const float* total [[buffer(3)]],
                                        constant CrossEntropyParams& params [[buffer(4)]],
                                        constant uint& divided [[buffer(5)]], uint index [[thread_position_in_grid]]) {
  finish_row(gradient, targets, grad, total, params, divided, index, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_finish_group(
    device T* gradient [[buffer(0)]], device const long* targets [[buffer(1)]], device const T* grad [[buffer(2)]],
    device const float* total [[buffer(3)]], constant CrossEntropyParams& params [[buffer(4)]],
    constant uint& divided [[buffer(5)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  finish_row(gradient, targets, grad, total, params, divided, index, Threadgroup(thread_index, threads, nullptr));
}

// The sum of the weights of the targets, before the losses are known.
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_weights(
    device const long* targets [[buffer(0)]], device const float* weight [[buffer(1)]],
    device float* total [[buffer(2)]], constant CrossEntropyParams& params [[buffer(3)]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  float sum = 0.0f;
  for (uint i = thread_index; i < params.rows; i += threads) {
    const long index = params.probabilities ? 0 : targets[i];
    if (!params.probabilities && index == params.ignore_index) continue;
    const bool wrong = index < 0 || index >= params.length;
    sum += wrong ? NAN : params.probabilities || !params.has_weight ? 1.0f : weight[index];
  }
  sum = team.sum(sum, 0);
  if (thread_index == 0) total[0] = sum;
}

// The sum of losses and that of their weights, in one order whatever the device: first of parts, then of these.

inline float2 sum_of_pairs(device const float2* pairs, uint first, uint last, Threadgroup team) {
  LongSum<float2> sum;
  for (uint i = first + team.thread_index; i < last; i += team.threads) sum.add(pairs[i]);
  const float2 total = sum.total();
  const float losses = team.sum(total.x, 0);
  return float2(losses, team.sum(total.y, 1));
}

[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_parts(
    device const float2* results [[buffer(0)]], device float2* parts [[buffer(1)]],
    constant CrossEntropySumParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const uint first = group * params.share;
  const float2 sum = sum_of_pairs(results, first, min(first + params.share, params.count), team);
  if (thread_index == 0) parts[group] = sum;
}

template <typename U>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void cross_entropy_total(
    device const float2* pairs [[buffer(0)]], device U* loss [[buffer(1)]], device float* total [[buffer(2)]],
    constant CrossEntropySumParams& params [[buffer(3)]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const float2 sum = sum_of_pairs(pairs, 0, params.count, team);
  if (thread_index > 0) return;
  const float divisor = params.mean ? sum.y : 1.0f;
  loss[0] = static_cast<U>(sum.x / divisor);
  total[0] = divisor;
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPE(suffix, T)                                                      \
  INSTANTIATE("cross_entropy_thread_" suffix, cross_entropy_thread<T>)                   \
  INSTANTIATE("cross_entropy_group_" suffix, cross_entropy_group<T>)                     \
  INSTANTIATE("cross_entropy_backward_thread_" suffix, cross_entropy_backward_thread<T>) \
  INSTANTIATE("cross_entropy_backward_group_" suffix, cross_entropy_backward_group<T>)   \
  INSTANTIATE("cross_entropy_replace_thread_" suffix, cross_entropy_replace_thread<T>)   \
  INSTANTIATE("cross_entropy_replace_group_" suffix, cross_entropy_replace_group<T>)     \
  INSTANTIATE("cross_entropy_ahead_thread_" suffix, cross_entropy_ahead_thread<T>)       \
  INSTANTIATE("cross_entropy_ahead_group_" suffix, cross_entropy_ahead_group<T>)         \
  INSTANTIATE("cross_entropy_finish_thread_" suffix, cross_entropy_finish_thread<T>)     \
  INSTANTIATE("cross_entropy_finish_group_" suffix, cross_entropy_finish_group<T>)       \
  INSTANTIATE("cross_entropy_total_" suffix, cross_entropy_total<T>)

INSTANTIATE_TYPE("float", float)
INSTANTIATE_TYPE("half", half)
INSTANTIATE_TYPE("bfloat", bfloat)
