// Optimizers with one state at most, over many parameters at once: stochastic gradient descent, with momentum as
// PyTorch has it (Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
// learning", 2013), and Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).
#include <metal_stdlib>
#include "lanes.h"
#include "optim.h"
using namespace metal;

template <typename T>
struct SgdPointers {
  device T* param;
  device T* grad;
  device T* buffer;  // null: no momentum
};

template <typename T>
struct SgdUpdate {
  SgdPointers<T> arrays;
  SgdParams params;
  float lr, inverse_scale;

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    Lanes<T, width> p = load_lanes<by_vectors, width>(static_cast<device const T*>(arrays.param + first), count);
    const Lanes<float, width> g = load_grads<by_vectors, width>(
        arrays.grad + first, count, params.grad_sign * inverse_scale, params.unscale != 0, inverse_scale);
    const bool keeps = arrays.buffer != nullptr;
    Lanes<T, width> buffer;
    for (uint k = 0; k < width; ++k) buffer.at[k] = static_cast<T>(0.0f);
    if (keeps && params.first == 0)
      buffer = load_lanes<by_vectors, width>(static_cast<device const T*>(arrays.buffer + first), count);
    for (uint k = 0; k < width; ++k) {
      const float param = static_cast<float>(p.at[k]);
      float grad = g.at[k];
      if (params.weight_decay != 0.0f) grad = fma(params.weight_decay, param, grad);
      if (keeps) {
        const float moved = fma(params.momentum, static_cast<float>(buffer.at[k]), params.gradient_weight * grad);
        buffer.at[k] = static_cast<T>(moved);
        grad = params.nesterov != 0 ? fma(params.momentum, moved, grad) : moved;
      }
      p.at[k] = static_cast<T>(fma(-lr, grad, param));
    }
    store_lanes<by_vectors, width>(p, arrays.param + first, count);
    if (keeps) store_lanes<by_vectors, width>(buffer, arrays.buffer + first, count);
  }
};

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void sgd(
    constant SgdPointers<T>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    constant OptimScalarPointers& scalars [[buffer(2)]], constant SgdParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  if (overflowed(scalars)) return;
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  SgdUpdate<T> update = {pointers[chunk.tensor], params, rate_of(scalars, params.lr), inverse_scale_of(scalars)};
  walk<T>(update, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
}

#define INSTANTIATE_SGD(name, T)                                                                                      \
  template [[host_name(name)]] [[kernel]] void sgd<T>(constant SgdPointers<T>*, constant OptimTensor*,                \
                                                      constant OptimScalarPointers&, constant SgdParams&, uint, uint, \
                                                      uint);

INSTANTIATE_SGD("sgd_float", float)
INSTANTIATE_SGD("sgd_half", half)
INSTANTIATE_SGD("sgd_bfloat", bfloat)

template <typename T, typename M>
struct LionPointers {
  device T* param;
  device T* grad;
  device M* exp_avg;
};

template <typename T, typename M>
struct LionUpdate {
  LionPointers<T, M> arrays;
  LionParams params;
  float lr, inverse_scale;

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    Lanes<T, width> p = load_lanes<by_vectors, width>(static_cast<device const T*>(arrays.param + first), count);
    Lanes<M, width> m = load_lanes<by_vectors, width>(static_cast<device const M*>(arrays.exp_avg + first), count);
    const Lanes<float, width> g = load_grads<by_vectors, width>(
        arrays.grad + first, count, params.grad_sign * inverse_scale, params.unscale != 0, inverse_scale);
    const float decay = 1.0f - lr * params.weight_decay;
    for (uint k = 0; k < width; ++k) {
      const float grad = g.at[k], old_m = static_cast<float>(m.at[k]);
      const float direction = fma(params.beta1, old_m, params.one_minus_beta1 * grad);
      // A NaN stays one: sign() would make it 0.
      const float sign_of = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f * direction;
      p.at[k] = static_cast<T>(fma(static_cast<float>(p.at[k]), decay, -lr * sign_of));
      m.at[k] = static_cast<M>(fma(params.beta2, old_m, params.one_minus_beta2 * grad));
    }
    store_lanes<by_vectors, width>(p, arrays.param + first, count);
    store_lanes<by_vectors, width>(m, arrays.exp_avg + first, count);
  }
};

template <typename T, typename M>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void lion(
    constant LionPointers<T, M>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    constant OptimScalarPointers& scalars [[buffer(2)]], constant LionParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  if (overflowed(scalars)) return;
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  LionUpdate<T, M> update = {pointers[chunk.tensor], params, rate_of(scalars, params.lr), inverse_scale_of(scalars)};
  walk<T>(update, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
}

#define INSTANTIATE_LION(name, T, M)                                                                                 \
  template [[host_name(name)]] [[kernel]] void lion<T, M>(constant LionPointers<T, M>*, constant OptimTensor*,       \
                                                          constant OptimScalarPointers&, constant LionParams&, uint, \
                                                          uint, uint);

INSTANTIATE_LION("lion_float_float", float, float)
INSTANTIATE_LION("lion_half_float", half, float)
INSTANTIATE_LION("lion_bfloat_float", bfloat, float)
INSTANTIATE_LION("lion_half_half", half, half)
INSTANTIATE_LION("lion_bfloat_bfloat", bfloat, bfloat)
INSTANTIATE_LION("lion_float_bfloat", float, bfloat)
INSTANTIATE_LION("lion_half_bfloat", half, bfloat)
