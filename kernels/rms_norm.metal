// rms_norm over rows: y = x / sqrt(mean(x^2) + eps) * weight, optionally of x + residual, and its derivatives.
// T is the type of the rows, W that of the weight.
#include "common/rows.h"
#include "rms_norm.h"

inline float scale_of(float squares, constant RmsNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

// What draws a gradient towards x: scale^2 mean(g x).
inline float pull_of(float product, float scale, constant RmsNormParams& params) {
  return scale * scale * (product / static_cast<float>(params.length));
}

// The row to normalize: x, or x + residual rounded to T as a separate addition would leave it.
template <typename T>
struct Input {
  device const T* x;
  device const T* residual;
  device T* sum;
  uint length;
  bool aligned;
  bool has_residual;

  Input(device const T* x, device const T* residual, device T* sum, constant RmsNormParams& params, ulong row)
      : x(x + row * params.x_stride),
        residual(residual + row * params.residual_stride),
        sum(sum + row * params.length),
        length(params.length),
        aligned(params.aligned),
        has_residual(params.has_residual) {}

  // Reads four elements and writes their sum with the residual.
  float4 read(uint i) const {
    const float4 value = load4(x, i, length, aligned, 0.0f);
    if (!has_residual) return value;
    const float4 added = static_cast<float4>(
        static_cast<vec<T, 4>>(value + load4(residual, i, length, aligned, 0.0f)));
    store4(sum, i, length, aligned, added);
    return added;
  }
  // Reads what read() has seen before.
  float4 again(uint i) const {
    return has_residual ? load4(static_cast<device const T*>(sum), i, length, aligned, 0.0f)
                        : load4(x, i, length, aligned, 0.0f);
  }
};

template <typename W>
struct Weight {
  device const W* weight;
  uint length;
  bool aligned;
  bool present;

  Weight(device const W* weight, constant RmsNormParams& params)
      : weight(weight), length(params.length), aligned(params.aligned), present(params.has_weight) {}

  float4 read(uint i) const { return present ? load4(weight, i, length, aligned, 0.0f) : float4(1.0f); }
};

// Forward

template <typename T, typename W>
kernel void rms_norm_thread(device const T* x [[buffer(0)]],
                            device const T* residual [[buffer(1)]],
                            device const W* weight [[buffer(2)]],
                            device T* y [[buffer(3)]],
                            device T* sum [[buffer(4)]],
                            constant RmsNormParams& params [[buffer(5)]],
                            uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  x += row * params.x_stride;
  y += ulong(row) * length;
  if (params.has_residual) {
    residual += row * params.residual_stride;
    sum += ulong(row) * length;
    for (uint i = 0; i < length; ++i) sum[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(residual[i]));
    x = sum;
  }
  float squares = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += static_cast<float>(x[i]) * static_cast<float>(x[i]);
    squares += part;
  }
  const float scale = scale_of(squares, params);
  for (uint i = 0; i < length; ++i) {
    const float normal = static_cast<float>(x[i]) * scale;
    y[i] = static_cast<T>(has_weight ? normal * static_cast<float>(weight[i]) : normal);
  }
}

template <typename T, typename W, uint N>
kernel void rms_norm_simd(device const T* x [[buffer(0)]],
                          device const T* residual [[buffer(1)]],
                          device const W* weight [[buffer(2)]],
                          device T* y [[buffer(3)]],
                          device T* sum [[buffer(4)]],
                          constant RmsNormParams& params [[buffer(5)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  const Input<T> input(x, residual, sum, params, row);
  const Weight<W> weights(weight, params);
  y += row * params.length;
  float4 v[N];
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) {
    v[n] = input.read((n * 32 + lane) * 4);
    squares += sum4(v[n] * v[n]);
  }
  const float scale = scale_of(simd_sum(squares), params);
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * 32 + lane) * 4;
    store4(y, i, params.length, params.aligned, v[n] * scale * weights.read(i));
  }
}

