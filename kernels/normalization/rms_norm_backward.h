// Sums and factors of the derivative of rms_norm, and rows that pass through a team's registers
// (rms_norm_backward.metal).
#pragma once

#include "common/copies.h"
#include "normalization/norm_rows.h"

// gx is scale g + factor x, with these two made of the sums of squares and of g x. scale^3 may be out of float32's
// range where the factor is not. The scale is that of the forward pass where `given` has it.
inline float2 factors_of(float squares, float product, float inverse_length, device const float* given,
                         constant RmsNormParams& params) {
  const float scale = params.with_scales ? *given : rsqrt(fma(squares, inverse_length, params.eps));
  return float2(scale, -scale * (scale * (scale * (product * inverse_length))));
}

// The sums, up to element `end`, of squares and of g x over a thread's slice. kRun float4s, of which the row has all or
// none, are added up before it is asked whether it has them.
template <uint N, typename Slice, typename Rows, typename Weight>
inline float2 sums_of(Slice slice, thread const Rows& v, thread const Rows& g, thread const Weight& w, float offset,
                      uint end) {
  float2 sums = float2(0.0f);
  for (uint first = 0; first < N; first += Slice::kRun) {
    float4 squares = v[first] * v[first];
    float4 products = g[first] * (w[first] + offset) * v[first];
    for (uint n = first + 1; n < first + Slice::kRun; ++n) {
      squares = fma(v[n], v[n], squares);
      products = fma(g[n] * (w[n] + offset), v[n], products);
    }
    sums += slice.holds(first, end) ? float2(sum4(squares), sum4(products)) : float2(0.0f);
  }
  return sums;
}

template <uint N>
struct Unpacked {
  float4 values[N];

  template <typename Held>
  void operator=(thread const Held& held) {
    for (uint n = 0; n < N; ++n) values[n] = held[n];
  }
  float4 operator[](uint n) const { return values[n]; }
};

// A weight of float32 takes a register for each element. A thread that holds long rows reads it where it is used.
template <typename RowSlice, typename W>
struct WeightInMemory {
  RowSlice slice;
  device const W* weight;
  uint end;
  bool present;

  float4 operator[](uint n) const {
    if (!present) return float4(1.0f);
    return *reinterpret_cast<device const float4*>(weight + min(slice.first + RowSlice::behind(n, 0), end - 4));
  }
};
template <bool in_memory, typename RowSlice, typename W>
inline auto weight_of(RowSlice slice, device const W* weight, uint length, bool present) {
  if constexpr (in_memory)
    return WeightInMemory<RowSlice, W>{slice, weight, length, present};
  else
    return typename RowSlice::template Of<W>();
}

// Asks for a slice of a row that comes later.
template <uint N, typename RowSlice, typename T>
inline void prefetch(RowSlice slice, device const T* row, uint end) {
#pragma unroll
  for (uint n = 0; n < N; n += RowSlice::kRun)
    metalcore_prefetch(row + min(slice.first + RowSlice::behind(n, 0), end - 4 * RowSlice::kRun), 0);
}

// A stream's rows, R of them at once and then those streams * R further on, by one team; and their part of the weight's
// gradient where it is wanted. Rows are on their way while those before them are at work.
template <bool aligned, bool nested, bool has_residual, uint N, uint R, typename T, typename W, typename Team>
inline void differentiate_rows(device const T* grad, device const T* x, device const W* weight,
                               device const T* residual, device T* gx, device float* partial, device const float* given,
                               constant RmsNormParams& params, Team team, uint stream) {
  typedef Slice<aligned, T, N> RowSlice;
  typedef typename RowSlice::template Of<conditional_t<aligned, T, float>> Held;  // elements by themselves unpacked
  constexpr bool ahead = N * sizeof(T) <= 4 && (aligned || sizeof(T) == 4);       // of others registers do not hold two
  constexpr bool packed = N > 2;                                                  // in registers until they are used
  constexpr bool keeps_weight = N * sizeof(W) <= 8;                               // or asks for it twice a row
  constexpr bool in_memory = aligned && packed && sizeof(T) == 4;                 // or for a float4 at a time
  const uint length = params.length;
  const float inverse_length = 1.0f / static_cast<float>(length);
  const RowSlice slice(team.thread_index);
  Held next_v[R];
  Held next_g[R];
  auto w = weight_of<in_memory>(slice, weight, length, params.has_weight != 0);
  float4 gw[N];
  if constexpr (ahead) {
    fetch_rows<nested>(slice, next_v, x, params.x, stream * R, params);
    fetch_rows<nested>(slice, next_g, grad, params.grad, stream * R, params);
  }
  if constexpr (keeps_weight) fetch_weight(slice, w, weight, params, length);
  for (uint n = 0; n < N; ++n) gw[n] = float4(0.0f);
  uint parity = 0;  // a reduction's scratch is used again only after another one
  for (uint first = stream * R, next;; first = next) {
    next = row_after<R>(first, params);
    if constexpr (!ahead) {
      fetch_rows<nested>(slice, next_v, x, params.x, first, params);
      fetch_rows<nested>(slice, next_g, grad, params.grad, first, params);
    }
    conditional_t<packed, Held, Unpacked<N>> v[R];
    conditional_t<packed, Held, Unpacked<N>> g[R];
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      v[r] = next_v[r];
      g[r] = next_g[r];
    }
    if constexpr (ahead) {
      fetch_rows<nested>(slice, next_v, x, params.x, next, params);
      fetch_rows<nested>(slice, next_g, grad, params.grad, next, params);
      simdgroup_barrier(mem_flags::mem_none);  // compilers would move the loads down to the reduction's barrier
    }
    if constexpr (!keeps_weight && !in_memory) fetch_weight(slice, w, weight, params, length);
    // Registers hold no second row. With floats the addresses alone would be too many.
    if constexpr (aligned && packed && !nested && sizeof(T) == 2) {
      if (next != first) {
        prefetch<N>(slice, x + next * params.x.strides[0], length);
        prefetch<N>(slice, grad + next * params.grad.strides[0], length);
      }
    }
    float sums[2 * R];
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      float2 sum = float2(0.0f);
      if (slice.holds(0, length)) sum = sums_of<N>(slice, v[r], g[r], w, params.offset, length);
      sums[2 * r] = sum.x;
      sums[2 * r + 1] = sum.y;
    }
    team.sum(sums, parity);
    parity ^= 1;
    Held added[R];
    if constexpr (has_residual) fetch_rows<nested>(slice, added, residual, params.residual, first, params);
    if constexpr (!keeps_weight && !in_memory) fetch_weight(slice, w, weight, params, length);
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      const uint row = first + r;
      if (r > 0 && row >= params.rows) continue;
      const float2 factors = factors_of(sums[2 * r], sums[2 * r + 1], inverse_length, given + row, params);
      Held results;
      for (uint n = 0; n < N; ++n) {
        gw[n] = fma(g[r][n], v[r][n] * factors.x, gw[n]);
        const float4 value = fma(v[r][n], float4(factors.y), g[r][n] * (w[n] + params.offset) * factors.x);
        if constexpr (has_residual)
          results.round(n, value + added[r][n]);
        else
          results.round(n, value);
      }
      slice.store(results, gx + ulong(row) * length, length);
    }
    if (next == first) break;
  }
  if (params.partial) slice.store(gw, partial + ulong(stream) * length, length);
}
