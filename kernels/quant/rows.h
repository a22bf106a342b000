// Rows of packed weights as numbers, for kernels over readers of formats.h.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "formats.h"
#include "numbers.h"
#include "quant.h"

// A unit is eight results of 16 bits.
constexpr constant uint kUnits = QUANT_SLICE / 8;  // of a slice

// Where a simdgroup keeps a unit. Those that lanes store at once lie in different banks.
inline uint kept_at(uint unit) { return unit ^ unit / 8 % 8; }

// A thread has a slice, whose numbers lie in two places. In 16 bits a simdgroup puts its results together in
// threadgroup memory, so that lanes write next to each other. `kept` has room for
// QUANT_ROWS_THREADS * kUnits of them.
template <typename F, typename P>
inline void write_rows(P packed, device const long* rows, device uint4* results, constant QuantRowsParams& p,
                       threadgroup uint4* kept, uint at, uint lane, uint simdgroup) {
  threadgroup uint4* const own = kept + simdgroup * 32 * kUnits;
  const uint first = at - lane;  // of the simdgroup's slices
  const ulong before = p.from * p.slices;
  if (at < p.count) {
    const uint in_dispatch = at / p.slices;
    const ulong row = p.gathered ? ulong(rows[p.from + in_dispatch]) : p.from + in_dispatch;
    const SliceOf<F> slice(at - in_dispatch * p.slices);
    const bool there = row < p.weights;  // a row that does not exist is NaN
    const Slice numbers = slice.decode(slice.load(place(packed, (there ? row : 0) * p.row_bytes)));
    const uint run = in_dispatch * p.slices * (QUANT_SLICE / 4) + slice.first() / 4;  // in fours, as below
#pragma unroll
    for (uint i = 0; i < 8; i += 2) {
      const float4 value = there ? weights<F>(numbers, i) : float4(NAN);
      const float4 next = there ? weights<F>(numbers, i + 1) : float4(NAN);
      const uint to = run + i / 4 * (F::apart / 4) + i % 4;
      if (p.dtype == QUANT_FLOAT) {
        results[before * (QUANT_SLICE / 4) + to] = as_type<uint4>(value);
        results[before * (QUANT_SLICE / 4) + to + 1] = as_type<uint4>(next);
      } else {
        own[kept_at(to / 2 - first * kUnits)] = uint4(halves_of(value, p.dtype), halves_of(next, p.dtype));
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (p.dtype == QUANT_FLOAT || first >= p.count) return;
  const uint units = min(32u, p.count - first) * kUnits;
  for (uint unit = lane; unit < units; unit += 32) results[(before + first) * kUnits + unit] = own[kept_at(unit)];
}
