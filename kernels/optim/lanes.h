// Kernels over many tensors: which elements a thread has, and how it moves them.
#pragma once

#include <metal_stdlib>

#include "optim.h"

// The part of a tensor that a thread walks over: elements first, first + stride, … before `end`, as many neighbours at
// each as Lanes hold.
struct OptimChunk {
  uint tensor;
  ulong start;  // of the chunk
  uint length;
};

inline OptimChunk find_chunk(constant OptimTensor* tensors, constant OptimGrid& grid, uint threadgroup_index) {
  // The last tensor whose first threadgroup is not after this one.
  uint tensor = 0;
  for (uint end = grid.tensors; end - tensor > 1;) {
    const uint middle = (tensor + end) / 2;
    if (tensors[middle].first_threadgroup <= threadgroup_index) {
      tensor = middle;
    } else {
      end = middle;
    }
  }
  const ulong start = static_cast<ulong>(threadgroup_index - tensors[tensor].first_threadgroup) * grid.chunk;
  const ulong left = tensors[tensor].numel - start;
  return {tensor, start, static_cast<uint>(metal::min(left, static_cast<ulong>(grid.chunk)))};
}

// The neighbouring elements that a thread takes at once.
template <typename T, uint width>
struct Lanes {
  T at[width];
};

// How many these are. By vectors, neighbouring threads load neighbouring vectors, of 16 bytes of T. Otherwise a thread
// takes eight elements at any address, from which a CPU's compiler makes its own vectors.
template <bool by_vectors, typename T>
constexpr constant uint kLanes = by_vectors ? 16 / sizeof(T) : 8;

template <uint width, typename T>
METAL_FUNC Lanes<T, width> load_vectors(device const T* from) {
  typedef metal::vec<uint, sizeof(T)> Raw;  // four elements
  constexpr uint run = width * sizeof(T) % 16 == 0 ? 4 / sizeof(T) : 1;
  Lanes<T, width> lanes;
#pragma unroll
  for (uint i = 0; i < width / 4; i += run) {
    Raw raw[run];
    if constexpr (run == 2) {
      const metal::uint4 both = *reinterpret_cast<device const metal::uint4*>(from + 4 * i);
      raw[0] = both.xy;
      raw[1] = both.zw;
    } else {
      raw[0] = *reinterpret_cast<device const Raw*>(from + 4 * i);
    }
#pragma unroll
    for (uint r = 0; r < run; ++r) {
      const metal::vec<T, 4> four = as_type<metal::vec<T, 4>>(raw[r]);
#pragma unroll
      for (uint k = 0; k < 4; ++k) lanes.at[4 * (i + r) + k] = four[k];
    }
  }
  return lanes;
}
template <uint width, typename T>
METAL_FUNC void store_vectors(thread const Lanes<T, width>& lanes, device T* to) {
  typedef metal::vec<uint, sizeof(T)> Raw;
  constexpr uint run = width * sizeof(T) % 16 == 0 ? 4 / sizeof(T) : 1;
#pragma unroll
  for (uint i = 0; i < width / 4; i += run) {
    Raw raw[run];
#pragma unroll
    for (uint r = 0; r < run; ++r) {
      thread const T* const at = lanes.at + 4 * (i + r);
      raw[r] = as_type<Raw>(metal::vec<T, 4>(at[0], at[1], at[2], at[3]));
    }
    if constexpr (run == 2) {
      *reinterpret_cast<device metal::uint4*>(to + 4 * i) = metal::uint4(raw[0], raw[1]);
    } else {
      *reinterpret_cast<device Raw*>(to + 4 * i) = raw[0];
    }
  }
}

// The first `count` elements from an address, zeros for the rest.
template <bool by_vectors, uint width, typename T>
METAL_FUNC Lanes<T, width> load_lanes(device const T* from, uint count) {
  if constexpr (by_vectors) {
    if (count == width) return load_vectors<width>(from);
  }
  Lanes<T, width> lanes;
  if (count == width) {
    for (uint k = 0; k < width; ++k) lanes.at[k] = from[k];
  } else {
    for (uint k = 0; k < width; ++k) lanes.at[k] = k < count ? from[k] : static_cast<T>(0.0f);
  }
  return lanes;
}

template <bool by_vectors, uint width, typename T>
METAL_FUNC void store_lanes(thread const Lanes<T, width>& lanes, device T* to, uint count) {
  if constexpr (by_vectors) {
    if (count == width) return store_vectors<width>(lanes, to);
  }
  if (count == width) {
    for (uint k = 0; k < width; ++k) to[k] = lanes.at[k];
  } else {
    for (uint k = 0; k < width; ++k)
      if (k < count) to[k] = lanes.at[k];
  }
}

// Calls visit.template at<by_vectors>(first element, count) for all of a thread's elements of a chunk. Each simdgroup
// walks over a contiguous part of it.
template <bool by_vectors, typename T, typename Visit>
METAL_FUNC void walk(thread Visit& visit, OptimChunk chunk, uint chunk_size, uint threads, uint thread_index) {
  constexpr uint width = kLanes<by_vectors, T>;
  const uint part = chunk_size / (threads / 32);
  const uint first = thread_index / 32 * part + thread_index % 32 * width;
  const uint end = metal::min(chunk.length, thread_index / 32 * part + part);
  for (uint i = first; i < end; i += 32 * width)
    visit.template at<by_vectors>(chunk.start + i, metal::min(chunk.length - i, width));
}
template <typename T, typename Visit>
METAL_FUNC void walk(thread Visit& visit, bool as_vectors, OptimChunk chunk, uint chunk_size, uint threads,
                     uint thread_index) {
  if (as_vectors)
    walk<true, T>(visit, chunk, chunk_size, threads, thread_index);
  else
    walk<false, T>(visit, chunk, chunk_size, threads, thread_index);
}

// Values that lie in device memory where a step must depend on nothing of the host. Each may be null.
struct OptimScalarPointers {
  device const float* lr;
  device const float* grad_scale;
  device const float* found_inf;
};

inline bool overflowed(constant OptimScalarPointers& pointers) {
  return pointers.found_inf != nullptr && *pointers.found_inf != 0.0f;
}
inline float rate_of(constant OptimScalarPointers& pointers, float lr) {
  return pointers.lr != nullptr ? *pointers.lr : float(lr);  // no address of lr, which would put it in memory
}
inline float inverse_scale_of(constant OptimScalarPointers& pointers) {
  return pointers.grad_scale != nullptr ? 1.0f / *pointers.grad_scale : 1.0f;
}

// The gradients in float32, multiplied by `factor`. `unscale` writes them back divided by their scale, as
// torch's fused optimizers do.
template <bool by_vectors, uint width, typename T>
METAL_FUNC Lanes<float, width> load_grads(device T* grads, uint count, float factor, bool unscale,
                                          float inverse_scale) {
  const Lanes<T, width> loaded = load_lanes<by_vectors, width>(static_cast<device const T*>(grads), count);
  Lanes<float, width> result;
  for (uint k = 0; k < width; ++k) result.at[k] = static_cast<float>(loaded.at[k]) * factor;
  if (unscale) {
    Lanes<T, width> unscaled;
    for (uint k = 0; k < width; ++k) unscaled.at[k] = static_cast<T>(static_cast<float>(loaded.at[k]) * inverse_scale);
    store_lanes<by_vectors, width>(unscaled, grads, count);
  }
  return result;
}
