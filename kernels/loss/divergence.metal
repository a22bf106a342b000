// Divergences of rows of distributions. With q of the input, p of the target and m = beta p + (1 - beta) q:
//   beta = 0: sum(p (log p - log q))
//   beta = 1: sum(q (log q - log p))
//   else:     sum(beta p (log p - log m) + (1 - beta) q (log q - log m))
// A first walk along both rows normalizes what are logits, a second one finds the divergence, and the gradient by the
// input is h_j - q_j sum(h) for logits and h_j for log-probabilities, with the derivatives h by log q.
//
//   thread   one thread has a row
//   group    one threadgroup has a row
// A last kernel scales what is in its place already, for these gradients and those of cross entropy.
#include "common/running.h"
#include "loss/loss.h"

template <typename T>
struct Pair {
  device const T* input;
  device const T* target;
  constant DivergenceParams* params;
  // The logarithms of sums of exponentials, each as the sum of two numbers. They are stored at once.
  alignas(16) float2 input_lse;
  float2 target_lse;

  float4 load(device const T* row, uint i, float otherwise) const {
    return params->aligned ? load4<true>(row, i, params->length, otherwise)
                           : load4<false>(row, i, params->length, otherwise);
  }
  float4 logits(device const T* row, uint i) const { return params->scale * load(row, i, -INFINITY); }
  float4 log_softmax(device const T* row, uint i, float2 lse) const { return (logits(row, i) - lse.x) - lse.y; }
  float4 log_q(uint i) const {
    return params->input == DIVERGENCE_LOGITS ? log_softmax(input, i, input_lse) : load(input, i, -INFINITY);
  }
  float4 log_p(uint i) const {
    if (params->target == DIVERGENCE_PROBABILITIES) return log(load(target, i, 0.0f));
    return params->target == DIVERGENCE_LOGITS ? log_softmax(target, i, target_lse) : load(target, i, -INFINITY);
  }
};

// a (b - c), and 0 where a is 0.
inline float4 weighed(float4 a, float4 b, float4 c) { return select(a * (b - c), float4(0.0f), a == 0.0f); }

inline float4 log_mixture(float4 log_p, float4 log_q, float beta) {
  const float4 a = log_p + log(beta), b = log_q + log(1.0f - beta), top = max(a, b);
  return top + log(exp(a - top) + exp(b - top));
}

// The terms of the divergence, and the derivatives by log_q.
inline float4 terms(float4 p, float4 log_p, float4 log_q, float beta) {
  if (beta == 0.0f) return weighed(p, log_p, log_q);
  const float4 q = exp(log_q);
  if (beta == 1.0f) return weighed(q, log_q, log_p);
  const float4 log_m = log_mixture(log_p, log_q, beta);
  return beta * weighed(p, log_p, log_m) + (1.0f - beta) * weighed(q, log_q, log_m);
}
inline float4 derivatives(float4 p, float4 log_p, float4 log_q, float beta) {
  if (beta == 0.0f) return -p;
  const float4 q = exp(log_q);
  if (beta == 1.0f) return weighed(q, log_q, log_p) + q;
  return (1.0f - beta) * weighed(q, log_q, log_mixture(log_p, log_q, beta));
}

template <typename T>
inline float4 probability(Pair<T> pair, uint i, float4 log_p) {
  return pair.params->target == DIVERGENCE_PROBABILITIES ? pair.load(pair.target, i, 0.0f) : exp(log_p);
}

template <typename T, typename Team>
inline float2 lse_of(Pair<T> pair, device const T* row, Team team, uint reduction) {
  Running<float, float> running;
  for (uint i = 4 * team.thread_index; i < pair.params->length; i += 4 * team.threads) {
    float4 v[1] = {pair.logits(row, i)};
    add_all(running, v);
  }
  const float maximum = team.maximum(running.maximum, reduction);
  running.raise(maximum);
  return float2(maximum, log(team.sum(running.sum.total(), reduction + 1)));
}

// A thread adds blocks of so many steps of four elements, and carries what they round off.
constexpr constant uint kBlockSteps = 32;

