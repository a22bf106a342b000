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
template <typename Op, typename T, typename U>
kernel void softmax_columns(device const T* x [[buffer(0)]],
                            device U* y [[buffer(1)]],
                            constant SoftmaxParams& params [[buffer(2)]],
                            uint2 at [[thread_position_in_grid]]) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  const bool aligned = params.aligned;
  x += at.y * params.x_stride;
  y += at.y * ulong(params.length) * inner;
  Running<float4> running;
  for (uint i = 0; i < params.length; ++i) running.add(load4(x + ulong(i) * inner, column, inner, aligned, 0.0f));
  const float4 norm = Op::norm(running.sum);
  for (uint i = 0; i < params.length; ++i) {
    const float4 t = load4(x + ulong(i) * inner, column, inner, aligned, 0.0f) - running.maximum;
    store4(y + ulong(i) * inner, column, inner, aligned, Op::finish(Op::keep(t, exp(t)), norm));
  }
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
  const uint length = params.length;
  const bool aligned = params.aligned;
  x += row * params.x_stride;
  y += row * length;
  float4 v[N];
  float maximum = -INFINITY;
  for (uint n = 0; n < N; ++n) {
    v[n] = load4(x, (n * 32 + lane) * 4, length, aligned, -INFINITY);
    maximum = max(maximum, max4(v[n]));
  }
  maximum = simd_max(maximum);
  float sum = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const float4 t = v[n] - maximum;
    const float4 e = exp(t);
    sum += sum4(e);
    v[n] = Op::keep(t, e);
  }
  const float norm = Op::norm(simd_sum(sum));
  for (uint n = 0; n < N; ++n) store4(y, (n * 32 + lane) * 4, length, aligned, Op::finish(v[n], norm));
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_block(device const T* x [[buffer(0)]],
                          device U* y [[buffer(1)]],
                          constant SoftmaxParams& params [[buffer(2)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint threads [[threads_per_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float maxima[32];
  threadgroup float sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  x += group * params.x_stride;
  y += ulong(group) * length;
  float4 v[N];
  float maximum = -INFINITY;
  for (uint n = 0; n < N; ++n) {
    v[n] = load4(x, (n * threads + thread_index) * 4, length, aligned, -INFINITY);
    maximum = max(maximum, max4(v[n]));
  }
  maximum = block_max(maximum, maxima, lane, simdgroup, simdgroups);
  float sum = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const float4 t = v[n] - maximum;
    const float4 e = exp(t);
    sum += sum4(e);
    v[n] = Op::keep(t, e);
  }
  const float norm = Op::norm(block_sum(sum, sums, lane, simdgroup, simdgroups));
  for (uint n = 0; n < N; ++n) {
    store4(y, (n * threads + thread_index) * 4, length, aligned, Op::finish(v[n], norm));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_looped(device const T* x [[buffer(0)]],
                           device U* y [[buffer(1)]],
                           constant SoftmaxParams& params [[buffer(2)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint threads [[threads_per_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float maxima[32];
  threadgroup float sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  x += group * params.x_stride;
  y += ulong(group) * length;
  Running<float4> running;
  for (uint i = thread_index * 4; i < length; i += threads * 4) running.add(load4(x, i, length, aligned, -INFINITY));
  const float maximum = block_max(max4(running.maximum), maxima, lane, simdgroup, simdgroups);
  running.raise(float4(maximum));
  const float norm = Op::norm(block_sum(sum4(running.sum), sums, lane, simdgroup, simdgroups));
  for (uint i = thread_index * 4; i < length; i += threads * 4) {
    const float4 t = load4(x, i, length, aligned, -INFINITY) - maximum;
    store4(y, i, length, aligned, Op::finish(Op::keep(t, exp(t)), norm));
  }
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

template <typename Op, typename T, typename U>
kernel void softmax_backward_columns(device const U* g [[buffer(0)]],
                                     device const U* y [[buffer(1)]],
                                     device T* gx [[buffer(2)]],
                                     constant SoftmaxParams& params [[buffer(3)]],
                                     uint2 at [[thread_position_in_grid]]) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  const bool aligned = params.aligned;
  const ulong start = at.y * ulong(params.length) * inner;
  g += start;
  y += start;
  gx += start;
  float4 total = float4(0.0f);
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    total += Op::term(load4(g + row, column, inner, aligned, 0.0f), load4(y + row, column, inner, aligned, 0.0f));
  }
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    const float4 gi = load4(g + row, column, inner, aligned, 0.0f);
    const float4 yi = load4(y + row, column, inner, aligned, 0.0f);
    store4(gx + row, column, inner, aligned, Op::gradient(gi, yi, total));
  }
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
  const uint length = params.length;
  const bool aligned = params.aligned;
  g += row * length;
  y += row * length;
  gx += row * length;
  float4 gs[N];
  float4 ys[N];
  float total = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * 32 + lane) * 4;
    gs[n] = load4(g, i, length, aligned, 0.0f);
    ys[n] = load4(y, i, length, aligned, 0.0f);
    total += sum4(Op::term(gs[n], ys[n]));
  }
  total = simd_sum(total);
  for (uint n = 0; n < N; ++n) {
    store4(gx, (n * 32 + lane) * 4, length, aligned, Op::gradient(gs[n], ys[n], total));
  }
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_backward_block(device const U* g [[buffer(0)]],
                                   device const U* y [[buffer(1)]],
                                   device T* gx [[buffer(2)]],
                                   constant SoftmaxParams& params [[buffer(3)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]],
                                   uint threads [[threads_per_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  const ulong start = ulong(group) * length;
  g += start;
  y += start;
  gx += start;
  float4 gs[N];
  float4 ys[N];
  float total = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * threads + thread_index) * 4;
    gs[n] = load4(g, i, length, aligned, 0.0f);
    ys[n] = load4(y, i, length, aligned, 0.0f);
    total += sum4(Op::term(gs[n], ys[n]));
  }
  total = block_sum(total, sums, lane, simdgroup, simdgroups);
  for (uint n = 0; n < N; ++n) {
    store4(gx, (n * threads + thread_index) * 4, length, aligned, Op::gradient(gs[n], ys[n], total));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_backward_looped(device const U* g [[buffer(0)]],
                                    device const U* y [[buffer(1)]],
                                    device T* gx [[buffer(2)]],
                                    constant SoftmaxParams& params [[buffer(3)]],
                                    uint group [[threadgroup_position_in_grid]],
                                    uint thread_index [[thread_index_in_threadgroup]],
                                    uint threads [[threads_per_threadgroup]],
                                    uint lane [[thread_index_in_simdgroup]],
                                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                                    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  const ulong start = ulong(group) * length;
  g += start;
  y += start;
  gx += start;
  float total = 0.0f;
  for (uint i = thread_index * 4; i < length; i += threads * 4) {
    total += sum4(Op::term(load4(g, i, length, aligned, 0.0f), load4(y, i, length, aligned, 0.0f)));
  }
  total = block_sum(total, sums, lane, simdgroup, simdgroups);
  for (uint i = thread_index * 4; i < length; i += threads * 4) {
    const float4 gi = load4(g, i, length, aligned, 0.0f);
    const float4 yi = load4(y, i, length, aligned, 0.0f);
    store4(gx, i, length, aligned, Op::gradient(gi, yi, total));
  }
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
