// Numbers as packed weights of the types whose blocks of 256 are groups with a scale each, or a scale and a minimum,
// which are integers times a factor of the block. The first kernel searches the groups' scales. The next one knows the
// block's factor, and tries the integers beside the nearest ones. A thread has a group there. The last one packs: eight
// threads have a block.
#include <metal_stdlib>
using namespace metal;

#include "quantize.h"

// Groups with a scale alone -------------------------------------------------------------------------------------------

// The factor of a block, with which the scale of the largest absolute value is `least`.
template <uint groups, int least>
inline uint factor_of(device const float* scales) {
  Group<groups> s;
#pragma unroll
  for (uint i = 0; i < groups; ++i) s.of[i] = scales[i];
  return nearest_half(s.largest() / float(least));
}

// The group's integer, which is `least` or more, with `least` taken away.
template <typename To, int least, uint N>
inline uint fit_scale(thread const Group<N>& x, float scale, float factor) {
  const float middle = clamp(rint(scale * inverse(factor)), float(least), float(-1 - least));
  float lowest = INFINITY, best = middle;
#pragma nounroll
  for (int candidate = 0; candidate < 3; ++candidate) {
    const float integer = middle + float(candidate == 2 ? -1 : candidate);
    if (integer < float(least) || integer > float(-1 - least)) continue;
    const float s = factor * integer, to_one = inverse(s);
    Group<N> q;
#pragma unroll
    for (uint i = 0; i < N; ++i) q.of[i] = To::nearest(x.of[i] * to_one);
    const float error = x.error(q, s, 0.0f);
    if (error < lowest) {
      lowest = error;
      best = integer;
    }
  }
  return uint(int(best) - least);
}

inline float scale_of(uint integer, int least, float factor) { return factor * float(int(integer) + least); }

// Groups with a scale and a minimum -----------------------------------------------------------------------------------

// The factors of a block's scales and minima, with which the largest ones are `most`.
template <uint groups, int most>
inline uint2 factors_of(device const float2* scales) {
  float2 ends = scales[0];
#pragma unroll
  for (uint i = 1; i < groups; ++i) ends = max(ends, scales[i]);
  return uint2(nearest_half(ends.x / float(most)), nearest_half(ends.y / float(most)));
}

// The group's integers, of the scale in the lower 8 bits and of the minimum above.
template <int most_q, int most, uint N>
inline uint fit_minimum(thread const Group<N>& x, float2 scales, float2 factor) {
  const float2 to_one = float2(inverse(factor.x), inverse(factor.y));
  const float2 middle = clamp(rint(scales * to_one), float2(0.0f), float2(float(most)));
  float lowest = INFINITY;
  float2 best = middle;
#pragma nounroll
  for (int candidate = 0; candidate < 9; ++candidate) {  // the nearest ones come first
    const int ds = candidate / 3, dm = candidate % 3;
    const float2 integers = middle + float2(float(ds == 2 ? -1 : ds), float(dm == 2 ? -1 : dm));
    if (min(integers.x, integers.y) < 0.0f || max(integers.x, integers.y) > float(most)) continue;
    const float2 s = factor * integers;
    const float to_q = inverse(s.x);
    Group<N> q;
#pragma unroll
    for (uint i = 0; i < N; ++i) q.of[i] = Integers<0, most_q>::nearest((x.of[i] + s.y) * to_q);
    const float error = x.error(q, s.x, -s.y);
    if (error < lowest) {
      lowest = error;
      best = integers;
    }
  }
  return uint(best.x) | uint(best.y) << 8;
}

inline float2 scales_of(uint integers, float2 factor) {
  return factor * float2(float(integers & 255), float(integers >> 8));
}
inline float2 halves_of(uint2 bits) { return float2(half_of(bits.x), half_of(bits.y)); }

// Integers ------------------------------------------------------------------------------------------------------------

// A thread's integers: four neighbours of each of the block's eight runs of 32, in the bytes of a word.
template <int least, int most>
inline uint integers(thread const float* x, float scale, float minimum) {
  const float to_one = inverse(scale);
  uint word = 0;
#pragma unroll
  for (uint k = 0; k < 4; ++k) {
    const float q = clamp(rint((x[k] + minimum) * to_one), float(least), float(most));
    word |= uint(int(q) - least) << (8 * k);
  }
  return word;
}

