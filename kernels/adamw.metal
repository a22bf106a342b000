// AdamW over many parameters at once (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; amsgrad:
// Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018). The tensors are reached through tables of
// device pointers. The moments are float32 whatever the parameter's type.
#include <metal_stdlib>
#include "adamw.h"
using namespace metal;

template <typename T>
struct AdamWPointers {
  device T* param;
  device T* grad;
  device float* exp_avg;
  device float* exp_avg_sq;
  device float* max_exp_avg_sq;
};

// The operations, their order and their roundings are those of torch.optim.AdamW, so that float32 results agree.
template <typename V, bool amsgrad>
METAL_FUNC V updated(V param, V grad, thread V& exp_avg, thread V& exp_avg_sq, thread V& max_exp_avg_sq,
                     constant AdamWScalars& scalars, constant AdamWParams& params) {
  grad *= params.grad_sign;
  // A product by itself, which the compiler must not contract into the last line's sum.
  param = fma(param, V(scalars.decay), V(-0.0f));
  // lerp(exp_avg, grad, weight), from the nearer end.
  const float weight = params.one_minus_beta1;
  exp_avg = weight < 0.5f ? fma(V(weight), grad - exp_avg, exp_avg) : fma(V(weight - 1.0f), grad - exp_avg, grad);
  exp_avg_sq = fma(params.one_minus_beta2 * grad, grad, exp_avg_sq * params.beta2);
  V second = exp_avg_sq;
  if (amsgrad) {
    // Not max(), which would lose a NaN.
    second = max_exp_avg_sq = select(exp_avg_sq, max_exp_avg_sq, max_exp_avg_sq >= exp_avg_sq);
  }
  const V denominator = precise::sqrt(second) / scalars.bias_correction2_sqrt + params.eps;
  return param + scalars.negative_step_size * exp_avg / denominator;
}

// Elements of the width of V (one or four) at offset `at` of each array.
template <typename V, typename T, typename VT, bool amsgrad>
METAL_FUNC void update(AdamWPointers<T> pointers, ulong at, constant AdamWScalars& scalars,
                       constant AdamWParams& params) {
  device VT* param = reinterpret_cast<device VT*>(pointers.param + at);
  device VT* grad = reinterpret_cast<device VT*>(pointers.grad + at);
  device V* exp_avg = reinterpret_cast<device V*>(pointers.exp_avg + at);
  device V* exp_avg_sq = reinterpret_cast<device V*>(pointers.exp_avg_sq + at);
  device V* max_exp_avg_sq = reinterpret_cast<device V*>(pointers.max_exp_avg_sq + at);

  V g = V(*grad);
  if (params.unscale) {
    g = g / scalars.grad_scale;
    *grad = VT(g);
  }
  V m = *exp_avg, v = *exp_avg_sq, max_v = V(0.0f);
  if (amsgrad) max_v = *max_exp_avg_sq;
  *param = VT(updated<V, amsgrad>(V(*param), g, m, v, max_v, scalars, params));
  *exp_avg = m;
  *exp_avg_sq = v;
  if (amsgrad) *max_exp_avg_sq = max_v;
}

