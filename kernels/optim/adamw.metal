// AdamW over many parameters at once (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; amsgrad:
// Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018). Tables of device pointers give the tensors.
// The moments are float32, bfloat16 or have the parameter's type. Where `stochastic`, values that are stored in
// bfloat16 are rounded at random.
#include <metal_stdlib>
#include "optim.h"
#include "lanes.h"
using namespace metal;

// Rounding to bfloat16 up or down at random, so that the mean of many roundings is exact, takes its bits
// from Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
inline metal::uint4 philox(metal::uint4 counter, metal::uint2 key) {
  for (uint round = 0; round < 10; ++round) {
    const metal::uint2 high = metal::mulhi(metal::uint2(0xd2511f53u, 0xcd9e8d57u), counter.xz);
    const metal::uint2 low = metal::uint2(0xd2511f53u, 0xcd9e8d57u) * counter.xz;
    counter = metal::uint4(high.y ^ counter.y ^ key.x, low.y, high.x ^ counter.w ^ key.y, low.x);
    key += metal::uint2(0x9e3779b9u, 0xbb67ae85u);
  }
  return counter;
}

// 16 random bits for each of `fields` (1 or 4, or none) values of each of `width` elements, from the element's index in
// its tensor, the tensor's number, the step and a seed.
template <uint fields, uint width>
struct RandomBits {
  static constexpr constant uint kShare = fields == 1 ? 8 : 2;  // elements that share an output of 128 bits

  metal::uint4 words[width / kShare];

  RandomBits(metal::uint2 seed, ulong first, uint tensor, uint step) {
    for (uint i = 0; i < width / kShare; ++i) {
      const ulong index = first / kShare + i;
      words[i] = philox(metal::uint4(static_cast<uint>(index), static_cast<uint>(index >> 32), tensor, step), seed);
    }
  }
  uint bits(uint k, uint field) const {
    const uint index = fields == 1 ? k % 8 : 4 * (k % 2) + field;
    const uint word = words[k / kShare][index / 2];
    return index % 2 != 0 ? word >> 16 : word & 0xffffu;
  }
};
template <uint width>
struct RandomBits<0, width> {
  RandomBits(metal::uint2, ulong, uint, uint) {}
};

// The neighbours of x in bfloat16, each with the probability that its nearness gives. Infinity and NaN stay.
inline bfloat round_at_random(float x, uint bits) {
  const uint word = as_type<uint>(x);
  if ((word & 0x7f800000u) == 0x7f800000u) return static_cast<bfloat>(x);
  return as_type<bfloat>(static_cast<ushort>((word + bits) >> 16));
}

template <typename T, typename M>
struct AdamWPointers {
  device T* param;
  device T* grad;
  device M* exp_avg;
  device M* exp_avg_sq;
  device M* max_exp_avg_sq;
};

template <typename T, typename M, bool amsgrad, bool stochastic>
struct AdamWUpdate {
  // How many of an element's values are rounded at random: the parameter, or the moments too.
  static constexpr constant uint kFields = !stochastic ? 0 : sizeof(M) == 4 ? 1 : 4;

  AdamWPointers<T, M> arrays;
  AdamWParams params;
  AdamWScalars scalars;
  uint tensor;

  template <uint width>
  T round_param(float value, thread const RandomBits<kFields, width>& random, uint k) const {
    if constexpr (kFields > 0) return round_at_random(value, random.bits(k, 0));
    return static_cast<T>(value);
  }
  template <uint width>
  M round_moment(float value, thread const RandomBits<kFields, width>& random, uint k, uint field) const {
    if constexpr (kFields == 4) return round_at_random(value, random.bits(k, field));
    return static_cast<M>(value);
  }

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    Lanes<T, width> p = load_lanes<by_vectors, width>(static_cast<device const T*>(arrays.param + first), count);
    Lanes<M, width> m = load_lanes<by_vectors, width>(static_cast<device const M*>(arrays.exp_avg + first), count);
    Lanes<M, width> v = load_lanes<by_vectors, width>(static_cast<device const M*>(arrays.exp_avg_sq + first), count);
    Lanes<M, width> max_v;
    if constexpr (amsgrad)
      max_v = load_lanes<by_vectors, width>(static_cast<device const M*>(arrays.max_exp_avg_sq + first), count);
    const Lanes<float, width> g =
        load_grads<by_vectors, width>(arrays.grad + first, count, params.grad_sign * scalars.inverse_scale,
                                      params.unscale != 0, scalars.inverse_scale);
    const RandomBits<kFields, width> random(uint2(params.seed_low, params.seed_high), first, tensor, scalars.step);
    const float weight = params.one_minus_beta1;
    const bool near = weight < 0.5f;
    const float correction = 1.0f / scalars.bias_correction2_sqrt;
    // The operations, their order and their roundings are those of torch.optim.AdamW, so that float32 results agree.
    for (uint k = 0; k < width; ++k) {
      const float grad = g.at[k];
      // fma keeps the compiler from contracting this product into the sum at the end.
      const float decayed = fma(static_cast<float>(p.at[k]), scalars.decay, -0.0f);
      // lerp(m, grad, weight), from the nearer end.
      const float old_m = static_cast<float>(m.at[k]);
      const float new_m = fma(near ? weight : weight - 1.0f, grad - old_m, near ? old_m : grad);
      const float new_v = fma(params.one_minus_beta2 * grad, grad, static_cast<float>(v.at[k]) * params.beta2);
      float second = new_v;
      if constexpr (amsgrad) {
        const float old_max = static_cast<float>(max_v.at[k]);
        second = old_max >= second ? old_max : second;  // max() would lose a NaN
        max_v.at[k] = round_moment(second, random, k, 3);
      }
      float updated;
      if constexpr (sizeof(T) == 4) {
        const float denominator = precise::sqrt(second) / scalars.bias_correction2_sqrt + params.eps;
        updated = decayed + scalars.negative_step_size * new_m / denominator;
      } else {
        // A root and a quotient that are right to 22 bits are enough for a result that is rounded to 11 or 8. The
        // bounds keep the root of 0 and of infinity.
        const float root = second * rsqrt(clamp(second, FLT_MIN, FLT_MAX));
        const float denominator = fma(root, correction, params.eps);
        updated = decayed + fast::divide(scalars.negative_step_size * new_m, denominator);
      }
      p.at[k] = round_param(updated, random, k);
      m.at[k] = round_moment(new_m, random, k, 1);
      v.at[k] = round_moment(new_v, random, k, 2);
    }
    store_lanes<by_vectors, width>(p, arrays.param + first, count);
    store_lanes<by_vectors, width>(m, arrays.exp_avg + first, count);
    store_lanes<by_vectors, width>(v, arrays.exp_avg_sq + first, count);
    if constexpr (amsgrad) store_lanes<by_vectors, width>(max_v, arrays.max_exp_avg_sq + first, count);
  }
};

