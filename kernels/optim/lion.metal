// Lion over many parameters at once (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).
#include <metal_stdlib>
#include "lanes.h"
#include "optim.h"
using namespace metal;

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

#define INSTANTIATE(name, T, M)                                                                                      \
  template [[host_name(name)]] [[kernel]] void lion<T, M>(constant LionPointers<T, M>*, constant OptimTensor*,       \
                                                          constant OptimScalarPointers&, constant LionParams&, uint, \
                                                          uint, uint);

INSTANTIATE("lion_float_float", float, float)
INSTANTIATE("lion_half_float", half, float)
INSTANTIATE("lion_bfloat_float", bfloat, float)
INSTANTIATE("lion_half_half", half, half)
INSTANTIATE("lion_bfloat_bfloat", bfloat, bfloat)
INSTANTIATE("lion_float_bfloat", float, bfloat)
INSTANTIATE("lion_half_bfloat", half, bfloat)
