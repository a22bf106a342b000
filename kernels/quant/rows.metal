// Rows of packed weights as numbers: all of them (dequantize), or those that `rows` names (get_rows).
#include <metal_stdlib>
using namespace metal;

#include "numbers.h"
#include "formats.h"
#include "quant.h"

// A unit is eight results of 16 bits.
constexpr constant uint kUnits = QUANT_SLICE / 8;  // of a slice

// Where a simdgroup keeps a unit. Those that lanes store at once lie in different banks.
inline uint kept_at(uint unit) { return unit ^ unit / 8 % 8; }

// A thread has a slice, whose numbers lie in two places. In 16 bits a simdgroup puts its results together in
// threadgroup memory, so that lanes write next to each other.
template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(QUANT_ROWS_THREADS)]] void quant_rows(
    device const typename F::Word* packed [[buffer(0)]], device const long* rows [[buffer(1)]],
    device uint4* results [[buffer(2)]], constant QuantRowsParams& p [[buffer(3)]], uint at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 kept[QUANT_ROWS_THREADS * kUnits];
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

#define QUANT_ROWS(F)                                                     \
  template [[host_name("quant_rows_" #F)]] [[kernel]] void quant_rows<F>( \
      device const typename F::Word*, device const long*, device uint4*, constant QuantRowsParams&, uint, uint, uint);
FOR_QUANT_TYPES(QUANT_ROWS)
