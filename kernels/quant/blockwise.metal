// Numbers in blocks that share a scale: packed, and as numbers again. A thread has eight at a time.
#include <metal_stdlib>
using namespace metal;

#include "blockwise.h"
#include "blockwise_scales.h"
#include "quant.h"

// A type says what an index stands for, and which one the entry at a place in the order of values has. `code` is the
// table of 8 bits, which is sorted.
template <uint bits>
struct Entries;
template <>
struct Entries<4> {
  typedef uint Run;  // eight packed numbers
  static constexpr constant uint bits = 4, count = 16;
};
template <>
struct Entries<8> {
  typedef uint2 Run;
  static constexpr constant uint bits = 8, count = 256;
};
struct NF4 : Entries<4> {
  static float entry(device const float*, uint i) { return NF4Table::of(i); }
  static float sorted(device const float*, uint i) { return NF4Table::of(i); }
  static uint index(uint place) { return place; }
};
// Two of its entries are zero, and what is rounded to zero becomes the first.
struct FP4 : Entries<4> {
  static uint index(uint place) { return uint(0x3254761809efcdabul >> (4 * place)) & 15u; }
  static float entry(device const float*, uint i) { return FP4Table::of(i); }
  static float sorted(device const float*, uint i) { return FP4Table::of(index(i)); }
};
struct Code8 : Entries<8> {
  static float entry(device const float* code, uint i) { return code[i]; }
  static float sorted(device const float* code, uint i) { return code[i]; }
  static uint index(uint place) { return place; }
};

// The first `length` of eight numbers from number `from` on, zeros for the rest.
inline void load8(thread float* to, device const uint4* numbers, device const float* floats,
                  device const ushort* halves, ulong from, uint length, uint dtype) {
  if (length == BLOCKWISE_RUN) {
    if (dtype == QUANT_FLOAT) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const float4 four = as_type<float4>(numbers[from / 4 + i]);
#pragma unroll
        for (uint k = 0; k < 4; ++k) to[4 * i + k] = four[k];
      }
    } else {
      const uint4 bits = numbers[from / 8];
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const float2 two = pair_of(bits[i], dtype);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
      }
    }
    return;
  }
#pragma unroll
  for (uint i = 0; i < BLOCKWISE_RUN; ++i) {
    to[i] = 0.0f;
    if (i < length) to[i] = dtype == QUANT_FLOAT ? floats[from + i] : pair_of(halves[from + i], dtype).x;
  }
}

// 1e-38, the least scale by which numbers are divided, and 1 over it. A GPU may take the first for zero.
constexpr constant uint kLeastBits = 0x006ce3eeu;
constexpr constant float kOverLeast = 0x1.2ced34p+126f;

