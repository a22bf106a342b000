// The state of the gated delta rule, a matrix of keys by values for each head of v:
//
//   S = exp(g) S;  u = v - Sᵀ k;  S = S + beta k uᵀ;  o = scale Sᵀ q
//
// A gate that each key has scales its row of S instead. Without beta, u = v and S = S + k uᵀ.
//
// Its columns do not depend on each other, except in the gradients of q and k. So a simdgroup holds some columns in
// registers and walks along the positions. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
#pragma once

#include "sequence/delta_rule.h"
#include <metal_stdlib>

using namespace metal;

constexpr constant uint kSimdgroups = DELTA_THREADS / 32;

// The positions of a sequence, and its first place among the kept states. Numbers of cu_seqlens that lie outside of the
// tensor, or descend, count as the nearest place that is possible.
struct Span {
  uint batch, begin, end;
  ulong place;
};
inline Span span_of(device const int* ends, constant DeltaRuleParams& params, uint sequence) {
  if (!params.packed) return {sequence, 0u, params.length, ulong(sequence) * params.places};
  const int length = static_cast<int>(params.length);
  const int begin = clamp(ends[sequence], 0, length), end = clamp(ends[sequence + 1], begin, length);
  return {0u, static_cast<uint>(begin), static_cast<uint>(end), ulong(begin) / DELTA_CHUNK + sequence};
}

// A chunk's sequence, the last one whose places begin at or before the chunk's.
inline uint sequence_of(device const int* ends, constant DeltaRuleParams& params, uint place) {
  if (!params.packed) return place / params.places;
  uint low = 0, high = params.sequences;
  while (high - low > 1) {
    const uint middle = (low + high) / 2;
    if (span_of(ends, params, middle).place <= place)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The positions of the chunk at a place. There are none where no sequence has so many.
inline Span chunk_of(device const int* ends, constant DeltaRuleParams& params, uint place) {
  Span span = span_of(ends, params, sequence_of(ends, params, place));
  const ulong begin = span.begin + (max(ulong(place), span.place) - span.place) * DELTA_CHUNK;
  span.begin = static_cast<uint>(min(begin, ulong(span.end)));
  span.end = min(span.end, span.begin + DELTA_CHUNK);
  span.place = place;
  return span;
}

// One over the length of a vector whose squares have this sum.
inline float inverse_length(float squares) { return rsqrt(squares + 1e-6f); }

// One over the length of the row, which whole simdgroups find.
template <typename T>
inline float inverse_length_of(device const T* row, uint size, uint lane) {
  float squares = 0.0f;
  for (uint i = lane; i < size; i += 32) squares += static_cast<float>(row[i]) * static_cast<float>(row[i]);
  return inverse_length(simd_sum(squares));
}

// Brings the rows of DELTA_STEPS positions into threadgroup memory, times `scale`, and normalized if params says so.
// Rows from `end` on are zero.
template <uint kPadded, typename T>
inline void fetch(threadgroup float* tile, device const T* x, long stride, uint first, uint end, float scale,
                  constant DeltaRuleParams& params, uint simdgroup, uint lane) {
  for (uint i = simdgroup; i < DELTA_STEPS; i += kSimdgroups) {
    const bool inside = first + i < end;
    device const T* const row = x + (first + i) * stride;
    float values[kPadded / 32], squares = 0.0f;
#pragma unroll
    for (uint n = 0; n < kPadded / 32; ++n) {
      values[n] = inside && n * 32 + lane < params.keys ? static_cast<float>(row[n * 32 + lane]) : 0.0f;
      squares += values[n] * values[n];
    }
    const float factor = params.normalized ? scale * inverse_length(simd_sum(squares)) : scale;
#pragma unroll
    for (uint n = 0; n < kPadded / 32; ++n) tile[i * kPadded + n * 32 + lane] = values[n] * factor;
  }
}

// The decays of rows at DELTA_STEPS positions.
template <uint kPadded>
inline void fetch_decays(threadgroup float* tile, device const float* g, ulong stride, uint first, uint end,
                         constant DeltaRuleParams& params, uint thread_index) {
  for (uint i = thread_index; i < DELTA_STEPS * kPadded; i += DELTA_THREADS) {
    const uint position = first + i / kPadded, row = i % kPadded;
    tile[i] = position < end && row < params.keys ? exp(g[position * stride + row]) : 1.0f;
  }
}

// Columns of a state: ACROSS lanes share a column, of which each has N times four rows.
template <uint ACROSS, uint N>
struct Columns {
  static constexpr constant uint kColumns = 32 / ACROSS, kPadded = ACROSS * N * 4;

  float4 at[N];
  uint part;  // of the column

  Columns(uint lane) : part(lane / kColumns) {}

  // A place in memory moves from row to row, since places of all rows would take as many registers as the rows.
  void load(device const float* state, bool given, uint keys, uint values, uint column) {
    state += ulong(4 * part) * values + column;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const bool inside = given && 4 * (n * ACROSS + part) + i < keys && column < values;
        at[n][i] = inside ? *state : 0.0f;
        state += i < 3 ? values : (4 * ACROSS - 3) * values;
      }
    }
  }
  void store(device float* state, uint keys, uint values, uint column) const {
    state += ulong(4 * part) * values + column;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        if (4 * (n * ACROSS + part) + i < keys && column < values) *state = at[n][i];
        state += i < 3 ? values : (4 * ACROSS - 3) * values;
      }
    }
  }
  void scale(float factor) {
#pragma unroll
    for (uint n = 0; n < N; ++n) at[n] *= factor;
  }
  void scale(threadgroup const float4* factors) {
#pragma unroll
    for (uint n = 0; n < N; ++n) at[n] *= factors[n * ACROSS + part];
  }
  // Adds the row times a number to the column.
  void add(threadgroup const float4* row, float factor) {
#pragma unroll
    for (uint n = 0; n < N; ++n) at[n] += row[n * ACROSS + part] * factor;
  }
  // The product of the row and the column, which all lanes of the column get.
  float product(threadgroup const float4* row) const {
    float4 sums = float4(0.0f);
#pragma unroll
    for (uint n = 0; n < N; ++n) sums += row[n * ACROSS + part] * at[n];
    float sum = (sums.x + sums.y) + (sums.z + sums.w);
#pragma unroll
    for (ushort step = kColumns; step < 32; step *= 2) sum += simd_shuffle_xor(sum, step);
    return sum;
  }
};

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
// Heads of up to 64, 128 and 256: lanes that share a column, and a quarter of the rows that each has.
#define INSTANTIATE_SIZES(name, types, function, ...)          \
  INSTANTIATE(name "_64", types, function<4, 4, __VA_ARGS__>)  \
  INSTANTIATE(name "_128", types, function<4, 8, __VA_ARGS__>) \
  INSTANTIATE(name "_256", types, function<8, 8, __VA_ARGS__>)
#define INSTANTIATE_TYPES(name, function, by_channel)            \
  INSTANTIATE_SIZES(name, "_float", function, by_channel, float) \
  INSTANTIATE_SIZES(name, "_half", function, by_channel, half)   \
  INSTANTIATE_SIZES(name, "_bfloat", function, by_channel, bfloat)
