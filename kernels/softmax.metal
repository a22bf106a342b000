// softmax and log_softmax over rows, and their derivatives. T is the type of the input and its gradient, U the type of
// the output and its gradient.
#include "common/rows.h"
#include "softmax.h"

// With t = x - max and norm made of sum(exp(t)). `keep` is what a thread holds between its two passes over a row.
// The derivative is gradient(g, y, total) with total = sum(term(g, y)).
// Numbers are of type V: float, or float4 for four elements (or four rows) at once.
struct Softmax {
  template <typename V> static V norm(V sum) { return 1.0f / sum; }
  template <typename V> static V keep(V t, V exp_t) { return exp_t; }
  template <typename V, typename S> static V finish(V kept, S norm) { return kept * norm; }
  template <typename V> static V term(V g, V y) { return g * y; }
  template <typename V, typename S> static V gradient(V g, V y, S total) { return y * (g - total); }
};

struct LogSoftmax {
  template <typename V> static V norm(V sum) { return log(sum); }
  template <typename V> static V keep(V t, V exp_t) { return t; }
  template <typename V, typename S> static V finish(V kept, S norm) { return kept - norm; }
  template <typename V> static V term(V g, V y) { return g; }
  template <typename V, typename S> static V gradient(V g, V y, S total) { return g - exp(y) * total; }
};

// The running maximum of some elements and the sum of exp(x - maximum), of each component of V by itself.
template <typename V>
struct Running {
  V maximum = V(-INFINITY);
  V sum = V(0.0f);

  // What to subtract from elements up to `maximum`: -inf - -inf would be NaN, where exp(-inf - 0) is the 0 we want.
  static V base(V maximum) { return select(maximum, V(0.0f), maximum == V(-INFINITY)); }

  void raise(V to) {
    sum *= exp(maximum - base(to));
    maximum = to;
  }
  void add(V x) {
    raise(max(maximum, x));
    sum += exp(x - base(maximum));
  }
};

// Forward

template <typename Op, typename T, typename U>
kernel void softmax_thread(device const T* x [[buffer(0)]],
                           device U* y [[buffer(1)]],
                           constant SoftmaxParams& params [[buffer(2)]],
                           uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  x += row * params.x_stride;
  y += ulong(row) * length;
  float maximum = -INFINITY;
  for (uint i = 0; i < length; ++i) maximum = max(maximum, static_cast<float>(x[i]));
  float sum = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += exp(static_cast<float>(x[i]) - maximum);
    sum += part;
  }
  const float norm = Op::norm(sum);
  for (uint i = 0; i < length; ++i) {
    const float t = static_cast<float>(x[i]) - maximum;
    y[i] = static_cast<U>(Op::finish(Op::keep(t, exp(t)), norm));
  }
}