template <typename T, typename W, uint N>
kernel void rms_norm_block(device const T* x [[buffer(0)]],
                           device const T* residual [[buffer(1)]],
                           device const W* weight [[buffer(2)]],
                           device T* y [[buffer(3)]],
                           device T* sum [[buffer(4)]],
                           constant RmsNormParams& params [[buffer(5)]],
                           uint row [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint threads [[threads_per_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  const Input<T> input(x, residual, sum, params, row);
  const Weight<W> weights(weight, params);
  y += ulong(row) * params.length;
  float4 v[N];
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) {
    v[n] = input.read((n * threads + thread_index) * 4);
    squares += sum4(v[n] * v[n]);
  }
  const float scale = scale_of(block_sum(squares, sums, lane, simdgroup, simdgroups), params);
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * threads + thread_index) * 4;
    store4(y, i, params.length, params.aligned, v[n] * scale * weights.read(i));
  }
}

template <typename T, typename W>
kernel void rms_norm_looped(device const T* x [[buffer(0)]],
                            device const T* residual [[buffer(1)]],
                            device const W* weight [[buffer(2)]],
                            device T* y [[buffer(3)]],
                            device T* sum [[buffer(4)]],
                            constant RmsNormParams& params [[buffer(5)]],
                            uint row [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  const Input<T> input(x, residual, sum, params, row);
  const Weight<W> weights(weight, params);
  y += ulong(row) * params.length;
  float squares = 0.0f;
  for (uint i = thread_index * 4; i < params.length; i += threads * 4) {
    const float4 v = input.read(i);
    squares += sum4(v * v);
  }
  const float scale = scale_of(block_sum(squares, sums, lane, simdgroup, simdgroups), params);
  for (uint i = thread_index * 4; i < params.length; i += threads * 4) {
    store4(y, i, params.length, params.aligned, input.again(i) * scale * weights.read(i));
  }
}

// Backward. With s the scale and g the output's gradient times the weight,
//   gx = s (g - x s^2 mean(g x)),
// plus `residual`, the gradient that reaches x + residual by itself. `scales` keeps s for the weight's gradient.

template <typename T>
struct Gradient {
  device T* gx;
  device const T* residual;
  uint length;
  bool aligned;
  bool has_residual;
  float scale;
  float pull;

  Gradient(device T* gx, device const T* residual, float squares, float product, constant RmsNormParams& params,
           ulong row)
      : gx(gx + row * params.length),
        residual(residual + row * params.residual_stride),
        length(params.length),
        aligned(params.aligned),
        has_residual(params.has_residual),
        scale(scale_of(squares, params)),
        pull(pull_of(product, scale, params)) {}

  void write(uint i, float4 g, float4 x) const {
    float4 value = scale * (g - x * pull);
    if (has_residual) value += load4(residual, i, length, aligned, 0.0f);
    store4(gx, i, length, aligned, value);
  }
};

template <typename T, typename W>
kernel void rms_norm_backward_thread(device const T* grad [[buffer(0)]],
                                     device const T* x [[buffer(1)]],
                                     device const W* weight [[buffer(2)]],
                                     device const T* residual [[buffer(3)]],
                                     device T* gx [[buffer(4)]],
                                     device float* scales [[buffer(5)]],
                                     constant RmsNormParams& params [[buffer(6)]],
                                     uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  const bool has_residual = params.has_residual;
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  gx += ulong(row) * length;
  residual += row * params.residual_stride;
  float squares = 0.0f;
  float product = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float square_part = 0.0f;
    float product_part = 0.0f;
    for (uint i = start; i < end; ++i) {
      const float v = static_cast<float>(x[i]);
      const float g = static_cast<float>(grad[i]);
      square_part += v * v;
      product_part += (has_weight ? g * static_cast<float>(weight[i]) : g) * v;
    }
    squares += square_part;
    product += product_part;
  }
  const float scale = scale_of(squares, params);
  const float pull = pull_of(product, scale, params);
  scales[row] = scale;
  for (uint i = 0; i < length; ++i) {
    const float g = static_cast<float>(grad[i]);
    const float weighted = has_weight ? g * static_cast<float>(weight[i]) : g;
    const float value = scale * (weighted - static_cast<float>(x[i]) * pull);
    gx[i] = static_cast<T>(has_residual ? value + static_cast<float>(residual[i]) : value);
  }
}

