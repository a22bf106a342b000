// A row of the cross entropy of logits, and of its derivative, by the threads of a team.
//
// With the coefficients c of a row's classes, which come from the target, from weights and from label smoothing:
//   loss = sum(c_j (lse - x_j)) + z_loss lse^2
//   gradient_j = (sum(c) + 2 z_loss lse) exp(x_j - lse) - c_j
// One walk along the row finds the largest logit m, s = sum(exp(x - m)) and the loss, another one the gradient, where
// exp(x_j - lse) is exp(x_j - m) / s: lse = m + log(s) in one float32 has lost digits of log(s) where m is large.
#pragma once

#include "common/running.h"
#include "loss/loss.h"

// Logits of -inf stay what they are.
template <typename V>
inline V capped(V x, float softcap) {
  return softcap > 0.0f ? select(softcap * tanh(x / softcap), x, x == V(-INFINITY)) : x;
}
// The derivative of capped() where that gave y.
template <typename V>
inline V slope(V y, float softcap) {
  const V share = y / softcap;
  return softcap > 0.0f ? select(1.0f - share * share, V(0.0f), y == V(-INFINITY)) : V(1.0f);
}

template <typename T>
struct LogitRow {
  device const T* x;
  device const T* probabilities;
  device const float* weight;
  constant CrossEntropyParams* params;
  uint past;     // elements by which x begins past a multiple of 16 bytes
  uint target;   // not used with probabilities
  bool ignored;  // it has no loss
  bool wrong;    // its target is no class
  ulong offset;  // of its first element in contiguous logits

  LogitRow(device const T* logits, device const long* targets, device const T* probabilities,
           device const float* weight, constant CrossEntropyParams& params, uint row)
      : weight(weight), params(&params) {
    const ulong block = row / params.inner, within = row % params.inner;
    offset = block * params.length * params.inner + within;
    x = logits + block * params.x_stride + within;
    this->probabilities = probabilities + offset;
    past = (params.start + block * params.x_stride) % 16;
    const long index = params.probabilities ? 0 : targets[row];
    ignored = !params.probabilities && index == params.ignore_index;
    wrong = !ignored && (index < 0 || index >= params.length);
    target = ignored || wrong ? 0 : index;
  }

  float logit(uint i) const { return capped(static_cast<float>(x[ulong(i) * params->inner]), params->softcap); }
  float weight_of(uint i) const { return params->has_weight ? weight[i] : 1.0f; }
  // The weight of its target.
  float row_weight() const { return ignored ? 0.0f : params->probabilities ? 1.0f : weight_of(target); }
  // The target's own coefficient.
  float own() const { return params->probabilities ? 0.0f : (1.0f - params->smoothing) * weight_of(target); }
  // The coefficient of a class without that.
  float coefficient(uint i) const {
    float share = params->smoothing / params->length;
    if (params->probabilities)
      share += (1.0f - params->smoothing) * static_cast<float>(probabilities[ulong(i) * params->inner]);
    return share * weight_of(i);
  }
};

// What the first walk finds.
struct RowLoss {
  float loss, maximum, sum, mass;  // sum is that of the exponentials, and mass that of the coefficients

  float lse() const { return maximum + log(sum); }
  // What exponentials of differences from the maximum are multiplied by in the gradient.
  float factor(float z_loss) const { return (mass + 2.0f * z_loss * lse()) / sum; }
};

// Four elements of a row at a time, at `threads` elements' distance.
constexpr constant uint kStep = 4;

