// numeric_limits and the numeric constants.
#pragma once

#include "metal/values.h"

#define MSL_CONSTANTS(suffix, T)                                \
  constexpr T M_E_##suffix = T(2.71828182845904523536f);        \
  constexpr T M_LOG2E_##suffix = T(1.44269504088896340736f);    \
  constexpr T M_LOG10E_##suffix = T(0.43429448190325182765f);   \
  constexpr T M_LN2_##suffix = T(0.69314718055994530942f);      \
  constexpr T M_LN10_##suffix = T(2.30258509299404568402f);     \
  constexpr T M_PI_##suffix = T(3.14159265358979323846f);       \
  constexpr T M_PI_2_##suffix = T(1.57079632679489661923f);     \
  constexpr T M_PI_4_##suffix = T(0.78539816339744830962f);     \
  constexpr T M_1_PI_##suffix = T(0.31830988618379067154f);     \
  constexpr T M_2_PI_##suffix = T(0.63661977236758134308f);     \
  constexpr T M_2_SQRTPI_##suffix = T(1.12837916709551257390f); \
  constexpr T M_SQRT2_##suffix = T(1.41421356237309504880f);    \
  constexpr T M_SQRT1_2_##suffix = T(0.70710678118654752440f);
MSL_CONSTANTS(F, float)
MSL_CONSTANTS(H, half)
MSL_CONSTANTS(BF, bfloat)
#undef MSL_CONSTANTS

// These are macros in MSL too.
#define MAXFLOAT 3.402823466e+38f
#define HUGE_VALF __builtin_bit_cast(float, 0x7f800000)
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#define MAXHALF half(65504.0f)
#define HUGE_VALH half(INFINITY)
#define MAXBFLOAT bfloat(0x1.fep127f)
#define HUGE_VALBF bfloat(INFINITY)
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f
#define FLT_DECIMAL_DIG 9
#define FP_ILOGB0 (-2147483647 - 1)
#define FP_ILOGBNAN 2147483647
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_10_EXP 4
#define HALF_MAX_EXP 16
#define HALF_MIN_10_EXP (-4)
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(0x1.0p-14f)
#define HALF_EPSILON half(0x1.0p-10f)
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1.0p-126f)
#define BFLT_EPSILON bfloat(0x1.0p-7f)
#define CHAR_BIT 8
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SCHAR_MAX 127
#define SCHAR_MIN (-127 - 1)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32767 - 1)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 0xffffffffu
#define LONG_MAX 0x7fffffffffffffffl
#define LONG_MIN (-0x7fffffffffffffffl - 1)
#define ULONG_MAX 0xfffffffffffffffful

namespace metal {

// Apple's headers keep the limits of a type here, where programs specialize them for their own types.
template <class T>
struct _numeric_limits_impl {
  static constexpr bool is_specialized = std::is_integral_v<T>;
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_integer = true;
  static constexpr bool is_exact = true;
  static constexpr bool is_bounded = true;
  static constexpr bool is_modulo = !is_signed;
  static constexpr bool is_iec559 = false;
  static constexpr bool has_infinity = false;
  static constexpr bool has_quiet_NaN = false;
  static constexpr bool has_signaling_NaN = false;
  static constexpr int radix = 2;
  static constexpr int digits = std::is_same_v<T, bool> ? 1 : int(sizeof(T)) * 8 - is_signed;
  static constexpr int digits10 = digits * 30103 / 100000;
  static constexpr int max_digits10 = 0;

  static METAL_FUNC constexpr T min() { return is_signed ? T(uint64_t(1) << (digits & 63)) : T(0); }
  static METAL_FUNC constexpr T lowest() { return min(); }
  static METAL_FUNC constexpr T max() { return T(~uint64_t(0) >> (64 - digits)); }
  static METAL_FUNC constexpr T epsilon() { return T(0); }
  static METAL_FUNC constexpr T round_error() { return T(0); }
  static METAL_FUNC constexpr T infinity() { return T(0); }
  static METAL_FUNC constexpr T quiet_NaN() { return T(0); }
  static METAL_FUNC constexpr T signaling_NaN() { return T(0); }
  static METAL_FUNC constexpr T denorm_min() { return T(0); }
};

}  // namespace metal

namespace msl {

// numeric_limits of a binary floating-point type with `Digits` bits of precision, stored in Bits with the exponent
// below the sign.
template <class T, class Bits, int Digits, int MaxExponent>
struct float_limits {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false, is_exact = false;
  static constexpr bool is_bounded = true, is_modulo = false, is_iec559 = true;
  static constexpr bool has_infinity = true, has_quiet_NaN = true, has_signaling_NaN = true;
  static constexpr int radix = 2;
  static constexpr int digits = Digits;
  static constexpr int digits10 = (Digits - 1) * 30103 / 100000;
  static constexpr int max_digits10 = 2 + Digits * 30103 / 100000;
  static constexpr int max_exponent = MaxExponent;
  static constexpr int min_exponent = 3 - MaxExponent;
  static constexpr int max_exponent10 = MaxExponent * 30103 / 100000;
  static constexpr int min_exponent10 = -((MaxExponent - 2) * 30103 / 100000);

  static METAL_FUNC constexpr T min() { return from(1u << (Digits - 1)); }
  static METAL_FUNC constexpr T max() { return from(kInfinity - 1); }
  static METAL_FUNC constexpr T lowest() { return -max(); }
  static METAL_FUNC constexpr T epsilon() { return from(Bits(MaxExponent - Digits) << (Digits - 1)); }
  static METAL_FUNC constexpr T round_error() { return T(0.5f); }
  static METAL_FUNC constexpr T infinity() { return from(kInfinity); }
  static METAL_FUNC constexpr T quiet_NaN() { return from(kInfinity | 1u << (Digits - 2)); }
  static METAL_FUNC constexpr T signaling_NaN() { return from(kInfinity | 1u << (Digits - 3)); }
  static METAL_FUNC constexpr T denorm_min() { return from(1); }

 private:
  static constexpr Bits kInfinity = Bits(Bits(2 * MaxExponent - 1) << (Digits - 1));
  static METAL_FUNC constexpr T from(Bits bits) { return bit_cast<T>(bits); }
};

}  // namespace msl

namespace metal {

template <>
struct _numeric_limits_impl<float> : msl::float_limits<float, uint32_t, 24, 128> {};
template <>
struct _numeric_limits_impl<half> : msl::float_limits<half, uint16_t, 11, 16> {};
template <>
struct _numeric_limits_impl<bfloat> : msl::float_limits<bfloat, uint16_t, 8, 128> {};
template <class T>
struct numeric_limits : _numeric_limits_impl<std::remove_cv_t<T>> {};

}  // namespace metal
