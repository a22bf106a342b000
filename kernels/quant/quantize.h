// What kernels that pack numbers share. A thread holds a group of numbers in registers, searches their scale there, and
// sums in an order that does not depend on anything: the same numbers become the same bytes on every run.
#pragma once

#include <metal_stdlib>

#include "formats.h"
#include "quant.h"

using namespace metal;

// Two 16-bit numbers, also where the GPU takes subnormal float16 for zero.
inline float2 pair_of(uint bits, uint dtype) {
  return dtype == QUANT_HALF ? two_halves(bits) : as_type<float2>(uint2(bits << 16, bits & 0xffff0000u));
}

// 16 numbers from number `from` on, a multiple of 16.
inline void load16(thread float4* to, device const uint4* numbers, uint from, uint dtype) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    if (dtype == QUANT_FLOAT) {
      to[i] = as_type<float4>(numbers[from / 4 + i]);
    } else {
      const uint4 bits = numbers[from / 8 + i / 2];
      const uint2 half_of_them = i % 2 ? bits.zw : bits.xy;
      to[i] = float4(pair_of(half_of_them.x, dtype), pair_of(half_of_them.y, dtype));
    }
  }
}

// 1 / x, or 0 where that is infinite. Products with it may still be: no candidate of a search with such a one is taken.
inline float inverse(float x) { return fabs(x) < 0x1p-126f ? 0.0f : 1.0f / x; }

// A product that compilers do not contract into the sum that follows.
inline float product(float a, float b) { return fma(a, b, -0.0f); }

// The nearest float16's bits, also where the GPU takes subnormal ones for zero.
inline uint nearest_half(float value) {
  const uint bits = as_type<uint>(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) return sign | uint(rint(fabs(value) * kUnit));  // units of subnormal numbers
  const uint rounded = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  return sign | min(rounded, 0x7c00u);
}

// Rounds halves away from zero, as ggml does.
inline float round_away(float value) {
  const float magnitude = fabs(value), whole = floor(magnitude);
  return copysign(whole + floor(2.0f * (magnitude - whole)), value);
}

// Loops over a group go over its eighths inside, so that a CPU has eight sums in one register.
#define QUANTIZE_SUMS 8u
inline float total(thread const float* sums) {
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

inline float lesser(float a, float b) { return b < a ? b : a; }
inline float greater(float a, float b) { return b > a ? b : a; }
inline float least_of(thread const float* x) {
  return lesser(lesser(lesser(x[0], x[4]), lesser(x[2], x[6])), lesser(lesser(x[1], x[5]), lesser(x[3], x[7])));
}
inline float most_of(thread const float* x) {
  return greater(greater(greater(x[0], x[4]), greater(x[2], x[6])), greater(greater(x[1], x[5]), greater(x[3], x[7])));
}

// A group of N numbers in registers. With this alignment compilers load 16 bytes or more at once.
template <uint N>
struct alignas(16) Group {
  float of[N];

  // From number `from` on, a multiple of N.
  void load(device const uint4* numbers, uint from, uint dtype) {
    if (dtype == QUANT_FLOAT) {
      *this = reinterpret_cast<device const Group*>(numbers)[from / N];
      return;
    }
#pragma unroll
    for (uint i = 0; i < N / 8; ++i) {
      const uint4 bits = numbers[from / 8 + i];
      put4(8 * i, float4(pair_of(bits.x, dtype), pair_of(bits.y, dtype)));
      put4(8 * i + 4, float4(pair_of(bits.z, dtype), pair_of(bits.w, dtype)));
    }
  }

  void put4(uint at, float4 four) {
    of[at] = four.x;
    of[at + 1] = four.y;
    of[at + 2] = four.z;
    of[at + 3] = four.w;
  }

  float2 range() const {
    float low[QUANTIZE_SUMS], high[QUANTIZE_SUMS];
#pragma unroll
    for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
      float least = of[k], most = of[k];
#pragma unroll
      for (uint i = QUANTIZE_SUMS; i < N; i += QUANTIZE_SUMS) {
        least = lesser(least, of[i + k]);
        most = greater(most, of[i + k]);
      }
      low[k] = least;
      high[k] = most;
    }
    return float2(least_of(low), most_of(high));
  }

  // The number with the largest absolute value: the first one where two have it.
  float largest() const {
    const float2 ends = range();
    if (ends.y != -ends.x) return ends.y > -ends.x ? ends.y : ends.x;
    float first = ends.y;
#pragma unroll
    for (uint i = N; i > 0; --i) first = fabs(of[i - 1]) == ends.y ? of[i - 1] : first;
    return first;
  }

  // Whether there is NaN or a number beyond ±most. The differences of integers have their sign bit set there.
  bool exceeds(float most) const {
    const uint limit = as_type<uint>(most);
    uint differences = 0;
#pragma unroll
    for (uint i = 0; i < N; ++i) differences |= limit - (as_type<uint>(of[i]) & 0x7fffffffu);
    return differences >> 31;
  }

  // The sum of squares of how far scale * q + minimum is from these numbers.
  float error(thread const Group& q, float scale, float minimum) const {
    float sums[QUANTIZE_SUMS];
#pragma unroll
    for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
      float sum = 0.0f;
#pragma unroll
      for (uint i = 0; i < N; i += QUANTIZE_SUMS) {
        const float difference = scale * q.of[i + k] + minimum - of[i + k];
        sum += difference * difference;
      }
      sums[k] = sum;
    }
    return total(sums);
  }
};

