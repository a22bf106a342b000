// numeric_limits and the numeric constants.
#pragma once

#define MSL_CONSTANTS(suffix, T)                                         \
  constexpr constant T M_E_##suffix = T(2.71828182845904523536f);        \
  constexpr constant T M_LOG2E_##suffix = T(1.44269504088896340736f);    \
  constexpr constant T M_LOG10E_##suffix = T(0.43429448190325182765f);   \
  constexpr constant T M_LN2_##suffix = T(0.69314718055994530942f);      \
  constexpr constant T M_LN10_##suffix = T(2.30258509299404568402f);     \
  constexpr constant T M_PI_##suffix = T(3.14159265358979323846f);       \
  constexpr constant T M_PI_2_##suffix = T(1.57079632679489661923f);     \
  constexpr constant T M_PI_4_##suffix = T(0.78539816339744830962f);     \
  constexpr constant T M_1_PI_##suffix = T(0.31830988618379067154f);     \
  constexpr constant T M_2_PI_##suffix = T(0.63661977236758134308f);     \
  constexpr constant T M_2_SQRTPI_##suffix = T(1.12837916709551257390f); \
  constexpr constant T M_SQRT2_##suffix = T(1.41421356237309504880f);    \
  constexpr constant T M_SQRT1_2_##suffix = T(0.70710678118654752440f);
MSL_CONSTANTS(F, float)
MSL_CONSTANTS(H, half)
MSL_CONSTANTS(BF, bfloat)
#undef MSL_CONSTANTS

#define MAXFLOAT 3.402823466e+38f
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXHALF 65504.0h
#define HUGE_VALH half(__builtin_inff())
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
#define HALF_MAX 65504.0h
#define HALF_MIN half(0x1.0p-14f)
#define HALF_EPSILON half(0x1.0p-10f)
#define BFLT_MAX bfloat(0x1.fep127f)
#define BFLT_MIN bfloat(0x1.0p-126f)
#define BFLT_EPSILON bfloat(0x1.0p-7f)
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-127 - 1)
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
  static constexpr constant bool is_specialized = is_arithmetic_v<T>;
  static constexpr constant bool is_signed = metal::is_signed_v<T>;
  static constexpr constant bool is_integer = is_integral_v<T>;
  static constexpr constant bool is_exact = is_integer;
  static constexpr constant bool is_bounded = true;
  static constexpr constant bool is_modulo = !is_signed;
  static constexpr constant bool is_iec559 = !is_integer;
  static constexpr constant bool has_infinity = !is_integer;
  static constexpr constant bool has_quiet_NaN = !is_integer;
  static constexpr constant bool has_signaling_NaN = !is_integer;
  static constexpr constant int radix = 2;
  static constexpr constant int digits = is_same_v<T, float>    ? 24
                                         : is_same_v<T, half>   ? 11
                                         : is_same_v<T, bfloat> ? 8
                                         : is_same_v<T, bool>   ? 1
                                                                : int(sizeof(T)) * 8 - is_signed;
  static constexpr constant int digits10 = digits * 30103 / 100000;
  static constexpr constant int max_digits10 = is_integer ? 0 : digits10 + 3;
  static constexpr constant int max_exponent = is_same_v<T, half> ? 16 : 128;
  static constexpr constant int min_exponent = is_same_v<T, half> ? -13 : -125;
  static constexpr constant int max_exponent10 = is_same_v<T, half> ? 4 : 38;
  static constexpr constant int min_exponent10 = is_same_v<T, half> ? -4 : -37;

  static constexpr T max() {
    if constexpr (is_integer) return T(~0ul >> (64 - digits));
    return T(is_same_v<T, half> ? 65504.0f : is_same_v<T, bfloat> ? 0x1.fep127f : FLT_MAX);
  }
  static constexpr T lowest() {
    if constexpr (is_integer) return is_signed ? T(-max() - T(1)) : T(0);
    return T(-float(max()));
  }
  static constexpr T min() {
    if constexpr (is_integer) return lowest();
    return T(is_same_v<T, half> ? 0x1.0p-14f : 0x1.0p-126f);
  }
  static constexpr T epsilon() {
    return is_integer ? T(0) : T(is_same_v<T, half> ? 0x1.0p-10f : is_same_v<T, bfloat> ? 0x1.0p-7f : 0x1.0p-23f);
  }
  static constexpr T round_error() { return is_integer ? T(0) : T(0.5f); }
  static constexpr T infinity() {
    if constexpr (is_integer) return T(0);
    return T(__builtin_inff());
  }
  static constexpr T quiet_NaN() {
    if constexpr (is_integer) return T(0);
    return T(__builtin_nanf(""));
  }
  static constexpr T signaling_NaN() { return quiet_NaN(); }
  static constexpr T denorm_min() { return is_integer ? T(0) : T(0x1.0p-126f); }
};
template <class T>
struct numeric_limits : _numeric_limits_impl<remove_cv_t<remove_addrspace_t<T>>> {};

}  // namespace metal
