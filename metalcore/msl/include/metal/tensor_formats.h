// Formats of numbers that only tensors have: integers of 2 and 4 bits, and floats of 4 and 8. A byte has several small
// ones, the first in its low bits. A program gives their memory as bytes, and extents and strides count numbers.
#pragma once

#include "metal/types.h"

namespace msl {

// Integers of so many bits.
template <int bits_, bool is_signed>
struct IntegerFormat {
  static constexpr int bits = bits_;
  using Value = int32_t;
  static METAL_FUNC constexpr Value value(uint32_t code) {
    return is_signed && code >> (bits - 1) ? Value(code) - (1 << bits) : Value(code);
  }
};
// Floats with so many bits of an exponent and of a mantissa.
template <int exponent_bits, int mantissa_bits>
struct FloatFormat {
  static constexpr int bits = 1 + exponent_bits + mantissa_bits;
  using Value = float;
  static METAL_FUNC Value value(uint32_t code) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    constexpr uint32_t exponents = (1u << exponent_bits) - 1, mantissas = (1u << mantissa_bits) - 1;
    const uint32_t exponent = code >> mantissa_bits & exponents, mantissa = code & mantissas;
    const uint32_t sign = (code >> (bits - 1)) << 31;
    // Formats of 8 bits end with infinities, or with a NaN alone where they have more bits of a mantissa.
    constexpr bool has_infinity = bits == 8 && mantissa_bits < 3;
    if (bits == 8 && exponent == exponents && (has_infinity || mantissa == mantissas))
      return bit_cast<float>(sign | 0x7f800000u | (has_infinity ? mantissa << (23 - mantissa_bits) : 0x400000u));
    if (exponent == 0) {
      const float small = float(mantissa) * bit_cast<float>(uint32_t(128 - bias - mantissa_bits) << 23);
      return sign ? -small : small;
    }
    return bit_cast<float>(sign | (exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits));
  }
};

}  // namespace msl

namespace metal {

struct int2b_format : msl::IntegerFormat<2, true> {};
struct uint2b_format : msl::IntegerFormat<2, false> {};
struct int4b_format : msl::IntegerFormat<4, true> {};
struct uint4b_format : msl::IntegerFormat<4, false> {};
struct metal_fp4_e2m1_format : msl::FloatFormat<2, 1> {};
struct metal_fp8_e4m3_format : msl::FloatFormat<4, 3> {};
struct metal_fp8_e5m2_format : msl::FloatFormat<5, 2> {};
// Powers of 2, which only scales are.
struct metal_fp8_ue8m0_format {
  static METAL_FUNC float value(uint32_t code) {
    return msl::bit_cast<float>(code == 255 ? 0x7fc00000u : code == 0 ? 0x400000u : code << 23);
  }
};

// The scales of a tensor: one for each `inner` numbers of a row. A plane's rows follow each other as the tensor's do.
struct tensor_plane_scales {};
template <class Plane, class Scale, size_t inner, size_t outer = 1>
struct tensor_blockwise {
  static_assert(std::is_same_v<Plane, tensor_plane_scales>, "the plane of tensor_blockwise is tensor_plane_scales");
  static_assert(std::is_same_v<std::remove_cv_t<Scale>, metal_fp8_ue8m0_format>,
                "the scales of tensor_blockwise are numbers of metal_fp8_ue8m0_format");
  static_assert(inner == 32 && outer == 1, "a scale of tensor_blockwise is that of 32 by 1 numbers");
  const uint8_t* scales;

  METAL_FUNC explicit constexpr tensor_blockwise(const uint8_t* scales) : scales(scales) {}
  METAL_FUNC float at(ptrdiff_t number) const { return metal_fp8_ue8m0_format::value(scales[number / ptrdiff_t(inner)]); }
};

}  // namespace metal

namespace msl {

template <class T>
constexpr bool is_format =
    std::is_base_of_v<IntegerFormat<2, true>, T> || std::is_base_of_v<IntegerFormat<2, false>, T> ||
    std::is_base_of_v<IntegerFormat<4, true>, T> || std::is_base_of_v<IntegerFormat<4, false>, T> ||
    std::is_base_of_v<FloatFormat<2, 1>, T> || std::is_base_of_v<FloatFormat<4, 3>, T> ||
    std::is_base_of_v<FloatFormat<5, 2>, T>;

struct NoScales {
  METAL_FUNC float at(ptrdiff_t) const { return 1.0f; }
};

// Where a tensor's elements begin. Elements of a format are numbered from the first one of `bytes` on.
template <class T, class Scales>
struct FormatOrigin {
  using Format = std::remove_cv_t<T>;
  using Handle = std::conditional_t<std::is_const_v<T>, const uint8_t*, uint8_t*>;
  Handle bytes;
  ptrdiff_t first;
  Scales scales;

  METAL_FUNC auto operator[](ptrdiff_t i) const {
    constexpr int bits = Format::bits;
    const ptrdiff_t number = first + i;
    const uint32_t code = uint32_t(bytes[number * bits / 8]) >> number * bits % 8 & ((1u << bits) - 1);
    if constexpr (std::is_same_v<Scales, NoScales>)
      return Format::value(code);
    else
      return float(Format::value(code)) * scales.at(number);
  }
  METAL_FUNC FormatOrigin& operator+=(ptrdiff_t count) { return first += count, *this; }
};

}  // namespace msl
