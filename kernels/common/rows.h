// Rows of numbers, four elements at a time in float32, shared by the threads of a simdgroup or of a threadgroup.
//
// Kernels over rows come in five variants, named for what works on one row:
//
//   thread   one thread, for tiny rows (and for all rows where a simdgroup is expensive, as on the simulator)
//   simd     one simdgroup, the row in registers (N float4 per thread); several rows per threadgroup
//   block    one threadgroup, the row in registers
//   looped   one threadgroup that walks the row twice, for rows of any length
//   split    several threadgroups that share the row, where there are few rows: a dispatch for each walk
//
// simd and block differ in who takes part, a Simdgroup or a Threadgroup, and share the rest. Each has two bodies, or
// two kernels: in `aligned` dispatches every row begins at a multiple of 16 bytes and ends with one, in every tensor,
// so that whole vectors are loaded without a look at the row's end. Loads behind branches would wait for each other.
#pragma once

#include <metal_stdlib>

#include "common/pack.h"
#include "common/sums.h"

using namespace metal;

// A thread sums a long row block by block: rounding errors grow with the number of blocks, not of elements.
constexpr constant uint kSumBlock = 128;

// Elements i to i + 3 of a row; `otherwise` past its end.
template <bool aligned, typename T>
inline float4 load4(device const T* row, uint i, uint length, float otherwise) {
  if (aligned) {
    const float4 value = static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(row + min(i, length - 4)));
    return i < length ? value : float4(otherwise);
  }
  float4 value = float4(otherwise);
  for (uint k = 0; k < 4; ++k) {
    if (i + k < length) value[k] = static_cast<float>(row[i + k]);
  }
  return value;
}

template <bool aligned, typename T>
inline void store4(device T* row, uint i, uint length, float4 value) {
  if (aligned) {
    if (i < length) *reinterpret_cast<device vec<T, 4>*>(row + i) = static_cast<vec<T, 4>>(value);
    return;
  }
  for (uint k = 0; k < 4; ++k) {
    if (i + k < length) row[i + k] = static_cast<T>(value[k]);
  }
}

// Elements i to i + 7 of 16 bits each.
template <typename T>
inline void load8(thread float4& low, thread float4& high, device const T* row, uint i, uint length, float otherwise) {
  float4 values[2];
  unpack(*reinterpret_cast<device const Pack<T>*>(row + min(i, length - 8)), values);
  low = i < length ? values[0] : float4(otherwise);
  high = i < length ? values[1] : float4(otherwise);
}

template <typename T>
inline void store8(float4 low, float4 high, device T* row, uint i, uint length) {
  const float4 values[2] = {low, high};
  if (i < length) *reinterpret_cast<device Pack<T>*>(row + i) = packed<T>(values);
}

// What one thread holds of rows whose elements are of type T: N float4. Where 16 bytes are two of them, these lie next
// to each other, so that the thread can load them at once.
template <typename T, uint N>
struct Share {
  static constexpr constant bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  static constexpr constant uint kRun = kPairs ? 2 : 1;

  uint first;  // element of the row
  uint step;   // from one run of float4s to the next

  Share(uint thread_index, uint threads, uint start = 0)
      : first(start + thread_index * 4 * kRun), step(threads * 4 * kRun) {}

  uint at(uint n) const { return first + n / kRun * step + n % kRun * 4; }

  template <bool aligned, typename U>
  void load(thread float4 (&v)[N], device const U* row, uint length, float otherwise) const {
    if constexpr (aligned && kPairs && sizeof(U) == 2) {
#pragma unroll
      for (uint n = 0; n < N; n += 2) load8(v[n], v[n + 1], row, at(n), length, otherwise);
    } else {
#pragma unroll
      for (uint n = 0; n < N; ++n) v[n] = load4<aligned>(row, at(n), length, otherwise);
    }
  }

  template <bool aligned, typename U>
  void store(thread const float4 (&v)[N], device U* row, uint length) const {
    if constexpr (aligned && kPairs && sizeof(U) == 2) {
#pragma unroll
      for (uint n = 0; n < N; n += 2) store8(v[n], v[n + 1], row, at(n), length);
    } else {
#pragma unroll
      for (uint n = 0; n < N; ++n) store4<aligned>(row, at(n), length, v[n]);
    }
  }
};

// A row that begins and ends anywhere: whole vectors of 16 bytes from `head` on, `body` elements in all, and what lies
// before and behind them, of which threads 0 to 7 and 8 to 15 have an element each. The row has 15 elements or more, so
// that there is a vector. Where rows are `aligned` all of it is body.
template <bool aligned, typename T>
struct Edges {
  static constexpr constant uint kVector = 16 / sizeof(T);

