// What kernels by chunks of positions share: tiles in threadgroup memory, and products with them. A simdgroup has some
// rows of a product.
#pragma once

#include "common/matrices.h"
#include "sequence/delta_state.h"

constexpr constant uint kChunk = DELTA_CHUNK, kOwn = kChunk / kSimdgroups;  // rows of a simdgroup

// Factors of rows that have none.
struct One {
  float operator[](uint) const { return 1.0f; }
};

// Brings `count` rows of x, of which WIDTH elements from `first` on, into a tile, times their factors. The rest is
// zero. Where rows are `wide`, they and the tile's are whole vectors, and a thread's loads do not wait for each other.
template <uint WIDTH, uint kPitch, uint ROWS = kChunk, typename T, typename U, typename F>
inline void fetch_slice(threadgroup U* tile, device const T* x, long stride, uint count, uint first, uint size,
                        bool wide, F factors, uint thread_index) {
  if (wide) {
    constexpr uint kStep = DELTA_THREADS * 4 / WIDTH, kVectors = ROWS / kStep;
    const uint column = thread_index % (WIDTH / 4) * 4, begin = thread_index / (WIDTH / 4);
    x += begin * stride + first + column;
    vec<T, 4> vectors[kVectors];
#pragma unroll
    for (uint i = 0; i < kVectors; ++i) {
      vectors[i] = vec<T, 4>(T(0.0f));
      if (first + column < size && begin + i * kStep < count)
        vectors[i] = *reinterpret_cast<device const vec<T, 4>*>(x);
      x += kStep * stride;
    }
#pragma unroll
    for (uint i = 0; i < kVectors; ++i)
      *reinterpret_cast<threadgroup vec<U, 4>*>(tile + (begin + i * kStep) * kPitch + column) =
          static_cast<vec<U, 4>>(static_cast<float4>(vectors[i]) * factors[begin + i * kStep]);
    return;
  }
  constexpr uint kStep = DELTA_THREADS / WIDTH;  // rows between those of a thread
  const uint column = thread_index % WIDTH, begin = thread_index / WIDTH;
  const bool inside = first + column < size;
  x += begin * stride + first + column;
  tile += begin * kPitch + column;
#pragma unroll 2
  for (uint row = begin; row < ROWS; row += kStep, x += kStep * stride, tile += kStep * kPitch)
    *tile = static_cast<U>(inside && row < count ? static_cast<float>(*x) * factors[row] : 0.0f);
}

// The same as they are. Each RUN neighbouring columns of the tile are neighbours in x, `apart` from those before.
template <uint WIDTH, uint kPitch, uint RUN = WIDTH, uint ROWS = kChunk, typename T>
inline void fetch_rows(threadgroup T* tile, device const T* x, long stride, uint count, uint first, uint size,
                       bool wide, uint thread_index, uint apart = 0) {
  constexpr uint kVector = 16 / sizeof(T);
  const uint vectors = wide ? kVector : 1, step = DELTA_THREADS * vectors / WIDTH;
  const uint column = thread_index % (WIDTH / vectors) * vectors, begin = thread_index / (WIDTH / vectors);
  const uint from = first + column / RUN * apart + column % RUN;
  const bool inside = from < size;
  x += begin * stride + from;
  tile += begin * kPitch + column;
  if (!wide) {
#pragma unroll 2
    for (uint row = begin; row < ROWS; row += step, x += step * stride, tile += step * kPitch)
      *tile = inside && row < count ? *x : T(0.0f);
    return;
  }
  constexpr uint kStep = DELTA_THREADS * kVector / WIDTH, kVectors = ROWS / kStep;
  uint4 words[kVectors];
#pragma unroll
  for (uint i = 0; i < kVectors; ++i) {
    words[i] = uint4(0);
    if (inside && begin + i * kStep < count) words[i] = *reinterpret_cast<device const uint4*>(x);
    x += kStep * stride;
  }
#pragma unroll
  for (uint i = 0; i < kVectors; ++i) *reinterpret_cast<threadgroup uint4*>(tile + i * kStep * kPitch) = words[i];
}

// The inverse lengths of a chunk's queries and keys, or 1.
template <typename T>
inline void measure(threadgroup float* of_queries, threadgroup float* of_keys, device const T* q, device const T* k,
                    uint count, constant DeltaRuleParams& params, uint simdgroup, uint lane) {
  constexpr uint kLanes = 8;  // of a row: loads of several rows do not wait for each other
  for (uint i = simdgroup * kOwn + lane / kLanes; i < (simdgroup + 1) * kOwn; i += 32 / kLanes) {
    float sum_q = 0.0f, sum_k = 0.0f;
    const bool normalized = params.normalized && i < count;
    device const T* const row_q = q + i * params.q[1];
    device const T* const row_k = k + i * params.k[1];
    if (normalized && params.wide) {
#pragma unroll 4
      for (uint n = lane % kLanes * 4; n < params.keys; n += kLanes * 4) {
        const float4 of_q = static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(row_q + n));
        const float4 of_k = static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(row_k + n));
        sum_q += dot(of_q, of_q);
        sum_k += dot(of_k, of_k);
      }
    } else {
#pragma unroll 8
      for (uint n = lane % kLanes; n < (normalized ? params.keys : 0); n += kLanes) {
        sum_q += static_cast<float>(row_q[n]) * static_cast<float>(row_q[n]);
        sum_k += static_cast<float>(row_k[n]) * static_cast<float>(row_k[n]);
      }
    }
#pragma unroll
    for (ushort step = 1; step < kLanes; step *= 2) {
      sum_q += simd_shuffle_xor(sum_q, step);
      sum_k += simd_shuffle_xor(sum_k, step);
    }
    if (lane % kLanes == 0) {
      of_queries[i] = normalized ? inverse_length(sum_q) : 1.0f;
      of_keys[i] = normalized ? inverse_length(sum_k) : 1.0f;
    }
  }
}

