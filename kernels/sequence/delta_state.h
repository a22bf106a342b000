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

// Columns of a state: ACROSS lanes share two columns, which lie kLanes apart. Each lane has N times four rows of them.
// What it reads of a position's keys serves both.
template <uint ACROSS, uint N>
struct Columns {
  static constexpr constant uint kLanes = 32 / ACROSS, kColumns = 2 * kLanes, kPadded = ACROSS * N * 4;

  float4 at[2][N];
  uint part;  // of the columns

  Columns(uint lane) : part(lane / kLanes) {}

  // A place in memory moves from row to row, since places of all rows would take as many registers as the rows.
  void load(device const float* state, bool given, uint keys, uint values, uint column) {
    state += ulong(4 * part) * values + column;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const bool inside = given && 4 * (n * ACROSS + part) + i < keys;
        const float2 both = inside ? of_row(state, column, values) : 0.0f;
        at[0][n][i] = both.x;
        at[1][n][i] = both.y;
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
        if (4 * (n * ACROSS + part) + i < keys) write(state, float2(at[0][n][i], at[1][n][i]), column, values);
        state += i < 3 ? values : (4 * ACROSS - 3) * values;
      }
    }
  }
  // What a row of values has in the columns: element `column`, where `row` points, and another one.
  template <typename T>
  static float2 of_row(device const T* row, uint column, uint values) {
    return float2(column < values ? static_cast<float>(row[0]) : 0.0f,
                  column + kLanes < values ? static_cast<float>(row[kLanes]) : 0.0f);
  }
  template <typename T>
  static void write(device T* row, float2 both, uint column, uint values) {
    if (column < values) row[0] = static_cast<T>(both.x);
    if (column + kLanes < values) row[kLanes] = static_cast<T>(both.y);
  }
  void scale(float factor) {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      at[0][n] *= factor;
      at[1][n] *= factor;
    }
  }
  void scale(threadgroup const float4* factors) {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 four = factors[n * ACROSS + part];
      at[0][n] *= four;
      at[1][n] *= four;
    }
  }
  // Adds the row times a number to each column.
  void add(threadgroup const float4* row, float2 factors) {
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 four = row[n * ACROSS + part];
      at[0][n] += four * factors.x;
      at[1][n] += four * factors.y;
    }
  }
  // The products of the row and the columns, which all of their lanes get.
  float2 product(threadgroup const float4* row) const {
    float4 sums[2] = {float4(0.0f), float4(0.0f)};
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 four = row[n * ACROSS + part];
      sums[0] += four * at[0][n];
      sums[1] += four * at[1][n];
    }
    float2 both =
        float2((sums[0].x + sums[0].y) + (sums[0].z + sums[0].w), (sums[1].x + sums[1].y) + (sums[1].z + sums[1].w));
#pragma unroll
    for (ushort step = kLanes; step < 32; step *= 2) both += simd_shuffle_xor(both, step);
    return both;
  }
};

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
// Heads of up to 64, 128 and 256: lanes that share columns, and a quarter of the rows that each has.
#define INSTANTIATE_SIZES(name, types, function, ...)          \
  INSTANTIATE(name "_64", types, function<8, 2, __VA_ARGS__>)  \
  INSTANTIATE(name "_128", types, function<8, 4, __VA_ARGS__>) \
  INSTANTIATE(name "_256", types, function<16, 4, __VA_ARGS__>)
#define INSTANTIATE_TYPES(name, function, by_channel)            \
  INSTANTIATE_SIZES(name, "_float", function, by_channel, float) \
  INSTANTIATE_SIZES(name, "_half", function, by_channel, half)   \
  INSTANTIATE_SIZES(name, "_bfloat", function, by_channel, bfloat)