template <typename T, typename Team>
inline RowLoss general_loss(LogitRow<T> row, Team team) {
  const uint length = row.params->length;
  // Differences from it are small where the logits are large.
  const float target = row.logit(row.target);  // now, since the gradient may take its place
  const float reference = isfinite(target) ? target : 0.0f;
  Running<float, float> running;
  LongSum<float> masses, linears;
  for (uint start = team.thread_index; start < length; start += kStep * team.threads) {
    float4 x = float4(-INFINITY), c = float4(0.0f), products = float4(0.0f);
    for (uint k = 0; k < kStep; ++k) {
      const uint i = start + k * team.threads;
      if (i >= length) break;
      x[k] = row.logit(i);
      if (!row.params->general) continue;
      c[k] = row.coefficient(i);
      if (c[k] != 0.0f) products[k] = c[k] * (x[k] - reference);  // 0 * -inf would be NaN
    }
    const float top = max(running.maximum, max4(x));
    running.raise(top);
    running.sum.add(sum4(exp(x - Running<float, float>::base(top))));
    masses.add(sum4(c));
    linears.add(sum4(products));
  }
  const float maximum = team.maximum(running.maximum, 0);
  running.raise(maximum);
  const float sum = team.sum(running.sum.total(), 1), log_sum = log(sum), own = row.own();
  const float mass = team.sum(masses.total(), 2), linear = team.sum(linears.total(), 3);
  float loss = own * ((maximum - target) + log_sum);
  if (row.params->general) loss += mass * ((maximum - reference) + log_sum) - linear;
  return {row.params->probabilities ? loss - own : loss, maximum, sum, mass + own};
}

template <typename T>
inline void general_gradient(LogitRow<T> row, device T* gradient, RowLoss found, float scale, uint first,
                             uint threads) {
  const float own = row.own(), factor = found.factor(row.params->z_loss);
  for (uint i = first; i < row.params->length; i += threads) {
    const float x = row.logit(i);
    float value = factor * exp(x - found.maximum);
    if (row.params->general) value -= row.coefficient(i);
    if (i == row.target) value -= own;
    gradient[ulong(i) * row.params->inner] = static_cast<T>(scale * value * slope(x, row.params->softcap));
  }
}

// Without weights and probabilities, for elements next to each other.

template <bool aligned, bool smooth, typename T>
inline RowLoss plain_loss(LogitRow<T> row, Threadgroup team) {
  constexpr uint N = kLongStep<T>;
  const float softcap = row.params->softcap;
  const Edges<aligned, T> edges(row.past, row.params->length, team.thread_index);
  const float target = row.logit(row.target);
  const float reference = smooth && isfinite(target) ? target : 0.0f;  // differences are small where logits are large
  Running<T, float> running;
  LongSum<float> differences;
  if (!aligned) {
    const float x = capped(edges.load(row.x, -INFINITY), softcap);
    running.add(x);
    if (smooth && edges.present) differences.add(x - reference);
  }
  float4 v[N];
  for (uint start = 0; start < edges.body; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<true>(v, row.x + edges.head, edges.body, -INFINITY);
    if (softcap > 0.0f) {
#pragma unroll
      for (uint n = 0; n < N; ++n) v[n] = capped(v[n], softcap);
    }
    add_all(running, v);
    if constexpr (smooth) {
      float4 part = float4(0.0f);
#pragma unroll
      for (uint n = 0; n < N; ++n)
        part += share.at(n) < edges.body ? v[n] - reference : float4(0.0f);  // others are -inf
      differences.add(sum4(part));
    }
  }
  const float maximum = team.maximum(running.maximum, 0);
  running.raise(maximum);
  const float sum = team.sum(running.sum.total(), 1), log_sum = log(sum);
  const float own = (maximum - (smooth ? row.logit(row.target) : target)) + log_sum;  // registers are short
  if constexpr (!smooth) return {own, maximum, sum, 1.0f};
  const float even = ((maximum - reference) + log_sum) - team.sum(differences.total(), 2) / row.params->length;
  return {row.own() * own + row.params->smoothing * even, maximum, sum, 1.0f};
}