// Four neighbours from number `from` on, a multiple of 4.
inline void load4(thread float* x, device const uint2* numbers, uint from, uint dtype) {
  float4 four;
  if (dtype == QUANT_FLOAT) {
    const uint2 a = numbers[from / 2], b = numbers[from / 2 + 1];
    four = float4(as_type<float2>(a), as_type<float2>(b));
  } else {
    const uint2 bits = numbers[from / 4];
    four = float4(pair_of(bits.x, dtype), pair_of(bits.y, dtype));
  }
#pragma unroll
  for (uint k = 0; k < 4; ++k) x[k] = four[k];
}

// Two bits of each of four words.
inline uint crumbs_of(thread const uint* q) {
  uint word = 0;
#pragma unroll
  for (uint i = 0; i < 4; ++i) word |= (q[i] & 0x03030303u) << (2 * i);
  return word;
}

// One bit of each of eight words.
inline uint bits_of(thread const uint* q, uint at) {
  uint word = 0;
#pragma unroll
  for (uint i = 0; i < 8; ++i) word |= ((q[i] >> at) & 0x01010101u) << i;
  return word;
}

// Types ---------------------------------------------------------------------------------------------------------------

// Of a type:
//   Scales        what a group's scales are: float, or float2 with the minimum
//   group         numbers that share a scale
//   bytes         of a block
//   search(x)     the scales of a group
//   fit           its integers, from the scales of a block's groups
//   pack          writes what a thread has of a block: `part` is 0 to 7
struct Minima {
  typedef float2 Scales;
};

struct ToQ2_K : Minima {
  static constexpr constant uint group = 16, bytes = 84;
  static float2 search(thread Group<16>& x) { return search_minimum<16, 3>(x); }
  static uint fit(thread const Group<16>& x, device const float2* scales, uint own) {
    return fit_minimum<3, 15>(x, scales[own], halves_of(factors_of<16, 15>(scales)));
  }
  static void pack(device const uint2* numbers, uint from, uint dtype, device const float2* scales,
                   device const uint* chosen, uint part, device uchar* to) {
    const uint2 factors = factors_of<16, 15>(scales);
    const float2 factor = halves_of(factors);
    uint q[8];
#pragma unroll
    for (uint run = 0; run < 8; ++run) {
      float x[4];
      load4(x, numbers, from + run * 32 + part * 4, dtype);
      const float2 s = scales_of(chosen[run * 2 + part / 4], factor);
      q[run] = integers<0, 3>(x, s.x, s.y);
    }
    put32(to + 16 + part * 4, crumbs_of(q));
    put32(to + 48 + part * 4, crumbs_of(q + 4));
#pragma unroll
    for (uint i = 2 * part; i < 2 * part + 2; ++i) to[i] = uchar((chosen[i] & 15) | (chosen[i] >> 8) << 4);
    if (part == 0) put32(to + 80, factors.x | factors.y << 16);
  }
};

// The header of Q4_K and Q5_K: the factors, and eight scales and minima of 6 bits in 12 bytes.
inline void put_pairs(device uchar* to, uint2 factors, device const uint* chosen) {
  put32(to, factors.x | factors.y << 16);
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const uint2 low = uint2(chosen[i] & 255, chosen[i] >> 8), high = uint2(chosen[i + 4] & 255, chosen[i + 4] >> 8);
    to[4 + i] = uchar(low.x | (high.x >> 4) << 6);
    to[8 + i] = uchar(low.y | (high.y >> 4) << 6);
    to[12 + i] = uchar((high.x & 15) | (high.y & 15) << 4);
  }
}

