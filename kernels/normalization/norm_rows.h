// What the kernels of norms over rows and of their derivatives share. `Params` are those of a norm.
#pragma once

#include "common/held.h"
#include "normalization/normalization.h"
#include "common/sums.h"

// Where a row begins.
inline long row_at(constant RowStrides& rows, ulong row) {
  if (rows.sizes[0] == 0) return row * rows.strides[0];
  const uint inner = uint(row) % rows.sizes[0], outer = uint(row) / rows.sizes[0];
  return inner * rows.strides[0] + outer % rows.sizes[1] * rows.strides[1] + outer / rows.sizes[1] * rows.strides[2];
}

// A parameter of a thread's slice, up to element `end`; `otherwise` where there is none.
template <bool aligned, typename T, uint N, typename W>
inline void fetch_parameter(Slice<aligned, T, N> slice, thread typename Slice<aligned, T, N>::template Of<W>& held,
                            device const W* parameter, bool present, float otherwise, uint end) {
  if (present) {
    slice.fetch(held, parameter, end);
  } else {
    for (uint n = 0; n < N; ++n) held.round(n, float4(otherwise));
  }
}
template <bool aligned, typename T, uint N, typename W, typename Params>
inline void fetch_weight(Slice<aligned, T, N> slice, thread typename Slice<aligned, T, N>::template Of<W>& w,
                         device const W* weight, constant Params& params, uint end) {
  fetch_parameter(slice, w, weight, params.has_weight, 1.0f, end);
}

// Fetches a thread's slice, up to element `end`, of x or of x + residual rounded to T as a separate addition would
// leave it, which it writes.
template <bool aligned, typename T, uint N, typename Params>
inline void fetch_input(Slice<aligned, T, N> slice, thread typename Slice<aligned, T, N>::template Of<T>& v,
                        device const T* x, device const T* residual, device T* sum, constant Params& params, uint end) {
  slice.fetch(v, x, end);
  if (!params.has_residual) return;
  typename Slice<aligned, T, N>::template Of<T> added;
  slice.fetch(added, residual, end);
  for (uint n = 0; n < N; ++n) v.round(n, v[n] + added[n]);
  slice.store(v, sum, end);
}

// The rows from `first` on, which there is, that a team has at work at once; of those past the last one that one again.
// Rows that are not `nested` have one stride: the branch to others would keep loads from moving ahead.
template <bool nested, uint R, typename Slice, typename Held, typename T, typename Params>
inline void fetch_rows(Slice slice, thread Held (&held)[R], device const T* rows, constant RowStrides& strides,
                       uint first, constant Params& params) {
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    const uint row = R == 1 ? first : min(first + r, params.rows - 1);
    slice.fetch(held[r], rows + (nested ? row_at(strides, row) : row * strides.strides[0]), params.length);
  }
}

// The first row that a team has at work after those from `first` on, or `first` where it has no more.
template <uint R, typename Params>
inline uint row_after(uint first, constant Params& params) {
  const uint step = params.streams * R;
  return params.rows - first > step ? first + step : first;
}

inline float scale_of(float squares, constant RmsNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

// Few long rows: threadgroups have `share` columns and `chunk_rows` rows each, and leave sums over their parts of the
// rows to a second dispatch of as many.

// float4s of a row that a thread takes at a time.
constexpr constant uint kColumnStep = 2;

// The rows of a threadgroup.
struct Chunk {
  uint first;
  uint rows;

  Chunk(uint index, constant RmsNormParams& params)
      : first(index * params.chunk_rows), rows(min(params.chunk_rows, params.rows - first)) {}
};

// Asks for a slice, up to element `end`, of `count` rows, and R at most.
template <uint R, typename Slice, typename Held, typename T>
inline void fetch_some(Slice slice, thread Held (&held)[R], device const T* rows, long stride, uint count, uint end) {
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    if (r < count) slice.fetch(held[r], rows + r * stride, end);
  }
}

// Sums over a threadgroup's part of some rows, V for each row, to where `parts` has those of part `group` of row
// `first` and of `rows` rows from there on.
template <typename V, uint R, uint COUNT>
inline void store_parts(thread float (&sums)[COUNT], device V* parts, ulong first, uint rows, uint group,
                        uint reduction, constant RmsNormParams& params, Threadgroup team) {
  constexpr uint kNumbers = COUNT / R;  // of V
  threadgroup const float* const found = team.gather(sums, reduction);
  device float* const numbers = reinterpret_cast<device float*>(parts);
  for (uint i = team.simdgroup; i < COUNT; i += team.threads / 32) {
    const float sum = simd_sum(team.lane < team.threads / 32 ? found[32 * i + team.lane] : 0.0f);
    if (team.lane == 0 && i / kNumbers < rows)
      numbers[((first + i / kNumbers) * params.splits + group) * kNumbers + i % kNumbers] = sum;
  }
}

// The sums of a chunk's whole rows, which `found` gets; `parts` has them row by row.
template <typename V>
inline void sum_parts(threadgroup V* found, device const V* parts, Chunk chunk, constant RmsNormParams& params,
                      Threadgroup team) {
  for (uint row = team.simdgroup; row < chunk.rows; row += team.threads / 32) {
    V sum = V(0.0f);
    for (uint i = team.lane; i < params.splits; i += 32) sum += parts[ulong(chunk.first + row) * params.splits + i];
    sum = Simdgroup(team.lane).sum(sum, 0);
    if (team.lane == 0) found[row] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
