// Numbers as floating-point numbers of 8 and 4 bits, rounded to the nearest, halves to even, and never beyond the
// largest. A thread has a slice of 32. The scales are given, or the thread makes those of its own numbers.
#include <metal_stdlib>
using namespace metal;

#include "numbers.h"
#include "scaled_rows.h"

// A format with so many bits of mantissa, a bias of its exponent, a largest number of so many float32 bits, and NaN.
template <uint bits, uint mantissa, uint bias, uint largest_bits, uint nan>
struct To {
  static constexpr constant uint width = bits, fraction = mantissa, largest_of = largest_bits;
  static constexpr constant uint largest_exponent = (largest_bits >> 23) - 127;
  static float largest() { return as_type<float>(largest_bits); }
  static uint code(float value) {
    const uint sign = as_type<uint>(value) >> 31 << (bits - 1);
    const uint magnitude = as_type<uint>(value) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | nan;
    const uint held = min(magnitude, largest_bits);
    constexpr uint least = (128 - bias) << 23, shift = 23 - mantissa;  // of numbers that are not subnormal
    constexpr uint units = (127 + bias - 1 + mantissa) << 23;          // of subnormal numbers, that 1 is
    if (held < least) return sign | uint(rint(as_type<float>(held) * as_type<float>(units)));
    return sign | (((held + (1u << (shift - 1)) - 1 + ((held >> shift) & 1u)) >> shift) - ((127 - bias) << mantissa));
  }
};
typedef To<8, 3, 7, 0x43e00000u, 0x7fu> ToE4M3;   // up to 448
typedef To<8, 2, 15, 0x47600000u, 0x7fu> ToE5M2;  // up to 57344
typedef To<4, 1, 1, 0x40c00000u, 0u> ToE2M1;      // up to 6

// The power of 2 that numbers up to `largest` (its bits) are divided by, as E8M0. It is NaN where that is infinite or
// NaN.
template <typename T>
inline uint power_for(uint largest, uint rounding) {
  if (largest >= 0x7f800000u) return 255;
  uint raised = largest;
  if (rounding == SCALED_CEIL) raised += 0x7fffffu - (T::largest_of & 0x7fffffu);
  if (rounding == SCALED_EVEN) raised += 1u << (22 - T::fraction);
  const uint exponent = raised >> 23;
  return exponent > T::largest_exponent ? exponent - T::largest_exponent : 0;
}

// What 16 numbers are multiplied with, or divided by.
struct Run {
  float4 x[4];
  uint largest() const {
    uint bits = 0;
    for (uint i = 0; i < 16; ++i) bits = max(bits, as_type<uint>(x[i / 4][i % 4]) & 0x7fffffffu);
    return bits;
  }
};

template <typename T, uint kind>
[[kernel]] [[max_total_threads_per_threadgroup(SCALED_QUANTIZE_THREADS)]] void scaled_quantize(
    device const uint4* numbers [[buffer(0)]], device uint* packed [[buffer(1)]],
    device const float* scales [[buffer(2)]], device uchar* made [[buffer(3)]],
    device const float* factor [[buffer(4)]], constant ScaledParams& grid [[buffer(5)]],
    constant ScaledQuantizeParams& p [[buffer(6)]], uint index [[thread_position_in_grid]]) {
  if (index >= p.count) return;
  const ulong at = p.from + index;
  Run runs[2];
#pragma unroll
  for (uint r = 0; r < 2; ++r) load16(runs[r].x, numbers, at * 32 + r * 16, p.dtype);
  float divisors[2] = {1.0f, 1.0f}, multipliers[2] = {1.0f, 1.0f};
  if constexpr (kind == SCALED_FLOAT) {
    const uint row = uint(at / grid.slices), slice = uint(at % grid.slices);
    const ulong of = ulong(row >> grid.rows_shift) * grid.scales + ((2 * slice) >> grid.columns_shift);
    divisors[0] = divisors[1] = scales[of];
  } else if constexpr (kind == SCALED_E8M0) {
    const uint power = power_for<T>(max(runs[0].largest(), runs[1].largest()), p.rounding);
    made[at] = uchar(power);
    multipliers[0] = multipliers[1] = as_type<float>(power == 255 ? 0u : (254 - power) << 23);
  } else {
#pragma unroll
    for (uint r = 0; r < 2; ++r) {
      const float one = grid.factor ? factor[0] : 1.0f;
      const uint code = ToE4M3::code(as_type<float>(runs[r].largest()) / T::largest() / one);
      made[2 * at + r] = uchar(code);
      divisors[r] = GridOfScales::e4m3_of(code) * one;
    }
  }
#pragma unroll
  for (uint r = 0; r < 2; ++r) {
    constexpr uint each = 32 / T::width;
#pragma unroll
    for (uint word = 0; word < 16 / each; ++word) {
      uint bits = 0;
#pragma unroll
      for (uint k = 0; k < each; ++k) {
        const uint i = word * each + k;
        float value = runs[r].x[i / 4][i % 4];
        if constexpr (kind == SCALED_E8M0) {
          value = multipliers[r] == 0.0f ? 0.0f : value * multipliers[r];
        } else {
          value = kind == SCALED_E4M3 && !(divisors[r] > 0.0f) ? 0.0f : value / divisors[r];
        }
        bits |= T::code(value) << (k * T::width);
      }
      packed[(2 * at + r) * (16 / each) + word] = bits;
    }
  }
}

#define SCALED_QUANTIZE(format, T, kind)                                                          \
  template [[host_name("scaled_quantize_" #format)]] [[kernel]] void scaled_quantize<T, kind>(    \
      device const uint4*, device uint*, device const float*, device uchar*, device const float*, \
      constant ScaledParams&, constant ScaledQuantizeParams&, uint);
SCALED_QUANTIZE(e4m3, ToE4M3, SCALED_FLOAT)
SCALED_QUANTIZE(e5m2, ToE5M2, SCALED_FLOAT)
SCALED_QUANTIZE(mxfp8, ToE4M3, SCALED_E8M0)
SCALED_QUANTIZE(mxfp8_e5m2, ToE5M2, SCALED_E8M0)
SCALED_QUANTIZE(mxfp4, ToE2M1, SCALED_E8M0)
SCALED_QUANTIZE(nvfp4, ToE2M1, SCALED_E4M3)