// Says that blocks of the type cannot hold one of the numbers.
template <uint N>
inline void note_unheld(thread const Group<N>& x, float most, device atomic_uint* unheld) {
  if (x.exceeds(most)) atomic_store_explicit(unheld, 1u, memory_order_relaxed);
}

// What numbers become: integers, or the entries of IQ4's table. `index` is what is packed.
template <int least, int most>
struct Integers {
  static constexpr constant float end = least;
  static float nearest(float x) { return clamp(rint(x), float(least), float(most)); }
};

// A sum of steps, so that neighbouring numbers take the same instructions. A step is where two entries are as near.
#define NONLINEAR_STEPS(S)                                                                                            \
  (S(-115.5f, 23.0f) + S(-93.5f, 21.0f) + S(-74.0f, 18.0f) + S(-57.0f, 16.0f) + S(-42.0f, 14.0f) + S(-28.5f, 13.0f) + \
   S(-16.0f, 12.0f) + S(-4.5f, 11.0f) + S(7.0f, 12.0f) + S(19.0f, 12.0f) + S(31.5f, 13.0f) + S(45.5f, 15.0f) +        \
   S(61.0f, 16.0f) + S(79.0f, 20.0f) + S(101.0f, 24.0f))
struct Nonlinear {
  static constexpr constant float end = -127.0f;
  static float nearest(float x) {
#define STEP(middle, difference) (x > middle ? difference : 0.0f)
    return end + NONLINEAR_STEPS(STEP);
#undef STEP
  }
  static uint index(float x) {
#define STEP(middle, difference) uint(x > middle)
    return NONLINEAR_STEPS(STEP);
#undef STEP
  }
};

// The scale with which nearest(x / scale) is nearest to x, by the squared error: for each candidate around the one that
// brings the largest number to the end of the range, with both signs, the best scale of its integers. The error is the
// sum of x * x less (sum of q * x)^2 / (sum of q * q), and so the candidate with the largest quotient wins. A CPU has
// the sums of eight candidates in one register.
template <uint N, typename To>
inline float search_scale(thread const Group<N>& x) {
  constexpr uint candidates = 40;
  const float largest = x.largest(), to_one = inverse(largest);
  Group<N> y;  // in units of the largest number, so that no square is too small
#pragma unroll
  for (uint i = 0; i < N; ++i) y.of[i] = x.of[i] * to_one;
  float most[QUANTIZE_SUMS], best[QUANTIZE_SUMS];
#pragma unroll
  for (uint k = 0; k < QUANTIZE_SUMS; ++k) most[k] = best[k] = 0.0f;
#pragma nounroll
  for (uint first = 0; first < candidates; first += QUANTIZE_SUMS) {
    float end[QUANTIZE_SUMS], qy[QUANTIZE_SUMS], qq[QUANTIZE_SUMS];
#pragma unroll
    for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
      const float magnitude = To::end + 0.2f * (float((first + k) / 2) - 9.0f);
      end[k] = k % 2 ? magnitude : -magnitude;
      qy[k] = qq[k] = 0.0f;
    }
#pragma unroll
    for (uint i = 0; i < N; ++i) {
#pragma unroll
      for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
        const float one = To::nearest(y.of[i] * end[k]);
        qy[k] += one * y.of[i];
        qq[k] += one * one;
      }
    }