template <bool aligned, typename T>
inline void plain_gradient(LogitRow<T> row, device T* gradient, RowLoss found, float scale, Threadgroup team) {
  constexpr uint N = kLongStep<T>;
  const float softcap = row.params->softcap, factor = scale * found.factor(row.params->z_loss);
  const float own = scale * row.own(), even = scale * row.params->smoothing / row.params->length;  // of a class
  const Edges<aligned, T> edges(row.past, row.params->length, team.thread_index);
  const uint target = row.target - edges.head;  // in the body, or far beyond it
  // From the row's end on, which the walk before has left in the cache.
  const uint step = team.threads * 4 * N;
  float4 v[N];
  for (uint steps = (edges.body + step - 1) / step; steps > 0; --steps) {
    const Share<T, N> share(team.thread_index, team.threads, (steps - 1) * step);
    if (share.at(N - 1) < edges.body) {
      share.template load<true>(v, row.x + edges.head, edges.body, -INFINITY);
    } else {  // what lies beyond the end is not loaded from elsewhere: another thread may write there
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        const uint i = share.at(n);
        v[n] = i < edges.body ? load4<true>(row.x + edges.head, i, edges.body, -INFINITY) : float4(-INFINITY);
      }
    }
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 x = capped(v[n], softcap);
      v[n] = factor * exponential<T>(x - found.maximum) - even;
      const uint k = target - share.at(n);
      if (k < 4) v[n] -= select(float4(0.0f), float4(own), uint4(k) == uint4(0, 1, 2, 3));
      if (softcap > 0.0f) v[n] *= slope(x, softcap);
    }
    store_body<aligned>(share, v, gradient + edges.head, edges.body, row.params->together);
  }
  if (aligned) return;
  const float x = capped(edges.load(row.x, -INFINITY), softcap);
  const float value = factor * exponential<T>(x - found.maximum) - even - (edges.element == row.target ? own : 0.0f);
  edges.store(gradient, value * slope(x, softcap));
}

template <typename T>
inline RowLoss loss_of(LogitRow<T> row, Alone team) {
  return general_loss(row, team);
}
template <typename T>
inline RowLoss loss_of(LogitRow<T> row, Threadgroup team) {
  if (!row.params->vectors) return general_loss(row, team);
  if (row.params->smoothing > 0.0f)
    return row.params->aligned ? plain_loss<true, true>(row, team) : plain_loss<false, true>(row, team);
  return row.params->aligned ? plain_loss<true, false>(row, team) : plain_loss<false, false>(row, team);
}

template <typename T>
inline void write_gradient(LogitRow<T> row, device T* gradient, RowLoss found, float scale, Alone team) {
  general_gradient(row, gradient, found, scale, 0, 1);
}
template <typename T>
inline void write_gradient(LogitRow<T> row, device T* gradient, RowLoss found, float scale, Threadgroup team) {
  if (!row.params->vectors)
    general_gradient(row, gradient, found, scale, team.thread_index, team.threads);
  else if (row.params->aligned)
    plain_gradient<true>(row, gradient, found, scale, team);
  else
    plain_gradient<false>(row, gradient, found, scale, team);
}

// The loss of a row with its weight; NaN where its target is no class.
template <typename T>
inline float2 result(LogitRow<T> row, RowLoss found) {
  if (row.ignored) return float2(0.0f);
  const float lse = found.lse();
  return row.wrong ? float2(NAN) : float2(found.loss + row.params->z_loss * lse * lse, row.row_weight());
}

template <typename T, typename Team>
inline void forward_row(LogitRow<T> row, device T* losses, device float2* results, device float* saved, uint index,
                        Team team) {
  RowLoss found = {0.0f, 0.0f, 1.0f, 0.0f};
  if (!row.ignored && !row.wrong) found = loss_of(row, team);
  if (team.thread_index > 0) return;
  const float2 value = result(row, found);
  losses[index] = static_cast<T>(value.x);
  results[index] = value;
  saved += 3 * ulong(index);
  saved[0] = found.maximum;
  saved[1] = found.sum;
  saved[2] = found.mass;
}

// Writes the gradient of a row that has no loss, and returns whether it is one.
template <typename T, typename Team>
inline bool write_gradient_without_loss(LogitRow<T> row, device T* gradient, Team team) {
  if (!row.ignored && !row.wrong) return false;
  const T value = static_cast<T>(row.ignored ? 0.0f : NAN);
  for (uint i = team.thread_index; i < row.params->length; i += team.threads)
    gradient[ulong(i) * row.params->inner] = value;
  return true;
}