// Q4_K, and Q5_K with a fifth bit.
template <int most, uint first_nibble>
struct Pairs : Minima {
  static constexpr constant uint group = 32, bytes = first_nibble + 128;
  static float2 search(thread Group<32>& x) { return search_minimum<32, most>(x); }
  static uint fit(thread const Group<32>& x, device const float2* scales, uint own) {
    return fit_minimum<most, 63>(x, scales[own], halves_of(factors_of<8, 63>(scales)));
  }
  static void pack(device const uint2* numbers, uint from, uint dtype, device const float2* scales,
                   device const uint* chosen, uint part, device uchar* to) {
    const uint2 factors = factors_of<8, 63>(scales);
    const float2 factor = halves_of(factors);
    uint q[8];
#pragma unroll
    for (uint run = 0; run < 8; ++run) {
      float x[4];
      load4(x, numbers, from + run * 32 + part * 4, dtype);
      const float2 s = scales_of(chosen[run], factor);
      q[run] = integers<0, most>(x, s.x, s.y);
    }
    if (part == 0) put_pairs(to, factors, chosen);
    if (most > 15) put32(to + 16 + part * 4, bits_of(q, 4));
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      put32(to + first_nibble + 32 * i + part * 4, (q[2 * i] & 0x0f0f0f0fu) | (q[2 * i + 1] & 0x0f0f0f0fu) << 4);
  }
};
typedef Pairs<15, 16> ToQ4_K;
typedef Pairs<31, 48> ToQ5_K;

// 16 groups of 16 with a scale each, as integers.
template <int least, int least_scale>
struct Signed16 {
  typedef float Scales;
  static constexpr constant uint group = 16;
  static float search(thread Group<16>& x) { return search_scale<16, Integers<least, -1 - least>>(x); }
  static uint fit(thread const Group<16>& x, device const float* scales, uint own) {
    return fit_scale<Integers<least, -1 - least>, least_scale>(x, scales[own],
                                                               half_of(factor_of<16, least_scale>(scales)));
  }
  static void make(device const uint2* numbers, uint from, uint dtype, device const uint* chosen, uint part,
                   float factor, thread uint* q) {
#pragma unroll
    for (uint run = 0; run < 8; ++run) {
      float x[4];
      load4(x, numbers, from + run * 32 + part * 4, dtype);
      const float s = scale_of(chosen[run * 2 + part / 4], least_scale, factor);
      q[run] = integers<least, -1 - least>(x, s, 0.0f);
    }
  }
};

struct ToQ3_K : Signed16<-4, -32> {
  static constexpr constant uint bytes = 110;
  static void pack(device const uint2* numbers, uint from, uint dtype, device const float* scales,
                   device const uint* chosen, uint part, device uchar* to) {
    const uint factor = factor_of<16, -32>(scales);
    uint q[8];
    make(numbers, from, dtype, chosen, part, half_of(factor), q);
    put32(to + part * 4, bits_of(q, 2));
    put32(to + 32 + part * 4, crumbs_of(q));
    put32(to + 64 + part * 4, crumbs_of(q + 4));
    if (part != 0) return;
    uint upper = 0;
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      const uint a = chosen[i], b = chosen[i + 8];
      to[96 + i] = uchar((a & 15) | (b & 15) << 4);
      upper |= (a >> 4 | (b >> 4) << 4) << (i % 4 * 8 + i / 4 * 2);
    }
    put32(to + 104, upper);
    put16(to + 108, factor);
  }
};

struct ToQ6_K : Signed16<-32, -128> {
  static constexpr constant uint bytes = 210;
  static void pack(device const uint2* numbers, uint from, uint dtype, device const float* scales,
                   device const uint* chosen, uint part, device uchar* to) {
    const uint factor = factor_of<16, -128>(scales);
    uint q[8];
    make(numbers, from, dtype, chosen, part, half_of(factor), q);
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      const uint run = i / 2 * 4 + i % 2;
      put32(to + 32 * i + part * 4, (q[run] & 0x0f0f0f0fu) | (q[run + 2] & 0x0f0f0f0fu) << 4);
    }
#pragma unroll
    for (uint i = 0; i < 8; ++i) q[i] >>= 4;
    put32(to + 128 + part * 4, crumbs_of(q));
    put32(to + 160 + part * 4, crumbs_of(q + 4));
#pragma unroll
    for (uint i = 2 * part; i < 2 * part + 2; ++i) to[192 + i] = uchar(chosen[i] - 128);
    if (part == 0) put16(to + 208, factor);
  }
};

