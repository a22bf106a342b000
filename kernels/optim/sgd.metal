// Stochastic gradient descent over many parameters at once, with momentum as PyTorch has it (Sutskever, Martens, Dahl
// and Hinton, "On the importance of initialization and momentum in deep learning", 2013).
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

#define INSTANTIATE(name, T)                                                                                          \
  template [[host_name(name)]] [[kernel]] void sgd<T>(constant SgdPointers<T>*, constant OptimTensor*,                \
                                                      constant OptimScalarPointers&, constant SgdParams&, uint, uint, \
                                                      uint);

INSTANTIATE("sgd_float", float)
INSTANTIATE("sgd_half", half)
INSTANTIATE("sgd_bfloat", bfloat)
