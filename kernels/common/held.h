// What a thread holds of rows in registers: elements as they lie in memory, of which those of 16 bits take half the
// room that they take as float32. More threads fit a GPU, and more of the rows is on its way at once.
#pragma once

#include "common/rows.h"

// What a thread of a norm's looped kernel takes at a time: kLongStep, except where elements have addresses of their
// own, which take the registers.
template <bool aligned, typename T>
constexpr constant uint kWalkStep = aligned ? kLongStep<T> : 2;

// What a load brings. Like a Pack, it is a structure, so that pointers to it promise its alignment.
template <uint COUNT>
struct alignas(4 * COUNT) Words {
  vec<uint, COUNT> words;
};

// N float4s of elements of type U, as one load of `run` float4s after the other brings them.
template <typename U, uint N, uint run>
struct Held {
  static constexpr constant uint kRun = sizeof(U) == 2 ? run : 1;
  static constexpr constant uint kWords = sizeof(U) == 2 ? 2 * kRun : 4;
  typedef Words<kWords> Raw;

  Raw raw[N / kRun];

  float4 operator[](uint n) const {
    if constexpr (kRun == 2)
      return static_cast<float4>(as_type<vec<U, 4>>(n % 2 ? raw[n / 2].words.zw : raw[n / 2].words.xy));
    else
      return static_cast<float4>(as_type<vec<U, 4>>(raw[n].words));
  }
  void set(uint n, vec<U, 4> value) {
    if constexpr (kRun == 2) {
      if (n % 2)
        raw[n / 2].words.zw = as_type<uint2>(value);
      else
        raw[n / 2].words.xy = as_type<uint2>(value);
    } else {
      raw[n].words = as_type<vec<uint, kWords>>(value);
    }
  }
  void round(uint n, float4 value) { set(n, static_cast<vec<U, 4>>(value)); }
};

// Which elements of rows of type T a thread has, N float4s of them: a simdgroup has 128 N neighbouring ones, from
// element `start` of the row on. In `aligned` rows a thread has whole vectors. In others neighbouring threads have
// neighbouring elements.
template <bool aligned, typename T, uint N>
struct Slice {
  static constexpr constant uint kRun = sizeof(T) == 2 && N % 2 == 0 ? 2 : 1;  // float4s to a load
  template <typename U>
  using Of = Held<U, N, kRun>;

  uint first;  // this thread's first element

  Slice(uint thread_index, uint start = 0)
      : first(start + thread_index / 32 * (128 * N) + thread_index % 32 * (aligned ? 4 * kRun : 1)) {}

  // Element k of float4 number n lies so far behind the first.
  static constexpr uint behind(uint n, uint k) {
    return aligned ? n / kRun * (128 * kRun) + n % kRun * 4 + k : n * 128 + k * 32;
  }

  // Whether float4 number n may have elements of a row that ends before element `end`. Others hold anything.
  bool holds(uint n, uint end) const { return !aligned || first + behind(n, 0) < end; }

  // All of it is asked for at once. What lies past the end is 0 where rows are not aligned.
  template <typename V, typename U>
  void fetch(thread Of<V>& held, device const U* row, uint end) const {
    typedef typename Of<V>::Raw Raw;
    constexpr uint run = Of<V>::kRun;
    if constexpr (aligned) {
      static_assert(sizeof(V) == sizeof(U), "whole vectors are held as they are");
#pragma unroll
      for (uint n = 0; n < N; n += run)
        held.raw[n / run] = *reinterpret_cast<device const Raw*>(row + min(first + behind(n, 0), end - 4 * run));
    } else {
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        vec<V, 4> value = vec<V, 4>(0);
#pragma unroll
        for (uint k = 0; k < 4; ++k) {
          if (first + behind(n, k) < end) value[k] = static_cast<V>((row + first)[behind(n, k)]);
        }
        held.set(n, value);
      }
    }
  }

  template <typename V, typename U>
  void store(thread const Of<V>& held, device U* row, uint end) const {
    typedef typename Of<V>::Raw Raw;
    constexpr uint run = Of<V>::kRun;
    if constexpr (aligned) {
      static_assert(sizeof(V) == sizeof(U), "whole vectors are held as they are");
#pragma unroll
      for (uint n = 0; n < N; n += run) {
        if (holds(n, end)) *reinterpret_cast<device Raw*>(row + first + behind(n, 0)) = held.raw[n / run];
      }
    } else {
#pragma unroll
      for (uint n = 0; n < N; ++n) store4(held[n], n, row, end);
    }
  }
  void store(thread const float4 (&values)[N], device float* row, uint end) const {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      if (!aligned)
        store4(values[n], n, row, end);
      else if (holds(n, end))
        *reinterpret_cast<device float4*>(row + first + behind(n, 0)) = values[n];
    }
  }

 private:
  template <typename U>
  void store4(float4 value, uint n, device U* row, uint end) const {
#pragma unroll
    for (uint k = 0; k < 4; ++k) {
      if (first + behind(n, k) < end) (row + first)[behind(n, k)] = static_cast<U>(value[k]);
    }
  }
};