template <typename T, bool amsgrad>
kernel void adamw(constant AdamWPointers<T>* pointers [[buffer(0)]],
                  constant AdamWTensor* tensors [[buffer(1)]],
                  constant AdamWScalars* scalars [[buffer(2)]],
                  constant AdamWParams& params [[buffer(3)]],
                  uint threadgroup_index [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_position_in_threadgroup]]) {
  // The parameter that this threadgroup works on: the last whose first threadgroup is not after this one.
  uint tensor = 0;
  for (uint end = params.tensors; end - tensor > 1;) {
    const uint middle = (tensor + end) / 2;
    if (tensors[middle].first_threadgroup <= threadgroup_index) {
      tensor = middle;
    } else {
      end = middle;
    }
  }
  if (scalars[tensor].skip) return;
  const AdamWPointers<T> arrays = pointers[tensor];
  const ulong start = static_cast<ulong>(threadgroup_index - tensors[tensor].first_threadgroup) * ADAMW_CHUNK;
  const uint count = static_cast<uint>(min(tensors[tensor].numel - start, static_cast<ulong>(ADAMW_CHUNK)));
  const bool aligned = tensors[tensor].aligned;
  for (uint i = 4 * thread_index; i < count; i += 4 * ADAMW_THREADS) {
    if (aligned && i + 4 <= count) {
      update<float4, T, vec<T, 4>, amsgrad>(arrays, start + i, scalars[tensor], params);
    } else {
      for (uint j = i; j < min(i + 4, count); ++j) {
        update<float, T, T, amsgrad>(arrays, start + j, scalars[tensor], params);
      }
    }
  }
}

// 1 - exp(x) for x <= 0, to the last digit or two also where x is small.
METAL_FUNC float one_minus_exp(float x) {
  if (x < -0.5f) return 1.0f - precise::exp(x);
  float sum = 1.0f / 362880.0f;  // Taylor: the first term left out is below 1e-9 of the sum
  sum = fma(sum, x, 1.0f / 40320.0f);
  sum = fma(sum, x, 1.0f / 5040.0f);
  sum = fma(sum, x, 1.0f / 720.0f);
  sum = fma(sum, x, 1.0f / 120.0f);
  sum = fma(sum, x, 1.0f / 24.0f);
  sum = fma(sum, x, 1.0f / 6.0f);
  sum = fma(sum, x, 0.5f);
  return -fma(sum * x, x, x);
}

// 1 - beta^step, where log(beta) = high + low.
METAL_FUNC float bias_correction(float step, float high, float low) {
  const float product = step * high;
  return one_minus_exp(product + (fma(step, high, -product) + step * low));
}

struct AdamWStepPointers {
  device const float* lr;          // each may be null
  device const float* grad_scale;
  device const float* found_inf;
};

struct AdamWStep {
  device float* value;
};

// Steps that live in device memory: increments them and computes what adamw needs of them, a thread for each.
kernel void adamw_scalars(constant AdamWStep* steps [[buffer(0)]],
                          device AdamWScalars* scalars [[buffer(1)]],
                          constant AdamWStepPointers& pointers [[buffer(2)]],
                          constant AdamWStepParams& params [[buffer(3)]],
                          uint i [[thread_position_in_grid]]) {
  const bool skip = pointers.found_inf != nullptr && *pointers.found_inf != 0.0f;
  const float step = *steps[i].value + (skip ? 0.0f : 1.0f);
  *steps[i].value = step;
  const float lr = pointers.lr != nullptr ? *pointers.lr : params.lr;
  AdamWScalars result;
  result.decay = 1.0f - lr * params.weight_decay;
  result.negative_step_size = -lr / bias_correction(step, params.log_beta1, params.log_beta1_low);
  result.bias_correction2_sqrt = precise::sqrt(bias_correction(step, params.log_beta2, params.log_beta2_low));
  result.grad_scale = pointers.grad_scale != nullptr ? *pointers.grad_scale : 1.0f;
  result.skip = skip;
  scalars[i] = result;
}

#define INSTANTIATE(name, T, amsgrad)                                                                       \
  template [[host_name(name)]] kernel void adamw<T, amsgrad>(                                               \
      constant AdamWPointers<T>*, constant AdamWTensor*, constant AdamWScalars*, constant AdamWParams&,     \
      uint, uint);

INSTANTIATE("adamw_float", float, false)
INSTANTIATE("adamw_half", half, false)
INSTANTIATE("adamw_bfloat", bfloat, false)
INSTANTIATE("adamw_amsgrad_float", float, true)
INSTANTIATE("adamw_amsgrad_half", half, true)
INSTANTIATE("adamw_amsgrad_bfloat", bfloat, true)
