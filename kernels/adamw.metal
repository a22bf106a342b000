// AdamW over many parameters at once (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; amsgrad:
// Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018). Tables of device pointers give the tensors.
// The moments are float32 or have the parameter's type.
#include <metal_stdlib>
#include "adamw.h"
using namespace metal;

template <typename T, typename M>
struct AdamWPointers {
  device T* param;
  device T* grad;
  device M* exp_avg;
  device M* exp_avg_sq;
  device M* max_exp_avg_sq;
};

// The neighbouring elements that a thread updates at once.
template <typename T, uint width>
struct Lanes {
  T at[width];
};

// Four elements as a vector. Its address must be a multiple of its size.
template <typename T>
METAL_FUNC Lanes<T, 4> lanes_of(vec<T, 4> v) {
  return {v.x, v.y, v.z, v.w};
}
template <typename T, uint width>
METAL_FUNC Lanes<T, width> load_vector(device const T* from) {
  return lanes_of(*reinterpret_cast<device const vec<T, width>*>(from));
}
template <typename T, uint width>
METAL_FUNC void store_vector(Lanes<T, width> lanes, device T* to) {
  *reinterpret_cast<device vec<T, width>*>(to) = vec<T, width>(lanes.at[0], lanes.at[1], lanes.at[2], lanes.at[3]);
}

// The first `count` elements from an address, zeros for the rest.
template <bool by_vectors, uint width, typename T>
METAL_FUNC Lanes<T, width> load(device const T* from, uint count) {
  Lanes<T, width> lanes;
  if (count == width) {
    if constexpr (by_vectors) return load_vector<T, width>(from);
    for (uint k = 0; k < width; ++k) lanes.at[k] = from[k];
  } else {
    for (uint k = 0; k < width; ++k) lanes.at[k] = k < count ? from[k] : static_cast<T>(0.0f);
  }
  return lanes;
}

template <bool by_vectors, uint width, typename T>
METAL_FUNC void store(Lanes<T, width> lanes, device T* to, uint count) {
  if (count == width) {
    if constexpr (by_vectors) return store_vector<T, width>(lanes, to);
    for (uint k = 0; k < width; ++k) to[k] = lanes.at[k];
  } else {
    for (uint k = 0; k < width; ++k)
      if (k < count) to[k] = lanes.at[k];
  }
}

// Updates elements [start, start + length) of one parameter. With `by_vectors`, neighbouring threads load neighbouring
// vectors of four, and all arrays are aligned to them. Without, a thread takes 32 bytes at any address, from which a
// CPU's compiler makes its own vectors.
template <bool by_vectors, typename T, typename M, bool amsgrad>
METAL_FUNC void update(AdamWPointers<T, M> arrays, ulong start, uint length, AdamWParams params, AdamWScalars scalars,
                       uint thread_index) {
  constexpr uint width = by_vectors ? 4 : 32 / sizeof(T);
  // Each simdgroup walks over a contiguous part of the chunk.
  constexpr uint part = ADAMW_CHUNK / (ADAMW_THREADS / 32);
  const uint first = thread_index / 32 * part + thread_index % 32 * width;
  const uint end = min(length, first + part);
  const float weight = params.one_minus_beta1;
  const bool near = weight < 0.5f;
  const float grad_factor = params.grad_sign * scalars.inverse_scale;
  for (uint i = first; i < end; i += 32 * width) {
    const uint count = min(length - i, width);
    const ulong at = start + i;
    Lanes<T, width> p = load<by_vectors, width>(arrays.param + at, count);
    Lanes<T, width> g = load<by_vectors, width>(arrays.grad + at, count);
    Lanes<M, width> m = load<by_vectors, width>(arrays.exp_avg + at, count);
    Lanes<M, width> v = load<by_vectors, width>(arrays.exp_avg_sq + at, count);
    Lanes<M, width> max_v;
    if (amsgrad) max_v = load<by_vectors, width>(arrays.max_exp_avg_sq + at, count);
    if (params.unscale) {
      Lanes<T, width> unscaled;
      for (uint k = 0; k < width; ++k)
        unscaled.at[k] = static_cast<T>(static_cast<float>(g.at[k]) * scalars.inverse_scale);
      store<by_vectors, width>(unscaled, arrays.grad + at, count);
    }
    // The operations, their order and their roundings are those of torch.optim.AdamW, so that float32 results agree.
    for (uint k = 0; k < width; ++k) {
      const float grad = static_cast<float>(g.at[k]) * grad_factor;
      // fma keeps the compiler from contracting this product into the sum at the end.
      const float decayed = fma(static_cast<float>(p.at[k]), scalars.decay, -0.0f);
      // lerp(m, grad, weight), from the nearer end.
      const float old_m = static_cast<float>(m.at[k]);
      const float new_m = fma(near ? weight : weight - 1.0f, grad - old_m, near ? old_m : grad);
      const float new_v = fma(params.one_minus_beta2 * grad, grad, static_cast<float>(v.at[k]) * params.beta2);
      float second = new_v;
      if (amsgrad) {
        const float old_max = static_cast<float>(max_v.at[k]);
        second = old_max >= second ? old_max : second;  // max() would lose a NaN
        max_v.at[k] = static_cast<M>(second);
      }
      const float denominator = precise::sqrt(second) / scalars.bias_correction2_sqrt + params.eps;
      p.at[k] = static_cast<T>(decayed + scalars.negative_step_size * new_m / denominator);
      m.at[k] = static_cast<M>(new_m);
      v.at[k] = static_cast<M>(new_v);
    }
    store<by_vectors, width>(p, arrays.param + at, count);
    store<by_vectors, width>(m, arrays.exp_avg + at, count);
    store<by_vectors, width>(v, arrays.exp_avg_sq + at, count);
    if (amsgrad) store<by_vectors, width>(max_v, arrays.max_exp_avg_sq + at, count);
  }
}

