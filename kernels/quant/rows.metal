// Rows of packed weights as numbers: all of them (dequantize), or those that `rows` names (get_rows).
#include <metal_stdlib>
using namespace metal;

#include "numbers.h"
#include "formats.h"
#include "quant.h"

// A thread has a slice.
template <typename F>
[[kernel]] void quant_rows(device const typename F::Word* packed [[buffer(0)]], device const long* rows [[buffer(1)]],
                           device float4* floats [[buffer(2)]], device uint2* halves [[buffer(3)]],
                           constant QuantRowsParams& p [[buffer(4)]], uint at [[thread_position_in_grid]]) {
  const ulong result = p.from + at / p.slices;
  const ulong row = p.gathered ? ulong(rows[result]) : result;
  const SliceOf<F> slice(at % p.slices);
  const ulong to = result * p.slices * 8 + slice.first() / 4;
  const bool there = row < p.weights;  // a row that does not exist is NaN
  const Slice numbers = slice.decode(slice.load(place(packed, (there ? row : 0) * p.row_bytes)));
#pragma unroll
  for (uint i = 0; i < 8; ++i) {
    const float4 value = there ? weights<F>(numbers, i) : float4(NAN);
    store4(floats, halves, to + i / 4 * (F::apart / 4) + i % 4, value, p.dtype);
  }
}

#define QUANT_ROWS(F)                                                                                               \
  template [[host_name("quant_rows_" #F)]] [[kernel]] void quant_rows<F>(                                           \
      device const typename F::Word*, device const long*, device float4*, device uint2*, constant QuantRowsParams&, \
      uint);
FOR_QUANT_TYPES(QUANT_ROWS)