template <typename T, typename M, bool amsgrad, bool stochastic>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void adamw(
    constant AdamWPointers<T, M>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    constant AdamWScalars* all_scalars [[buffer(2)]], constant AdamWParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  const AdamWScalars scalars = all_scalars[chunk.tensor];
  if (scalars.skip) return;
  AdamWUpdate<T, M, amsgrad, stochastic> update = {pointers[chunk.tensor], params, scalars,
                                                   params.grid.first_tensor + chunk.tensor};
  walk<T>(update, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
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

struct AdamWStep {
  device float* value;
};

// Increments the steps, which are in device memory, and computes AdamWScalars from them. A thread handles one step.
kernel void adamw_scalars(constant AdamWStep* steps [[buffer(0)]], device AdamWScalars* scalars [[buffer(1)]],
                          constant OptimScalarPointers& pointers [[buffer(2)]],
                          constant AdamWStepParams& params [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  const bool skip = overflowed(pointers);
  const float step = *steps[i].value + (skip ? 0.0f : 1.0f);
  *steps[i].value = step;
  const float lr = rate_of(pointers, params.lr);
  AdamWScalars result;
  result.decay = 1.0f - lr * params.weight_decay;
  result.negative_step_size = -lr / bias_correction(step, params.log_beta1, params.log_beta1_low);
  result.bias_correction2_sqrt = precise::sqrt(bias_correction(step, params.log_beta2, params.log_beta2_low));
  result.inverse_scale = inverse_scale_of(pointers);
  result.skip = skip;
  result.step = static_cast<uint>(step);
  scalars[i] = result;
}

#define INSTANTIATE(name, T, M, amsgrad, stochastic)                                                                   \
  template [[host_name(name)]] [[kernel]] void adamw<T, M, amsgrad, stochastic>(                                       \
      constant AdamWPointers<T, M>*, constant OptimTensor*, constant AdamWScalars*, constant AdamWParams&, uint, uint, \
      uint);

INSTANTIATE("adamw_float_float", float, float, false, false)
INSTANTIATE("adamw_half_float", half, float, false, false)
INSTANTIATE("adamw_bfloat_float", bfloat, float, false, false)
INSTANTIATE("adamw_half_half", half, half, false, false)
INSTANTIATE("adamw_bfloat_bfloat", bfloat, bfloat, false, false)
INSTANTIATE("adamw_float_bfloat", float, bfloat, false, false)
INSTANTIATE("adamw_half_bfloat", half, bfloat, false, false)
INSTANTIATE("adamw_stochastic_bfloat_float", bfloat, float, false, true)
INSTANTIATE("adamw_stochastic_bfloat_bfloat", bfloat, bfloat, false, true)
INSTANTIATE("adamw_amsgrad_float_float", float, float, true, false)
INSTANTIATE("adamw_amsgrad_half_float", half, float, true, false)
INSTANTIATE("adamw_amsgrad_bfloat_float", bfloat, float, true, false)
INSTANTIATE("adamw_amsgrad_half_half", half, half, true, false)
INSTANTIATE("adamw_amsgrad_bfloat_bfloat", bfloat, bfloat, true, false)
INSTANTIATE("adamw_amsgrad_float_bfloat", float, bfloat, true, false)
INSTANTIATE("adamw_amsgrad_half_bfloat", half, bfloat, true, false)
INSTANTIATE("adamw_amsgrad_stochastic_bfloat_float", bfloat, float, true, true)
INSTANTIATE("adamw_amsgrad_stochastic_bfloat_bfloat", bfloat, bfloat, true, true)