  uint head;
  uint body;
  uint element;  // this thread's, where it has one
  bool present;

  // The row begins `past` elements behind a multiple of 16 bytes.
  Edges(uint past, uint length, uint thread_index) : head(0), body(length), element(0), present(false) {
    if constexpr (!aligned) {
      head = (kVector - past % kVector) % kVector;
      body = (length - head) / kVector * kVector;
      element = thread_index < 8 ? thread_index : head + body + thread_index - 8;
      present = thread_index < 8 ? element < head : thread_index < 16 && element < length;
    }
  }

  float load(device const T* row, float otherwise) const {
    return !aligned && present ? static_cast<float>(row[element]) : otherwise;
  }
  template <typename U>
  void store(device U* row, float value) const {
    if (!aligned && present) row[element] = static_cast<U>(value);
  }
};

// The elements of a long row that a threadgroup has: all of them, or those from its split's first on.
struct Part {
  uint begin;
  uint end;

  Part(uint body, uint split, uint share) : begin(min(split * share, body)), end(min(begin + share, body)) {}
  explicit Part(uint body) : begin(0), end(body) {}
};

// What a thread of a looped kernel takes at a time. Of 16 bits 16 bytes: it makes do with the registers with which two
// threadgroups of 1024 threads run at once. Of float32 more is on its way at once in one threadgroup.
template <typename T>
constexpr constant uint kLongStep = sizeof(T) == 2 ? 2 : 4;
// The same of threadgroups that share a row, which are small.
constexpr constant uint kSplitStep = 4;

inline float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
inline float max4(float4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// The sums over a simdgroup of COUNT values, a power of two up to 32. A lane gets that of value lane * COUNT / 32.
template <uint COUNT>
inline float simd_sums(thread float (&values)[COUNT], uint lane) {
  lanes_sums<32, COUNT>(values, lane);
  return values[0];
}

// Who works on a row. Every thread gets the results of its reductions.
struct Simdgroup {
  uint thread_index;
  uint threads;

  explicit Simdgroup(uint lane) : thread_index(lane), threads(32) {}

  float sum(float value, uint) const { return simd_sum(value); }
  float2 sum(float2 value, uint) const { return float2(simd_sum(value.x), simd_sum(value.y)); }
  template <uint COUNT>
  void sum(thread float (&values)[COUNT], uint) const {
    const float sum = simd_sums(values, thread_index);
#pragma unroll
    for (uint i = 0; i < COUNT; ++i) values[i] = simd_shuffle(sum, i * (32 / COUNT));
  }
  float maximum(float value, uint) const { return simd_max(value); }
};

// A team of one thread.
struct Alone {
  uint thread_index = 0;
  uint threads = 1;

  float sum(float value, uint) const { return value; }
  float maximum(float value, uint) const { return value; }
};

// `scratch` has 32 floats for each number that reductions are given, times the sums that are made at once. A number may
// come again once another has been in between, since a simdgroup that is late still reads.
struct Threadgroup {
  uint thread_index;
  uint threads;
  uint lane;
  uint simdgroup;
  threadgroup float* scratch;

  Threadgroup(uint thread_index, uint threads, threadgroup float* scratch)
      : thread_index(thread_index),
        threads(threads),
        lane(thread_index % 32),
        simdgroup(thread_index / 32),
        scratch(scratch) {}

  float sum(float value, uint reduction) const {
    value = simd_sum(value);
    if (lane == 0) scratch[32 * reduction + simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_sum(lane < threads / 32 ? scratch[32 * reduction + lane] : 0.0f);
  }
  // Leaves the sums of each simdgroup's values behind one another, 32 to a value, and returns them.
  template <uint COUNT>
  threadgroup float* gather(thread float (&values)[COUNT], uint reduction) const {
    threadgroup float* const sums = scratch + 32 * COUNT * reduction;
    const float sum = simd_sums(values, lane);
    if (lane % (32 / COUNT) == 0) sums[lane * COUNT + simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sums;
  }
  template <uint COUNT>
  void sum(thread float (&values)[COUNT], uint reduction) const {
    threadgroup const float* const sums = gather(values, reduction);
#pragma unroll
    for (uint i = 0; i < COUNT; ++i) values[i] = lane < threads / 32 ? sums[32 * i + lane] : 0.0f;
    Simdgroup(lane).sum(values, 0);
  }
  float maximum(float value, uint reduction) const {
    value = simd_max(value);
    if (lane == 0) scratch[32 * reduction + simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_max(lane < threads / 32 ? scratch[32 * reduction + lane] : -INFINITY);
  }
};