// Rows whose elements lie `inner` apart: a thread takes four neighbouring rows.
template <bool aligned, typename Op, typename T, typename U>
inline void forward_columns(device const T* x, device U* y, constant SoftmaxParams& params, uint2 at) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  x += at.y * params.x_stride;
  y += at.y * ulong(params.length) * inner;
  Running<float4> running;
  for (uint i = 0; i < params.length; ++i) running.add(load4<aligned>(x + ulong(i) * inner, column, inner, 0.0f));
  const float4 norm = Op::norm(running.sum);
  for (uint i = 0; i < params.length; ++i) {
    const float4 t = load4<aligned>(x + ulong(i) * inner, column, inner, 0.0f) - running.maximum;
    store4<aligned>(y + ulong(i) * inner, column, inner, Op::finish(Op::keep(t, exp(t)), norm));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_columns(device const T* x [[buffer(0)]],
                            device U* y [[buffer(1)]],
                            constant SoftmaxParams& params [[buffer(2)]],
                            uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    forward_columns<true, Op>(x, y, params, at);
  else
    forward_columns<false, Op>(x, y, params, at);
}

// One row in the registers of a team.
template <bool aligned, typename Op, uint N, typename T, typename U, typename Team>
inline void forward_row(device const T* x, device U* y, uint length, Team team) {
  const Share<T, N> share(team.thread_index, team.threads);
  float4 v[N];
  share.template load<aligned>(v, x, length, -INFINITY);
  float maximum = -INFINITY;
  for (uint n = 0; n < N; ++n) maximum = max(maximum, max4(v[n]));
  maximum = team.maximum(maximum, 0);
  float sum = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const float4 t = v[n] - maximum;
    const float4 e = exp(t);
    sum += sum4(e);
    v[n] = Op::keep(t, e);
  }
  const float norm = Op::norm(team.sum(sum, 1));
  for (uint n = 0; n < N; ++n) v[n] = Op::finish(v[n], norm);
  share.template store<aligned>(v, y, length);
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_simd(device const T* x [[buffer(0)]],
                         device U* y [[buffer(1)]],
                         constant SoftmaxParams& params [[buffer(2)]],
                         uint group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  x += row * params.x_stride;
  y += row * params.length;
  if (params.aligned)
    forward_row<true, Op, N>(x, y, params.length, Simdgroup(lane));
  else
    forward_row<false, Op, N>(x, y, params.length, Simdgroup(lane));
}

template <typename Op, typename T, typename U, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void softmax_block(
    device const T* x [[buffer(0)]],
    device U* y [[buffer(1)]],
    constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  x += group * params.x_stride;
  y += ulong(group) * params.length;
  if (params.aligned)
    forward_row<true, Op, N>(x, y, params.length, team);
  else
    forward_row<false, Op, N>(x, y, params.length, team);
}

template <bool aligned, typename Op, typename T, typename U>
inline void forward_long_row(device const T* x, device U* y, uint length, Threadgroup team) {
  constexpr uint N = kStep<T>;
  Running<float4> running;
  float4 v[N];
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    Share<T, N>(team.thread_index, team.threads, start).template load<aligned>(v, x, length, -INFINITY);
    for (uint n = 0; n < N; ++n) running.add(v[n]);
  }
  const float maximum = team.maximum(max4(running.maximum), 0);
  running.raise(float4(maximum));
  const float norm = Op::norm(team.sum(sum4(running.sum), 1));
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(v, x, length, -INFINITY);
    for (uint n = 0; n < N; ++n) {
      const float4 t = v[n] - maximum;
      v[n] = Op::finish(Op::keep(t, exp(t)), norm);
    }
    share.template store<aligned>(v, y, length);
  }
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void softmax_looped(
    device const T* x [[buffer(0)]],
    device U* y [[buffer(1)]],
    constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  x += group * params.x_stride;
  y += ulong(group) * params.length;
  if (params.aligned)
    forward_long_row<true, Op>(x, y, params.length, team);
  else
    forward_long_row<false, Op>(x, y, params.length, team);
}

// Backward: from the output's gradient g and the output y

template <typename Op, typename T, typename U>
kernel void softmax_backward_thread(device const U* g [[buffer(0)]],
                                    device const U* y [[buffer(1)]],
                                    device T* gx [[buffer(2)]],
                                    constant SoftmaxParams& params [[buffer(3)]],
                                    uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  g += ulong(row) * length;
  y += ulong(row) * length;
  gx += ulong(row) * length;
  float total = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += Op::term(static_cast<float>(g[i]), static_cast<float>(y[i]));
    total += part;
  }
  for (uint i = 0; i < length; ++i) {
    gx[i] = static_cast<T>(Op::gradient(static_cast<float>(g[i]), static_cast<float>(y[i]), total));
  }
}

template <bool aligned, typename Op, typename T, typename U>
inline void backward_columns(device const U* g, device const U* y, device T* gx, constant SoftmaxParams& params,
                             uint2 at) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  const ulong start = at.y * ulong(params.length) * inner;
  g += start;
  y += start;
  gx += start;
  float4 total = float4(0.0f);
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    total += Op::term(load4<aligned>(g + row, column, inner, 0.0f), load4<aligned>(y + row, column, inner, 0.0f));
  }
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    const float4 gi = load4<aligned>(g + row, column, inner, 0.0f);
    const float4 yi = load4<aligned>(y + row, column, inner, 0.0f);
    store4<aligned>(gx + row, column, inner, Op::gradient(gi, yi, total));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_backward_columns(device const U* g [[buffer(0)]],
                                     device const U* y [[buffer(1)]],
                                     device T* gx [[buffer(2)]],
                                     constant SoftmaxParams& params [[buffer(3)]],
                                     uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    backward_columns<true, Op>(g, y, gx, params, at);
  else
    backward_columns<false, Op>(g, y, gx, params, at);
}