template <typename T, typename W, uint N>
kernel void rms_norm_backward_simd(device const T* grad [[buffer(0)]],
                                   device const T* x [[buffer(1)]],
                                   device const W* weight [[buffer(2)]],
                                   device const T* residual [[buffer(3)]],
                                   device T* gx [[buffer(4)]],
                                   device float* scales [[buffer(5)]],
                                   constant RmsNormParams& params [[buffer(6)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  const uint length = params.length;
  const bool aligned = params.aligned;
  const Weight<W> weights(weight, params);
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  float4 v[N];
  float4 g[N];
  float squares = 0.0f;
  float product = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * 32 + lane) * 4;
    v[n] = load4(x, i, length, aligned, 0.0f);
    g[n] = load4(grad, i, length, aligned, 0.0f) * weights.read(i);
    squares += sum4(v[n] * v[n]);
    product += sum4(g[n] * v[n]);
  }
  const Gradient<T> gradient(gx, residual, simd_sum(squares), simd_sum(product), params, row);
  if (lane == 0) scales[row] = gradient.scale;
  for (uint n = 0; n < N; ++n) gradient.write((n * 32 + lane) * 4, g[n], v[n]);
}

template <typename T, typename W, uint N>
kernel void rms_norm_backward_block(device const T* grad [[buffer(0)]],
                                    device const T* x [[buffer(1)]],
                                    device const W* weight [[buffer(2)]],
                                    device const T* residual [[buffer(3)]],
                                    device T* gx [[buffer(4)]],
                                    device float* scales [[buffer(5)]],
                                    constant RmsNormParams& params [[buffer(6)]],
                                    uint row [[threadgroup_position_in_grid]],
                                    uint thread_index [[thread_index_in_threadgroup]],
                                    uint threads [[threads_per_threadgroup]],
                                    uint lane [[thread_index_in_simdgroup]],
                                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                                    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float square_sums[32];
  threadgroup float product_sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  const Weight<W> weights(weight, params);
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  float4 v[N];
  float4 g[N];
  float squares = 0.0f;
  float product = 0.0f;
  for (uint n = 0; n < N; ++n) {
    const uint i = (n * threads + thread_index) * 4;
    v[n] = load4(x, i, length, aligned, 0.0f);
    g[n] = load4(grad, i, length, aligned, 0.0f) * weights.read(i);
    squares += sum4(v[n] * v[n]);
    product += sum4(g[n] * v[n]);
  }
  squares = block_sum(squares, square_sums, lane, simdgroup, simdgroups);
  product = block_sum(product, product_sums, lane, simdgroup, simdgroups);
  const Gradient<T> gradient(gx, residual, squares, product, params, row);
  if (thread_index == 0) scales[row] = gradient.scale;
  for (uint n = 0; n < N; ++n) gradient.write((n * threads + thread_index) * 4, g[n], v[n]);
}

template <typename T, typename W>
kernel void rms_norm_backward_looped(device const T* grad [[buffer(0)]],
                                     device const T* x [[buffer(1)]],
                                     device const W* weight [[buffer(2)]],
                                     device const T* residual [[buffer(3)]],
                                     device T* gx [[buffer(4)]],
                                     device float* scales [[buffer(5)]],
                                     constant RmsNormParams& params [[buffer(6)]],
                                     uint row [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]],
                                     uint threads [[threads_per_threadgroup]],
                                     uint lane [[thread_index_in_simdgroup]],
                                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float square_sums[32];
  threadgroup float product_sums[32];
  const uint length = params.length;
  const bool aligned = params.aligned;
  const Weight<W> weights(weight, params);
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  float squares = 0.0f;
  float product = 0.0f;
  for (uint i = thread_index * 4; i < length; i += threads * 4) {
    const float4 v = load4(x, i, length, aligned, 0.0f);
    squares += sum4(v * v);
    product += sum4(load4(grad, i, length, aligned, 0.0f) * weights.read(i) * v);
  }
  squares = block_sum(squares, square_sums, lane, simdgroup, simdgroups);
  product = block_sum(product, product_sums, lane, simdgroup, simdgroups);
  const Gradient<T> gradient(gx, residual, squares, product, params, row);
  if (thread_index == 0) scales[row] = gradient.scale;
  for (uint i = thread_index * 4; i < length; i += threads * 4) {
    gradient.write(i, load4(grad, i, length, aligned, 0.0f) * weights.read(i), load4(x, i, length, aligned, 0.0f));
  }
}