// A thread has a whole run of 32, whose halves share bytes.
struct ToIQ4_XS {
  typedef float Scales;
  static constexpr constant uint group = 32, bytes = 136;
  static float search(thread Group<32>& x) { return search_scale<32, Nonlinear>(x); }
  static uint fit(thread const Group<32>& x, device const float* scales, uint own) {
    return fit_scale<Nonlinear, -32>(x, scales[own], half_of(factor_of<8, -32>(scales)));
  }
  static void pack(device const uint2* numbers, uint from, uint dtype, device const float* scales,
                   device const uint* chosen, uint part, device uchar* to) {
    const uint factor = factor_of<8, -32>(scales);
    const float to_index = inverse(scale_of(chosen[part], -32, half_of(factor)));
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      float low[4], high[4];
      load4(low, numbers, from + part * 32 + i * 4, dtype);
      load4(high, numbers, from + part * 32 + i * 4 + 16, dtype);
      uint word = 0;
#pragma unroll
      for (uint k = 0; k < 4; ++k)
        word |= (Nonlinear::index(low[k] * to_index) | Nonlinear::index(high[k] * to_index) << 4) << (8 * k);
      put32(to + 8 + part * 16 + i * 4, word);
    }
    if (part != 0) return;
    uint lower = 0, upper = 0;
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      lower |= (chosen[i] & 15) << (4 * i);
      upper |= (chosen[i] >> 4) << (2 * i);
    }
    put32(to, factor | upper << 16);
    put32(to + 4, lower);
  }
};

// Kernels -------------------------------------------------------------------------------------------------------------

template <typename To>
[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_search(
    device const uint4* numbers [[buffer(0)]], device typename To::Scales* scales [[buffer(1)]],
    constant QuantizeParams& p [[buffer(2)]], device atomic_uint* unheld [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  Group<To::group> x;
  x.load(numbers, at * To::group, p.dtype);
  note_unheld(x, p.most, unheld);
  scales[at] = To::search(x);
}

template <typename To>
[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_fit(
    device const uint4* numbers [[buffer(0)]], device const typename To::Scales* scales [[buffer(1)]],
    device uint* chosen [[buffer(2)]], constant QuantizeParams& p [[buffer(3)]], uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  constexpr uint groups = 256 / To::group;
  Group<To::group> x;
  x.load(numbers, at * To::group, p.dtype);
  chosen[at] = To::fit(x, scales + at / groups * groups, at % groups);
}

template <typename To>
[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_pack(
    device const uint2* numbers [[buffer(0)]], device const typename To::Scales* scales [[buffer(1)]],
    device const uint* chosen [[buffer(2)]], device uchar* packed [[buffer(3)]],
    constant QuantizeParams& p [[buffer(4)]], uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  const uint block = at / 8, group = block * (256 / To::group);
  To::pack(numbers, block * 256, p.dtype, scales + group, chosen + group, at % 8, packed + ulong(block) * To::bytes);
}

#define QUANTIZE_GROUPS(F)                                                                                           \
  template [[host_name("quantize_search_" #F)]] [[kernel]] void quantize_search<To##F>(                              \
      device const uint4*, device To##F::Scales*, constant QuantizeParams&, device atomic_uint*, uint);              \
  template [[host_name("quantize_fit_" #F)]] [[kernel]] void quantize_fit<To##F>(                                    \
      device const uint4*, device const To##F::Scales*, device uint*, constant QuantizeParams&, uint);               \
  template [[host_name("quantize_" #F)]] [[kernel]] void quantize_pack<To##F>(                                       \
      device const uint2*, device const To##F::Scales*, device const uint*, device uchar*, constant QuantizeParams&, \
      uint);
QUANTIZE_GROUPS(Q2_K)
QUANTIZE_GROUPS(Q3_K)
QUANTIZE_GROUPS(Q4_K)
QUANTIZE_GROUPS(Q5_K)
QUANTIZE_GROUPS(Q6_K)
QUANTIZE_GROUPS(IQ4_XS)