template <typename T, typename M, bool amsgrad>
[[kernel]] [[max_total_threads_per_threadgroup(ADAMW_THREADS)]] void adamw(
    constant AdamWPointers<T, M>* pointers [[buffer(0)]], constant AdamWTensor* tensors [[buffer(1)]],
    constant AdamWScalars* all_scalars [[buffer(2)]], constant AdamWParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]]) {
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
  const AdamWScalars scalars = all_scalars[tensor];
  if (scalars.skip) return;
  const AdamWPointers<T, M> arrays = pointers[tensor];
  const ulong start = static_cast<ulong>(threadgroup_index - tensors[tensor].first_threadgroup) * ADAMW_CHUNK;
  const uint length = static_cast<uint>(min(tensors[tensor].numel - start, static_cast<ulong>(ADAMW_CHUNK)));
  if (tensors[tensor].vectors)
    update<true, T, M, amsgrad>(arrays, start, length, params, scalars, thread_index);
  else
    update<false, T, M, amsgrad>(arrays, start, length, params, scalars, thread_index);
}

// 1 - exp(x) for x <= 0, accurate to the last digit or two even where x is small.
METAL_FUNC float one_minus_exp(float x) {
  if (x < -0.5f) return 1.0f - precise::exp(x);
  float sum = 1.0f / 362880.0f;  // Taylor: the first omitted term is below 1e-9 of the sum
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
  device const float* lr;  // each may be null
  device const float* grad_scale;
  device const float* found_inf;
};

struct AdamWStep {
  device float* value;
};

// Increments the steps, which are in device memory, and computes AdamWScalars from them. A thread handles one step.
kernel void adamw_scalars(constant AdamWStep* steps [[buffer(0)]], device AdamWScalars* scalars [[buffer(1)]],
                          constant AdamWStepPointers& pointers [[buffer(2)]],
                          constant AdamWStepParams& params [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  const bool skip = pointers.found_inf != nullptr && *pointers.found_inf != 0.0f;
  const float step = *steps[i].value + (skip ? 0.0f : 1.0f);
  *steps[i].value = step;
  const float lr = pointers.lr != nullptr ? *pointers.lr : params.lr;
  AdamWScalars result;
  result.decay = 1.0f - lr * params.weight_decay;
  result.negative_step_size = -lr / bias_correction(step, params.log_beta1, params.log_beta1_low);
  result.bias_correction2_sqrt = precise::sqrt(bias_correction(step, params.log_beta2, params.log_beta2_low));
  result.inverse_scale = pointers.grad_scale != nullptr ? 1.0f / *pointers.grad_scale : 1.0f;
  result.skip = skip;
  scalars[i] = result;
}

#define INSTANTIATE(name, T, M, amsgrad)                                                                           \
  template [[host_name(name)]] [[kernel]] void adamw<T, M, amsgrad>(constant AdamWPointers<T, M>*,                 \
                                                                    constant AdamWTensor*, constant AdamWScalars*, \
                                                                    constant AdamWParams&, uint, uint);

INSTANTIATE("adamw_float", float, float, false)
INSTANTIATE("adamw_half", half, float, false)
INSTANTIATE("adamw_bfloat", bfloat, float, false)
INSTANTIATE("adamw_narrow_half", half, half, false)
INSTANTIATE("adamw_narrow_bfloat", bfloat, bfloat, false)
INSTANTIATE("adamw_amsgrad_float", float, float, true)
INSTANTIATE("adamw_amsgrad_half", half, float, true)
INSTANTIATE("adamw_amsgrad_bfloat", bfloat, float, true)
INSTANTIATE("adamw_amsgrad_narrow_half", half, half, true)
INSTANTIATE("adamw_amsgrad_narrow_bfloat", bfloat, bfloat, true)