// The weight's gradient, sum over rows of grad x s: no atomics, so the order of the additions is always the same. In the first
// stage a thread has four columns and a chunk of the rows.

template <typename T>
kernel void rms_norm_weight_partial(device const T* grad [[buffer(0)]],
                                    device const T* x [[buffer(1)]],
                                    device const float* scales [[buffer(2)]],
                                    device float* partial [[buffer(3)]],
                                    constant RmsNormWeightParams& params [[buffer(4)]],
                                    uint2 at [[thread_position_in_grid]]) {
  const uint column = at.x * 4;
  const uint first = at.y * params.chunk_rows;
  const uint last = min(first + params.chunk_rows, params.rows);
  const uint length = params.length;
  const bool aligned = params.aligned;
  float4 sum = float4(0.0f);
  for (uint row = first; row < last; ++row) {
    sum += load4(grad + row * params.grad_stride, column, length, aligned, 0.0f) *
           load4(x + row * params.x_stride, column, length, aligned, 0.0f) * scales[row];
  }
  store4(partial + ulong(at.y) * length, column, length, aligned, sum);
}

template <typename W>
kernel void rms_norm_weight_final(device const float* partial [[buffer(0)]],
                                  device W* gw [[buffer(1)]],
                                  constant RmsNormWeightParams& params [[buffer(2)]],
                                  uint column [[thread_position_in_grid]]) {
  float sum = 0.0f;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) sum += partial[ulong(chunk) * params.length + column];
  gw[column] = static_cast<W>(sum);
}

#define INSTANTIATE(name, types, ...) \
  template [[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T, W)                                                     \
  INSTANTIATE("rms_norm_thread", types, rms_norm_thread<T, W>)                             \
  INSTANTIATE("rms_norm_simd1", types, rms_norm_simd<T, W, 1>)                             \
  INSTANTIATE("rms_norm_simd4", types, rms_norm_simd<T, W, 4>)                             \
  INSTANTIATE("rms_norm_block4", types, rms_norm_block<T, W, 4>)                           \
  INSTANTIATE("rms_norm_looped", types, rms_norm_looped<T, W>)                             \
  INSTANTIATE("rms_norm_backward_thread", types, rms_norm_backward_thread<T, W>)           \
  INSTANTIATE("rms_norm_backward_simd1", types, rms_norm_backward_simd<T, W, 1>)           \
  INSTANTIATE("rms_norm_backward_simd4", types, rms_norm_backward_simd<T, W, 4>)           \
  INSTANTIATE("rms_norm_backward_block4", types, rms_norm_backward_block<T, W, 4>)         \
  INSTANTIATE("rms_norm_backward_looped", types, rms_norm_backward_looped<T, W>)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

INSTANTIATE("rms_norm_weight_partial", "_float", rms_norm_weight_partial<float>)
INSTANTIATE("rms_norm_weight_partial", "_half", rms_norm_weight_partial<half>)
INSTANTIATE("rms_norm_weight_partial", "_bfloat", rms_norm_weight_partial<bfloat>)
INSTANTIATE("rms_norm_weight_final", "_float", rms_norm_weight_final<float>)
INSTANTIATE("rms_norm_weight_final", "_half", rms_norm_weight_final<half>)
INSTANTIATE("rms_norm_weight_final", "_bfloat", rms_norm_weight_final<bfloat>)
