// What the kernels of rms_norm and of its derivative share.
#pragma once

#include "common/held.h"
#include "rms_norm.h"

inline float scale_of(float squares, constant RmsNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

// The weight of a thread's slice, up to element `end`; ones where there is none.
template <bool aligned, typename T, uint N, typename W>
inline void fetch_weight(Slice<aligned, T, N> slice, thread typename Slice<aligned, T, N>::template Of<W>& w,
                         device const W* weight, constant RmsNormParams& params, uint end) {
  if (params.has_weight) {
    slice.fetch(w, weight, end);
  } else {
    for (uint n = 0; n < N; ++n) w.round(n, float4(1.0f));
  }
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