template <typename T, typename Team>
inline void backward_row(LogitRow<T> row, device const T* grad, device const float* total, device const float* saved,
                         device T* gradient, uint index, Team team) {
  gradient += row.offset;
  const float scale =
      row.params->scale_of_row ? static_cast<float>(grad[index]) : static_cast<float>(grad[0]) / total[0];
  saved += 3 * ulong(index);
  const RowLoss found = {0.0f, saved[0], saved[1], saved[2]};
  if (!write_gradient_without_loss(row, gradient, team)) write_gradient(row, gradient, found, scale, team);
}

// The gradient is written beside the logits, in the same walk as the loss, for an upstream gradient of 1. Where rows
// are `divided`, it is already divided by the sum of the weights.
template <typename T, typename Team>
inline void ahead_row(LogitRow<T> row, device T* losses, device float2* results, device const float* total,
                      device T* gradient, uint divided, uint index, Team team) {
  gradient += row.offset;
  RowLoss found = {0.0f, 0.0f, 1.0f, 0.0f};
  if (!write_gradient_without_loss(row, gradient, team)) {
    found = loss_of(row, team);
    write_gradient(row, gradient, found, divided ? 1.0f / total[0] : 1.0f, team);
  }
  if (team.thread_index > 0) return;
  const float2 value = result(row, found);
  losses[index] = static_cast<T>(value.x);
  results[index] = value;
}

template <typename T>
inline void scale_elements(device T* row, uint, constant CrossEntropyParams& params, float scale, Alone) {
  for (uint i = 0; i < params.length; ++i) {
    device T& element = row[ulong(i) * params.inner];
    element = static_cast<T>(scale * static_cast<float>(element));
  }
}
// The row's elements are next to each other. It begins `past` elements behind a multiple of 16 bytes.
template <typename T>
inline void scale_elements(device T* row, uint past, constant CrossEntropyParams& params, float scale,
                           Threadgroup team) {
  if (params.length < 16) {  // vectors' edges need 15 elements
    if (team.thread_index < params.length)
      row[team.thread_index] = static_cast<T>(scale * static_cast<float>(row[team.thread_index]));
    return;
  }
  const Edges<false, T> edges(past, params.length, team.thread_index);
  for (uint i = 4 * team.thread_index; i < edges.body; i += 4 * team.threads)
    store4<true>(row + edges.head, i, edges.body, scale * load4<true>(row + edges.head, i, edges.body, 0.0f));
  edges.store(row, scale * edges.load(row, 0.0f));
}

// What is left to do backward. A row that is not counted has zeros, also where the scale is infinite.
template <typename T, typename Team>
inline void finish_row(device T* gradient, device const long* targets, device const T* grad, device const float* total,
                       constant CrossEntropyParams& params, uint divided, uint index, Team team) {
  if (!params.probabilities && targets[index] == params.ignore_index) return;
  const float upstream = static_cast<float>(grad[params.scale_of_row ? index : 0]);
  const float scale = divided ? upstream / total[0] : upstream;
  if (scale == 1.0f) return;
  const uint block = index / params.inner;
  const ulong first = ulong(block) * params.length * params.inner;
  scale_elements(gradient + first + index % params.inner, uint(first % 16), params, scale, team);
}

// Ends what the team's threads read of device memory before others write there.
inline void finish_reads(Alone) {}
inline void finish_reads(Threadgroup) { threadgroup_barrier(mem_flags::mem_device); }

// The gradient takes the place of the logits.
template <typename T, typename Team>
inline void replace_row(LogitRow<T> row, device T* x, device const float* scales, device float* losses, uint index,
                        Team team) {
  x += row.x - x;
  RowLoss found = {0.0f, 0.0f, 1.0f, 0.0f};
  if (!write_gradient_without_loss(row, x, team)) {
    found = loss_of(row, team);
    finish_reads(team);
    write_gradient(row, x, found, scales[row.params->scale_of_row ? index : 0], team);
  }
  if (team.thread_index == 0) losses[index] = result(row, found).x;
}
