// Numbers as packed weights of the types whose blocks have a scale of their own. A thread has a block. The types with
// one scale for the largest number, or a scale and a minimum for the range, are packed as ggml does; formats.h
// describes the layouts.
#include <metal_stdlib>
using namespace metal;

#include "quantize.h"

// 16 bytes, each with the lower four bits of two integers.
inline void put_nibbles(device uchar* to, thread const int* q) {
#pragma unroll
  for (uint i = 0; i < 16; ++i) to[i] = uchar((q[i] & 15) | (q[i + 16] & 15) << 4);
}

inline uint fifth_bits(thread const int* q) {
  uint bits = 0;
#pragma unroll
  for (uint i = 0; i < 32; ++i) bits |= uint(q[i] >> 4) << i;
  return bits;
}

// The number of the largest absolute value becomes 0.
template <int bits>
inline float symmetric(thread const Group<32>& x, thread int* q) {
  const float scale = x.largest() / float(-(1 << (bits - 1))), to_one = inverse(scale);
#pragma unroll
  for (uint i = 0; i < 32; ++i)
    q[i] = min(int(product(x.of[i], to_one) + (float(1 << (bits - 1)) + 0.5f)), (1 << bits) - 1);
  return scale;
}

// The range's ends become 0 and the largest integer. Returns the scale and the minimum.
template <int bits>
inline float2 asymmetric(thread const Group<32>& x, thread int* q) {
  const float2 ends = x.range();
  const float scale = (ends.y - ends.x) / float((1 << bits) - 1), to_one = inverse(scale);
#pragma unroll
  for (uint i = 0; i < 32; ++i) q[i] = min(int(product(x.of[i] - ends.x, to_one) + 0.5f), (1 << bits) - 1);
  return float2(scale, ends.x);
}

struct ToQ4_0 {
  static constexpr constant uint bytes = 18;
  static void pack(thread const Group<32>& x, device uchar* to) {
    int q[32];
    put16(to, nearest_half(symmetric<4>(x, q)));
    put_nibbles(to + 2, q);
  }
};

struct ToQ4_1 {
  static constexpr constant uint bytes = 20;
  static void pack(thread const Group<32>& x, device uchar* to) {
    int q[32];
    const float2 scales = asymmetric<4>(x, q);
    put16(to, nearest_half(scales.x));
    put16(to + 2, nearest_half(scales.y));
    put_nibbles(to + 4, q);
  }
};

struct ToQ5_0 {
  static constexpr constant uint bytes = 22;
  static void pack(thread const Group<32>& x, device uchar* to) {
    int q[32];
    put16(to, nearest_half(symmetric<5>(x, q)));
    put32(to + 2, fifth_bits(q));
    put_nibbles(to + 6, q);
  }
};

struct ToQ5_1 {
  static constexpr constant uint bytes = 24;
  static void pack(thread const Group<32>& x, device uchar* to) {
    int q[32];
    const float2 scales = asymmetric<5>(x, q);
    put16(to, nearest_half(scales.x));
    put16(to + 2, nearest_half(scales.y));
    put32(to + 4, fifth_bits(q));
    put_nibbles(to + 8, q);
  }
};

struct ToQ8_0 {
  static constexpr constant uint bytes = 34;
  static void pack(thread const Group<32>& x, device uchar* to) {
    const float scale = fabs(x.largest()) / 127.0f, to_one = inverse(scale);
    put16(to, nearest_half(scale));
#pragma unroll
    for (uint i = 0; i < 32; ++i) to[2 + i] = uchar(int(round_away(x.of[i] * to_one)));
  }
};

struct ToIQ4_NL {
  static constexpr constant uint bytes = 18;
  static void pack(thread const Group<32>& x, device uchar* to) {
    const uint scale = nearest_half(search_scale<32, Nonlinear>(x));
    const float to_one = inverse(half_of(scale));
    int q[32];
#pragma unroll
    for (uint i = 0; i < 32; ++i) q[i] = int(Nonlinear::index(x.of[i] * to_one));
    put16(to, scale);
    put_nibbles(to + 2, q);
  }
};

// The scale is the power of 2 with which the largest number has the largest exponent that a weight can have.
struct ToMXFP4 {
  static constexpr constant uint bytes = 17;
  static void pack(thread const Group<32>& x, device uchar* to) {
    const uint exponent = as_type<uint>(fabs(x.largest())) >> 23;
    const uint scale = exponent > 4 ? exponent - 2 : 0;  // numbers below 2^-122 become zeros
    const float to_one = exponent > 4 ? as_type<float>((255 - scale) << 23) : 0.0f;  // of twice the weights
    int q[32];
#pragma unroll
    for (uint i = 0; i < 32; ++i) {
      const float twice = fabs(x.of[i]) * to_one;
      const int index = int(twice > 0.5f) + int(twice > 1.5f) + int(twice > 2.5f) + int(twice > 3.5f) +
                        int(twice > 5.0f) + int(twice > 7.0f) + int(twice > 10.0f);
      q[i] = index | (x.of[i] < 0.0f && index > 0 ? 8 : 0);
    }
    to[0] = uchar(scale);
    put_nibbles(to + 1, q);
  }
};

template <typename To>
[[kernel]] [[max_total_threads_per_threadgroup(QUANTIZE_THREADS)]] void quantize_block(
    device const uint4* numbers [[buffer(0)]], device uchar* packed [[buffer(1)]],
    constant QuantizeParams& p [[buffer(2)]], device atomic_uint* unheld [[buffer(3)]],
    uint at [[thread_position_in_grid]]) {
  if (at >= p.count) return;
  Group<32> x;
  x.load(numbers, at * 32, p.dtype);
  note_unheld(x, p.most, unheld);
  To::pack(x, packed + ulong(at) * To::bytes);
}

#define QUANTIZE_BLOCK(F)                                                       \
  template [[host_name("quantize_" #F)]] [[kernel]] void quantize_block<To##F>( \
      device const uint4*, device uchar*, constant QuantizeParams&, device atomic_uint*, uint);
QUANTIZE_BLOCK(Q4_0)
QUANTIZE_BLOCK(Q4_1)
QUANTIZE_BLOCK(Q5_0)
QUANTIZE_BLOCK(Q5_1)
QUANTIZE_BLOCK(Q8_0)
QUANTIZE_BLOCK(IQ4_NL)
QUANTIZE_BLOCK(MXFP4)