// The numbers of the threads of a block divided by its scale. The largest absolute value of all is found by its bits,
// so that subnormal numbers count everywhere, and NaN is the largest of all.
template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(BLOCKWISE_MOST / BLOCKWISE_RUN)]] void blockwise_quantize(
    device const uint4* numbers [[buffer(0)]], device const float* floats [[buffer(1)]],
    device const ushort* halves [[buffer(2)]], device const float* code [[buffer(3)]],
    device typename F::Run* packed [[buffer(4)]], device uchar* bytes [[buffer(5)]], device uint* absmax [[buffer(6)]],
    constant BlockwiseParams& p [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float bounds[F::count];  // the numbers between two entries of the table
  threadgroup uint parts[BLOCKWISE_MOST / BLOCKWISE_RUN / 32];
  for (uint i = thread_index; i + 1 < F::count; i += threads)
    bounds[i] = (F::sorted(code, i) + F::sorted(code, i + 1)) / 2.0f;

  const ulong at = ulong(group) * threads + thread_index, first = at * BLOCKWISE_RUN;
  const uint length = first < p.count ? uint(min(p.count - first, ulong(BLOCKWISE_RUN))) : 0;
  float x[BLOCKWISE_RUN];
  load8(x, numbers, floats, halves, first, length, p.dtype);
  uint largest = 0;
#pragma unroll
  for (uint i = 0; i < BLOCKWISE_RUN; ++i) largest = max(largest, as_type<uint>(x[i]) & 0x7fffffffu);
  const uint lanes = (1u << p.shift) / BLOCKWISE_RUN;  // of a block: a part of a simdgroup, or several
  for (ushort across = 1; across < min(lanes, 32u); across *= 2)
    largest = max(largest, simd_shuffle_xor(largest, across));
  if (thread_index % 32 == 0) parts[thread_index / 32] = largest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint begin = thread_index / lanes * lanes / 32;
  for (uint i = 1; i < lanes / 32; ++i) largest = max(largest, max(parts[begin], parts[begin + i]));
  if (length == 0) return;

  const ulong block = first >> p.shift;
  const bool whole = (block + 1) << p.shift <= p.count;  // the last block may have fewer numbers, and is divided
  if (!whole) largest = max(largest, kLeastBits);
  const float scale = as_type<float>(largest);
  const bool least = scale <= 1e-38f;
  const float inverse = least ? kOverLeast : 1.0f / scale;
  if (first == block << p.shift) absmax[block] = largest;

  ulong run = 0;
#pragma unroll
  for (uint i = 0; i < BLOCKWISE_RUN; ++i) {
    const float value = i >= length ? 0.0f : whole || least ? x[i] * inverse : x[i] / scale;
    uint place = 0;  // how many bounds are less; all of them for NaN
#pragma unroll
    for (uint step = F::count / 2; step > 0; step /= 2) place += bounds[place + step - 1] >= value ? 0 : step;
    const uint to = F::bits == 4 ? i ^ 1 : i;
    run |= ulong(F::index(place)) << (F::bits * to);
  }
  if (length == BLOCKWISE_RUN) {
    if constexpr (F::bits == 4) packed[at] = uint(run);
    if constexpr (F::bits == 8) packed[at] = as_type<uint2>(run);
  } else {
    for (uint i = 0; i < (length * F::bits + 7) / 8; ++i) bytes[at * F::bits + i] = uchar(run >> (8 * i));
  }
}

// Packed numbers as numbers.
template <typename F>
[[kernel]] [[max_total_threads_per_threadgroup(BLOCKWISE_THREADS)]] void blockwise_dequantize(
    device const typename F::Run* packed [[buffer(0)]], device const uchar* bytes [[buffer(1)]],
    device const float* absmax [[buffer(2)]], device const uchar* packed_scales [[buffer(3)]],
    device const float* scales_code [[buffer(4)]], device const float* offset [[buffer(5)]],
    device const float* code [[buffer(6)]], device uint4* results [[buffer(7)]], device float* floats [[buffer(8)]],
    device ushort* halves [[buffer(9)]], constant BlockwiseParams& p [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float table[F::count];
  for (uint i = thread_index; i < F::count; i += BLOCKWISE_THREADS) table[i] = F::entry(code, i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Scales scales = {absmax, packed_scales, scales_code, offset};
  const ulong begin = ulong(group) * (BLOCKWISE_THREADS * BLOCKWISE_UNITS) + thread_index;

  typename F::Run runs[BLOCKWISE_UNITS];
  float scale[BLOCKWISE_UNITS];
#pragma unroll
  for (uint u = 0; u < BLOCKWISE_UNITS; ++u) {
    const ulong at = begin + u * BLOCKWISE_THREADS, first = at * BLOCKWISE_RUN;
    if (first < p.count) {
      scale[u] = scales.of(first >> p.shift, p.nested);
      if (first + BLOCKWISE_RUN <= p.count) runs[u] = packed[at];
    }
  }
#pragma unroll
  for (uint u = 0; u < BLOCKWISE_UNITS; ++u) {
    const ulong at = begin + u * BLOCKWISE_THREADS, first = at * BLOCKWISE_RUN;
    if (first >= p.count) return;
    const uint length = uint(min(p.count - first, ulong(BLOCKWISE_RUN)));
    if (length < BLOCKWISE_RUN) {  // the last numbers, whose bytes may end within a word
      for (uint i = 0; i < length; ++i) {
        const uint byte = bytes[at * F::bits + i * F::bits / 8];
        const float value = table[F::bits == 8 ? byte : i % 2 ? byte & 15u : byte >> 4] * scale[u];
        store(floats, halves, first + i, value, p.dtype);
      }
      return;
    }
    float values[BLOCKWISE_RUN];
#pragma unroll
    for (uint i = 0; i < BLOCKWISE_RUN; ++i) {
      uint index;
      if constexpr (F::bits == 4) index = (runs[u] >> (4 * (i ^ 1))) & 15u;
      if constexpr (F::bits == 8) index = (runs[u][i / 4] >> (i % 4 * 8)) & 255u;
      values[i] = table[index] * scale[u];
    }
    const float4 low = float4(values[0], values[1], values[2], values[3]);
    const float4 high = float4(values[4], values[5], values[6], values[7]);
    if (p.dtype == QUANT_FLOAT) {
      results[2 * at] = as_type<uint4>(low);
      results[2 * at + 1] = as_type<uint4>(high);
    } else {
      results[at] = uint4(halves_of(low, p.dtype), halves_of(high, p.dtype));
    }
  }
}

#define BLOCKWISE(F)                                                                                                \
  template [[host_name("blockwise_quantize_" #F)]] [[kernel]] void blockwise_quantize<F>(                           \
      device const uint4*, device const float*, device const ushort*, device const float*, device typename F::Run*, \
      device uchar*, device uint*, constant BlockwiseParams&, uint, uint, uint);                                    \
  template [[host_name("blockwise_dequantize_" #F)]] [[kernel]] void blockwise_dequantize<F>(                       \
      device const typename F::Run*, device const uchar*, device const float*, device const uchar*,                 \
      device const float*, device const float*, device const float*, device uint4*, device float*, device ushort*,  \
      constant BlockwiseParams&, uint, uint);
BLOCKWISE(NF4)
BLOCKWISE(FP4)
BLOCKWISE(Code8)
