// Numbers as packed weights of TQ1_0 and TQ2_0: -1, 0 or 1 times the largest absolute value of a block of 256, as ggml
// packs them. A thread has a block.
#include <metal_stdlib>
using namespace metal;

#include "quantize.h"

inline float largest_of_block(device const uint4* numbers, uint from, constant QuantizeParams& p,
                              device atomic_uint* unheld) {
  float most = 0.0f;
#pragma nounroll
  for (uint i = 0; i < 256; i += 32) {
    Group<32> x;
    x.load(numbers, from + i, p.dtype);
    note_unheld(x, p.most, unheld);
    most = max(most, fabs(x.largest()));
  }
  return most;
}

inline uint ternary(float x, float to_one) { return uint(int(round_away(x * to_one)) + 1); }

// 16 neighbours of each of five runs, `apart` numbers apart, as digits in base 3.
inline void put_digits(device const uint4* numbers, uint from, uint apart, uint dtype, float to_one, device uchar* to) {
  uint digits[16] = {};
#pragma nounroll
  for (uint run = 0; run < 5; ++run) {
    float4 x[4];
    load16(x, numbers, from + run * apart, dtype);
#pragma unroll
    for (uint k = 0; k < 16; ++k) digits[k] = 3 * digits[k] + ternary(x[k / 4][k % 4], to_one);
  }
#pragma unroll
  for (uint k = 0; k < 16; ++k) to[k] = uchar((digits[k] * 256 + 242) / 243);
}

[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_TQ1_0(
    device const uint4* numbers [[buffer(0)]], device uchar* packed [[buffer(1)]],
    constant QuantizeParams& p [[buffer(2)]], device atomic_uint* unheld [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  const uint from = at * 256;
  device uchar* const to = packed + ulong(at) * 54;
  const float most = largest_of_block(numbers, from, p, unheld), to_one = inverse(most);
  put_digits(numbers, from, 32, p.dtype, to_one, to);
  put_digits(numbers, from + 16, 32, p.dtype, to_one, to + 16);
  put_digits(numbers, from + 160, 16, p.dtype, to_one, to + 32);
  // The last 16 numbers are four runs of four.
  float4 x[4];
  load16(x, numbers, from + 240, p.dtype);
#pragma unroll
  for (uint k = 0; k < 4; ++k) {
    uint digits = 0;
#pragma unroll
    for (uint run = 0; run < 4; ++run) digits = 3 * digits + ternary(x[run][k], to_one);
    to[48 + k] = uchar((digits * 3 * 256 + 242) / 243);
  }
  put16(to + 52, nearest_half(most));
}

[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_TQ2_0(
    device const uint4* numbers [[buffer(0)]], device uchar* packed [[buffer(1)]],
    constant QuantizeParams& p [[buffer(2)]], device atomic_uint* unheld [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  device uchar* const to = packed + ulong(at) * 66;
  const float most = largest_of_block(numbers, at * 256, p, unheld), to_one = inverse(most);
#pragma nounroll
  for (uint part = 0; part < 4; ++part) {
    uint bytes[16] = {};
#pragma unroll
    for (uint run = 0; run < 4; ++run) {
      float4 x[4];
      load16(x, numbers, at * 256 + part / 2 * 128 + part % 2 * 16 + run * 32, p.dtype);
#pragma unroll
      for (uint k = 0; k < 16; ++k) bytes[k] |= ternary(x[k / 4][k % 4], to_one) << (2 * run);
    }
#pragma unroll
    for (uint k = 0; k < 16; ++k) to[16 * part + k] = uchar(bytes[k]);
  }
  put16(to + 64, nearest_half(most));
}