// The divergence, and the sum of its derivatives. It leaves the normalizations in the pair.
template <typename T, typename Team>
inline float2 divergence(thread Pair<T>& pair, Team team) {
  constant DivergenceParams& params = *pair.params;
  pair.input_lse = params.input == DIVERGENCE_LOGITS ? lse_of(pair, pair.input, team, 0) : float2(0.0f);
  pair.target_lse = params.target == DIVERGENCE_LOGITS ? lse_of(pair, pair.target, team, 2) : float2(0.0f);
  LongSum<float> loss, total;
  for (uint first = 4 * team.thread_index; first < params.length; first += kBlockSteps * 4 * team.threads) {
    float block_loss = 0.0f, block_total = 0.0f;
    const uint end = min(params.length, first + kBlockSteps * 4 * team.threads);
    for (uint i = first; i < end; i += 4 * team.threads) {
      const float4 log_p = pair.log_p(i), log_q = pair.log_q(i), p = probability(pair, i, log_p);
      float4 term = terms(p, log_p, log_q, params.beta), h = derivatives(p, log_p, log_q, params.beta);
      // What is beyond the row's end has no probability.
      const bool4 inside = i + uint4(0, 1, 2, 3) < params.length;
      block_loss += sum4(select(float4(0.0f), term, inside));
      block_total += sum4(select(float4(0.0f), h, inside));
    }
    loss.add(block_loss);
    total.add(block_total);
  }
  return float2(team.sum(loss.total(), 4), team.sum(total.total(), 5));
}

template <typename T, typename Team>
inline void write_gradient(Pair<T> pair, device T* gradient, float total, float scale, Team team) {
  constant DivergenceParams& params = *pair.params;
  const bool logits = params.input == DIVERGENCE_LOGITS;
  for (uint i = 4 * team.thread_index; i < params.length; i += 4 * team.threads) {
    const float4 log_p = pair.log_p(i), log_q = pair.log_q(i), p = probability(pair, i, log_p);
    float4 value = scale * derivatives(p, log_p, log_q, params.beta);
    if (logits) value = params.scale * (value - scale * total * exp(log_q));
    if (params.aligned)
      store4<true>(gradient, i, params.length, value);
    else
      store4<false>(gradient, i, params.length, value);
  }
}

template <typename T, typename Team>
inline void forward_row(device const T* input, device const T* target, device float* losses, device float* saved,
                        constant DivergenceParams& params, uint row, Team team) {
  const ulong offset = ulong(row) * params.length;
  Pair<T> pair = {input + offset, target + offset, &params, float2(0.0f), float2(0.0f)};
  const float2 found = divergence(pair, team);
  if (team.thread_index > 0) return;
  losses[row] = found.x;
  saved += DIVERGENCE_SAVED * ulong(row);
  saved[0] = pair.input_lse.x;
  saved[1] = pair.input_lse.y;
  saved[2] = pair.target_lse.x;
  saved[3] = pair.target_lse.y;
  saved[4] = found.y;
}

template <typename T, typename Team>
inline void backward_row(device const float* scales, device const T* input, device const T* target,
                         device const float* saved, device T* gradient, constant DivergenceParams& params, uint row,
                         Team team) {
  const ulong offset = ulong(row) * params.length;
  saved += DIVERGENCE_SAVED * ulong(row);
  const Pair<T> pair = {input + offset, target + offset, &params, float2(saved[0], saved[1]),
                        float2(saved[2], saved[3])};
  write_gradient(pair, gradient + offset, saved[4], scales[params.scale_of_row ? row : 0], team);
}

// The gradient takes the place of the input.
template <typename T, typename Team>
inline void replace_row(device T* input, device const T* target, device const float* scales, device float* losses,
                        constant DivergenceParams& params, uint row, Team team) {
  const ulong offset = ulong(row) * params.length;
  Pair<T> pair = {input + offset, target + offset, &params, float2(0.0f), float2(0.0f)};
  const float2 found = divergence(pair, team);
  if (team.thread_index == 0) losses[row] = found.x;
  write_gradient(pair, input + offset, found.y, scales[params.scale_of_row ? row : 0], team);
}