#pragma unroll
    for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
      const float scale = qy[k] * inverse(qq[k]), gain = scale * qy[k];
      best[k] = gain > most[k] ? scale : best[k];
      most[k] = gain > most[k] ? gain : most[k];
    }
  }
#pragma unroll
  for (uint k = 1; k < QUANTIZE_SUMS; ++k) {
    best[0] = most[k] > most[0] ? best[k] : best[0];
    most[0] = most[k] > most[0] ? most[k] : most[0];
  }
  return best[0] * largest;
}

// The scale and how much less than 0 the minimum is, with which integers from 0 to `most` are nearest to x, by the
// squared error: from the lowest number to the highest, or for each candidate beside that the best scale and minimum of
// its integers. A minimum above 0 cannot be packed.
template <uint N, int most>
inline float2 search_minimum(thread Group<N>& x) {
  const float2 ends = x.range();
  const float low = min(ends.x, 0.0f), span = max(ends.y - low, 0.0f), to_one = inverse(span);
  float sums[QUANTIZE_SUMS];
#pragma unroll
  for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < N; i += QUANTIZE_SUMS) {
      x.of[i + k] -= low;  // a minimum is a difference from the lowest number from here on
      sum += x.of[i + k];
    }
    sums[k] = sum;
  }
  const float sum_x = total(sums);
  float least = INFINITY, best_scale = 0.0f, best_minimum = 0.0f;
#pragma nounroll
  for (int step = -7; step < 13; ++step) {
    const bool first = step == -7;
    const float factor = (first ? float(most) : float(most) + 0.2f * float(step)) * to_one;
    Group<N> q;
    float q1[QUANTIZE_SUMS], qx[QUANTIZE_SUMS], qq[QUANTIZE_SUMS];
#pragma unroll
    for (uint k = 0; k < QUANTIZE_SUMS; ++k) {
      float sum_q1 = 0.0f, sum_q2 = 0.0f, sum_q3 = 0.0f;
#pragma unroll
      for (uint i = 0; i < N; i += QUANTIZE_SUMS) {
        const float one = Integers<0, most>::nearest(x.of[i + k] * factor);
        q.of[i + k] = one;
        sum_q1 += one;
        sum_q2 += one * x.of[i + k];
        sum_q3 += one * one;
      }
      q1[k] = sum_q1;
      qx[k] = sum_q2;
      qq[k] = sum_q3;
    }
    const float sum_q = total(q1), sum_qx = total(qx), sum_qq = total(qq);
    const float determinant = inverse(float(N) * sum_qq - sum_q * sum_q);
    float scale = (float(N) * sum_qx - sum_q * sum_x) * determinant;
    float minimum = (sum_qq * sum_x - sum_q * sum_qx) * determinant;
    if (minimum + low > 0.0f) {
      scale = (sum_qx + low * sum_q) * inverse(sum_qq);
      minimum = -low;
    }
    if (first) {
      scale = span / float(most);
      minimum = 0.0f;
    }
    const float sum = x.error(q, scale, minimum);
    if (sum < least) {
      least = sum;
      best_scale = scale;
      best_minimum = minimum;
    }
  }
  return float2(best_scale, -(best_minimum + low));
}

// Bytes of a block, which may lie anywhere.
inline void put16(device uchar* to, uint bits) {
  to[0] = uchar(bits);
  to[1] = uchar(bits >> 8);
}
inline void put32(device uchar* to, uint bits) {
  put16(to, bits);
  put16(to + 2, bits >> 16);
}