template <bool aligned, typename Op, uint N, typename T, typename U, typename Team>
inline void backward_row(device const U* g, device const U* y, device T* gx, uint length, Team team) {
  const Share<U, N> share(team.thread_index, team.threads);
  float4 gs[N];
  float4 ys[N];
  share.template load<aligned>(gs, g, length, 0.0f);
  share.template load<aligned>(ys, y, length, 0.0f);
  float total = 0.0f;
  for (uint n = 0; n < N; ++n) total += sum4(Op::term(gs[n], ys[n]));
  total = team.sum(total, 0);
  for (uint n = 0; n < N; ++n) gs[n] = Op::gradient(gs[n], ys[n], total);
  share.template store<aligned>(gs, gx, length);
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_backward_simd(device const U* g [[buffer(0)]],
                                  device const U* y [[buffer(1)]],
                                  device T* gx [[buffer(2)]],
                                  constant SoftmaxParams& params [[buffer(3)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint lane [[thread_index_in_simdgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  const ulong start = row * params.length;
  if (params.aligned)
    backward_row<true, Op, N>(g + start, y + start, gx + start, params.length, Simdgroup(lane));
  else
    backward_row<false, Op, N>(g + start, y + start, gx + start, params.length, Simdgroup(lane));
}

template <typename Op, typename T, typename U, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void softmax_backward_block(
    device const U* g [[buffer(0)]],
    device const U* y [[buffer(1)]],
    device T* gx [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  const ulong start = ulong(group) * params.length;
  if (params.aligned)
    backward_row<true, Op, N>(g + start, y + start, gx + start, params.length, team);
  else
    backward_row<false, Op, N>(g + start, y + start, gx + start, params.length, team);
}

template <bool aligned, typename Op, typename T, typename U>
inline void backward_long_row(device const U* g, device const U* y, device T* gx, uint length, Threadgroup team) {
  constexpr uint N = kStep<U>;
  float4 gs[N];
  float4 ys[N];
  float total = 0.0f;
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    const Share<U, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(gs, g, length, 0.0f);
    share.template load<aligned>(ys, y, length, 0.0f);
    for (uint n = 0; n < N; ++n) total += sum4(Op::term(gs[n], ys[n]));
  }
  total = team.sum(total, 0);
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    const Share<U, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(gs, g, length, 0.0f);
    share.template load<aligned>(ys, y, length, 0.0f);
    for (uint n = 0; n < N; ++n) gs[n] = Op::gradient(gs[n], ys[n], total);
    share.template store<aligned>(gs, gx, length);
  }
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void softmax_backward_looped(
    device const U* g [[buffer(0)]],
    device const U* y [[buffer(1)]],
    device T* gx [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  const ulong start = ulong(group) * params.length;
  if (params.aligned)
    backward_long_row<true, Op>(g + start, y + start, gx + start, params.length, team);
  else
    backward_long_row<false, Op>(g + start, y + start, gx + start, params.length, team);
}

#define INSTANTIATE(name, types, ...) \
  template [[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(name, Op, types, T, U)                                             \
  INSTANTIATE(name "_thread", types, softmax_thread<Op, T, U>)                               \
  INSTANTIATE(name "_columns", types, softmax_columns<Op, T, U>)                             \
  INSTANTIATE(name "_simd1", types, softmax_simd<Op, T, U, 1>)                               \
  INSTANTIATE(name "_simd4", types, softmax_simd<Op, T, U, 4>)                               \
  INSTANTIATE(name "_block4", types, softmax_block<Op, T, U, 4>)                             \
  INSTANTIATE(name "_looped", types, softmax_looped<Op, T, U>)                               \
  INSTANTIATE(name "_backward_thread", types, softmax_backward_thread<Op, T, U>)             \
  INSTANTIATE(name "_backward_columns", types, softmax_backward_columns<Op, T, U>)           \
  INSTANTIATE(name "_backward_simd1", types, softmax_backward_simd<Op, T, U, 1>)             \
  INSTANTIATE(name "_backward_simd4", types, softmax_backward_simd<Op, T, U, 4>)             \
  INSTANTIATE(name "_backward_block4", types, softmax_backward_block<Op, T, U, 4>)           \
  INSTANTIATE(name "_backward_looped", types, softmax_backward_looped<Op, T, U>)

#define INSTANTIATE_OP(name, Op)                                          \
  INSTANTIATE_TYPES(name, Op, "_float", float, float)                     \
  INSTANTIATE_TYPES(name, Op, "_half", half, half)                        \
  INSTANTIATE_TYPES(name, Op, "_bfloat", bfloat, bfloat)                  \
  INSTANTIATE_TYPES(name, Op, "_half_to_float", half, float)              \
  INSTANTIATE_TYPES(name, Op, "_bfloat_to_float", bfloat, float)

INSTANTIATE_OP("softmax", Softmax)
INSTANTIATE_OP("log_softmax", LogSoftmax)