template <typename T>
kernel void divergence_thread(device const T* input [[buffer(0)]], device const T* target [[buffer(1)]],
                              device float* losses [[buffer(2)]], device float* saved [[buffer(3)]],
                              constant DivergenceParams& params [[buffer(4)]], uint row [[thread_position_in_grid]]) {
  forward_row(input, target, losses, saved, params, row, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void divergence_group(
    device const T* input [[buffer(0)]], device const T* target [[buffer(1)]], device float* losses [[buffer(2)]],
    device float* saved [[buffer(3)]], constant DivergenceParams& params [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[6 * 32];
  forward_row(input, target, losses, saved, params, row, Threadgroup(thread_index, threads, scratch));
}

template <typename T>
kernel void divergence_backward_thread(device const float* scales [[buffer(0)]], device const T* input [[buffer(1)]],
                                       device const T* target [[buffer(2)]], device const float* saved [[buffer(3)]],
                                       device T* gradient [[buffer(4)]],
                                       constant DivergenceParams& params [[buffer(5)]],
                                       uint row [[thread_position_in_grid]]) {
  backward_row(scales, input, target, saved, gradient, params, row, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void divergence_backward_group(
    device const float* scales [[buffer(0)]], device const T* input [[buffer(1)]], device const T* target [[buffer(2)]],
    device const float* saved [[buffer(3)]], device T* gradient [[buffer(4)]],
    constant DivergenceParams& params [[buffer(5)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  backward_row(scales, input, target, saved, gradient, params, row, Threadgroup(thread_index, threads, nullptr));
}

template <typename T>
kernel void divergence_replace_thread(device T* input [[buffer(0)]], device const T* target [[buffer(1)]],
                                      device const float* scales [[buffer(2)]], device float* losses [[buffer(3)]],
                                      constant DivergenceParams& params [[buffer(4)]],
                                      uint row [[thread_position_in_grid]]) {
  replace_row(input, target, scales, losses, params, row, Alone());
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void divergence_replace_group(
    device T* input [[buffer(0)]], device const T* target [[buffer(1)]], device const float* scales [[buffer(2)]],
    device float* losses [[buffer(3)]], constant DivergenceParams& params [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[6 * 32];
  replace_row(input, target, scales, losses, params, row, Threadgroup(thread_index, threads, scratch));
}

// x *= factor, where the factor is in the GPU's memory. Where it is 1, as the gradient of a loss mostly is, nothing is
// read.
template <typename T>
kernel void scale_in_place(device T* x [[buffer(0)]], device const float* factor [[buffer(1)]],
                           constant ScaleParams& params [[buffer(2)]], uint index [[thread_position_in_grid]],
                           uint threads [[threads_per_grid]]) {
  const float by = factor[0];
  if (by == 1.0f) return;
  for (ulong i = index; i < params.count; i += threads) x[i] = static_cast<T>(by * static_cast<float>(x[i]));
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPE(suffix, T)                                                \
  INSTANTIATE("divergence_thread_" suffix, divergence_thread<T>)                   \
  INSTANTIATE("divergence_group_" suffix, divergence_group<T>)                     \
  INSTANTIATE("divergence_backward_thread_" suffix, divergence_backward_thread<T>) \
  INSTANTIATE("divergence_backward_group_" suffix, divergence_backward_group<T>)   \
  INSTANTIATE("divergence_replace_thread_" suffix, divergence_replace_thread<T>)   \
  INSTANTIATE("divergence_replace_group_" suffix, divergence_replace_group<T>)

INSTANTIATE_TYPE("float", float)
INSTANTIATE_TYPE("half", half)
INSTANTIATE_TYPE("bfloat", bfloat)

INSTANTIATE("scale_in_place_float", scale_in_place<float>)
INSTANTIATE("scale_in_place_half", scale_in_place<half>)
INSTANTIATE("scale_in_place_bfloat", scale_in_place<bfloat>)