// How much of u a position of a chunk adds to the state.
inline float strength_of(device const float* beta, uint i, uint count, constant DeltaRuleParams& params) {
  if (i >= count) return 0.0f;
  return params.weighted ? beta[ulong(i) * params.value_heads] : 1.0f;
}

// A gate whose sums with others have a difference also where it is minus infinity.
inline float finite_gate(float gate) { return isnan(gate) ? gate : max(gate, -1e4f); }

// The sums of the gates from the chunk's beginning on, in two parts, since their differences count.
inline void add_gates(threadgroup float* high, threadgroup float* low, device const float* g, uint count,
                      constant DeltaRuleParams& params, uint thread_index) {
  if (thread_index < kChunk) {
    const bool given = params.has_gate && thread_index < count;
    low[thread_index] = given ? finite_gate(g[ulong(thread_index) * params.value_heads]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f, rest = 0.0f;
  for (uint i = 0; i <= min(thread_index, kChunk - 1); ++i) {
    const float term = low[i] + rest, next = sum + term;
    const float part = next - sum;
    rest = (sum - (next - part)) + (term - part);
    sum = next;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= kChunk) return;
  high[thread_index] = sum;
  low[thread_index] = rest;
}
inline float decay_of(threadgroup const float* high, threadgroup const float* low, uint later, uint earlier) {
  return exp((high[later] - high[earlier]) + (low[later] - low[earlier]));
}

// Products' rows times their factors, of which factors[0] is for the simdgroup's first row.
template <uint kAcross, typename F>
inline void scale_rows(thread Fragments<float, 2, kAcross>& sums, F factors, float factor, uint lane) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const float of_row = factors[m * 8 + place_of(lane).row] * factor;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) elements(sums.at[m][n]) *= of_row;
  }
}

// Two neighbouring elements of a row, as far as `rest` elements are left of it.
inline uint rest_of(uint column, uint size) { return max(size, column) - column; }
template <typename T>
inline float2 pair_of(device const T* row, uint rest) {
  return float2(rest > 0 ? static_cast<float>(row[0]) : 0.0f, rest > 1 ? static_cast<float>(row[1]) : 0.0f);
}
template <typename T>
inline void put_pair(device T* row, float2 pair, uint rest) {
  if (rest > 0) row[0] = static_cast<T>(pair.x);
  if (rest > 1) row[1] = static_cast<T>(pair.y);
}

// Puts a simdgroup's rows of a product into a tile.
template <uint kPitch, uint kAcross>
inline void store(thread const Fragments<float, 2, kAcross>& sums, threadgroup float* tile) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) simdgroup_store(sums.at[m][n], tile + m * 8 * kPitch + n * 8, kPitch);
  }
}

// sums += a b or aᵀ b, where b is a tile, and a is lower triangular in device memory with rows of a chunk.
template <bool TRANSPOSED>
inline void load_lower(thread Fragments<float, 2, 2>& rows, device const float* a, uint own, uint first, Place place) {
  // Places of fragments are constant distances apart.
  a += TRANSPOSED ? (first + place.column) * kChunk + own + place.row
                  : (own + place.row) * kChunk + first + place.column;
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
      device const float* const from = a + (TRANSPOSED ? n * 8 * kChunk + m * 8 : m * 8 * kChunk + n * 8);
      elements(rows.at[m][n]) =
          TRANSPOSED ? float2(from[0], from[kChunk]) : *reinterpret_cast<device const float2*>(from);
    }
  }
}
// All of a simdgroup's rows, which are not zero, and the same products with them.
struct LowerRows {
  Fragments<float, 2, 2> at[kChunk / 16];

  template <bool TRANSPOSED>
  void load(device const float* a, uint simdgroup, Place place) {
#pragma unroll
    for (uint i = 0; i < kChunk / 16; ++i) {
      if (TRANSPOSED ? i >= simdgroup : i <= simdgroup)
        load_lower<TRANSPOSED>(at[i], a, simdgroup * kOwn, i * 16, place);
    }
  }
  template <bool TRANSPOSED, uint kPitch, uint kAcross>
  void add(thread Fragments<float, 2, kAcross>& sums, threadgroup const float* tile, uint simdgroup) const {
#pragma unroll
    for (uint i = 0; i < kChunk / 16; ++i) {
      if (TRANSPOSED ? i < simdgroup : i > simdgroup) continue;
      RightFragments<float, 2, kAcross> terms;
      ::load<kPitch>(terms, tile + i * 16 * kPitch);
      metalcore_multiply_mixed(sums.at, at[i].at, 0, terms.at, 0);
    }
  }
};
template <bool TRANSPOSED, uint kPitch, uint kAcross, typename U>
inline void add_lower(thread Fragments<float, 2, kAcross>& sums, device const float* a, threadgroup const U* tile,
                      uint simdgroup, Place place) {
  const uint own = simdgroup * kOwn, begin = TRANSPOSED ? own : 0, end = TRANSPOSED ? kChunk : own + kOwn;
  Fragments<float, 2, 2> next;
  load_lower<TRANSPOSED>(next, a, own, begin, place);
#pragma unroll 1
  for (uint first = begin; first < end; first += 16) {
    const Fragments<float, 2, 2> rows = next;  // the next ones are on their way before these are needed
    if (first + 16 < end) load_lower<TRANSPOSED>(next, a, own, first + 16, place);
    RightFragments<U, 2, kAcross> terms;
    load<kPitch>(terms, tile + first * kPitch);
    metalcore_multiply_mixed(sums.at, rows.at, 0, terms.at, 0);  // fewer parts than of operands that may be infinite
  }
}
