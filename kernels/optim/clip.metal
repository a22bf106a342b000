// The norm of many gradients taken together, and their clipping by it or by value. Sums have one order, whatever the
// GPU.
#include <metal_stdlib>
#include "optim.h"
#include "lanes.h"
using namespace metal;

template <typename T>
struct GradPointer {
  device T* grad;
};

inline float add_up(float sum, float other, uint kind) {
  if (kind != NORM_LARGEST) return sum + other;
  return other > sum || other != other ? other : sum;  // max() would lose a NaN
}

inline float all_lanes(float sum, uint kind) {
  for (ushort step = 16; step > 0; step /= 2) sum = add_up(sum, simd_shuffle_xor(sum, step), kind);
  return sum;
}

// Thread 0 gets the sum of the threadgroup's values, which needs `shared` for one value of each simdgroup.
inline float all_threads(float sum, uint kind, threadgroup float* shared, uint threads, uint thread_index) {
  sum = all_lanes(sum, kind);
  if (thread_index % 32 == 0) shared[thread_index / 32] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < 32) sum = all_lanes(thread_index < threads / 32 ? shared[thread_index] : 0.0f, kind);
  return sum;
}

template <typename T>
struct NormSum {
  device const T* grad;
  uint kind;
  float power;
  float sum;

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    const Lanes<T, width> g = load_lanes<by_vectors, width>(grad + first, count);
    for (uint k = 0; k < width; ++k) {
      const float value = static_cast<float>(g.at[k]);
      if (kind == NORM_SQUARES) {
        sum = fma(value, value, sum);
      } else {
        const float size = fabs(value);
        sum = add_up(sum, kind == NORM_POWERS ? precise::pow(size, power) : size, kind);
      }
    }
  }
};

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void grad_norm(
    constant GradPointer<T>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    device float* partials [[buffer(2)]], constant NormParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float shared[OPTIM_MAX_THREADS / 32];
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  NormSum<T> norm = {pointers[chunk.tensor].grad, params.kind, params.power, 0.0f};
  walk<T>(norm, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
  const float sum = all_threads(norm.sum, params.kind, shared, threads, thread_index);
  if (thread_index == 0) partials[params.first_partial + threadgroup_index] = sum;
}

[[kernel]] [[max_total_threads_per_threadgroup(NORM_TOTAL_THREADS)]] void grad_norm_total(
    device const float* partials [[buffer(0)]], device float* total [[buffer(1)]],
    constant NormTotalParams& params [[buffer(2)]], uint thread_index [[thread_position_in_threadgroup]]) {
  threadgroup float shared[NORM_TOTAL_THREADS / 32];
  float sum = 0.0f;
  for (uint i = thread_index; i < params.partials; i += NORM_TOTAL_THREADS) sum = add_up(sum, partials[i], params.kind);
  sum = all_threads(sum, params.kind, shared, NORM_TOTAL_THREADS, thread_index);
  if (thread_index != 0) return;
  if (params.kind == NORM_SQUARES) sum = precise::sqrt(sum);
  if (params.kind == NORM_POWERS) sum = precise::pow(sum, 1.0f / params.power);
  *total = sum;
}

template <typename T>
struct Scaled {
  device T* grad;
  float factor;

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    Lanes<T, width> g = load_lanes<by_vectors, width>(static_cast<device const T*>(grad + first), count);
    for (uint k = 0; k < width; ++k) g.at[k] = static_cast<T>(static_cast<float>(g.at[k]) * factor);
    store_lanes<by_vectors, width>(g, grad + first, count);
  }
};

// Multiplies by limit / (norm + 1e-6) where that is less than one, and moves nothing where it is not.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void grad_clip_norm(
    constant GradPointer<T>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    device const float* norm [[buffer(2)]], constant ClipParams& params [[buffer(3)]],
    uint threadgroup_index [[threadgroup_position_in_grid]], uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const float factor = params.limit / (*norm + 1e-6f);
  if (factor >= 1.0f) return;  // a NaN goes on
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  Scaled<T> scaled = {pointers[chunk.tensor].grad, factor};
  walk<T>(scaled, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
}

template <typename T>
struct Clamped {
  device T* grad;
  float limit;

  template <bool by_vectors>
  void at(ulong first, uint count) {
    constexpr uint width = kLanes<by_vectors, T>;
    Lanes<T, width> g = load_lanes<by_vectors, width>(static_cast<device const T*>(grad + first), count);
    for (uint k = 0; k < width; ++k) {
      float value = static_cast<float>(g.at[k]);
      value = value < -limit ? -limit : value;  // comparisons keep a NaN
      value = value > limit ? limit : value;
      g.at[k] = static_cast<T>(value);
    }
    store_lanes<by_vectors, width>(g, grad + first, count);
  }
};

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(OPTIM_MAX_THREADS)]] void grad_clip_value(
    constant GradPointer<T>* pointers [[buffer(0)]], constant OptimTensor* tensors [[buffer(1)]],
    constant ClipParams& params [[buffer(3)]], uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const OptimChunk chunk = find_chunk(tensors, params.grid, threadgroup_index);
  Clamped<T> clamped = {pointers[chunk.tensor].grad, params.limit};
  walk<T>(clamped, tensors[chunk.tensor].as_vectors != 0, chunk, params.grid.chunk, threads, thread_index);
}

#define INSTANTIATE(suffix, T)                                                                                       \
  template [[host_name("grad_norm_" suffix)]] [[kernel]] void grad_norm<T>(                                          \
      constant GradPointer<T>*, constant OptimTensor*, device float*, constant NormParams&, uint, uint, uint);       \
  template [[host_name("grad_clip_norm_" suffix)]] [[kernel]] void grad_clip_norm<T>(                                \
      constant GradPointer<T>*, constant OptimTensor*, device const float*, constant ClipParams&, uint, uint, uint); \
  template [[host_name("grad_clip_value_" suffix)]] [[kernel]] void grad_clip_value<T>(                              \
      constant GradPointer<T>*, constant OptimTensor*, constant ClipParams&, uint, uint, uint);

INSTANTIATE("float", float)
INSTANTIATE("half", half)
INSTANTIATE("bfloat", bfloat)
