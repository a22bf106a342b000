// half and bfloat: 16-bit floats held as bits. Arithmetic is done in float and rounded to nearest even after every
// operation, which for + - * / and sqrt is what a 16-bit unit gives. They are classes because compilers in use (g++ 12)
// neither know bfloat nor vectorize loops over _Float16; this integer formulation vectorizes everywhere.
// Mixed operands follow MSL: with an integer the result has the small type, with float (or the other small type) float.
#pragma once

#include <type_traits>

#include "host/runtime.h"

namespace msl {

template <class To, class From>
METAL_FUNC constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

struct half_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) {
    uint32_t wide = bits;
    // Shifting puts the exponent in place but for its bias, which a multiplication by 2^(127-15) sets right for
    // subnormal numbers too; infinities and NaNs then need the top exponent.
    float magnitude = bit_cast<float>((wide & 0x7fffu) << 13) * 0x1p112f;
    uint32_t special = (wide & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | special | (wide & 0x8000u) << 16);
  }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 aligns a subnormal result's last bit with that of the sum, so the addition rounds it.
    uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= (143u << 23) ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return uint16_t(result | (bits & 0x80000000u) >> 16);
  }
};

struct bfloat_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
  }
};

// A scalar of the language itself (unscoped enumerations convert like integers; _Float16 is how the translator stores a
// half where C++ allows no constructors).
template <class T>
constexpr bool is_native_v = std::is_arithmetic_v<T> || std::is_same_v<T, _Float16> || (std::is_enum_v<T> && std::is_convertible_v<T, int>);

template <class Format>
struct small_float {
  uint16_t bits;

  small_float() = default;
  METAL_FUNC constexpr small_float(float value) : bits(Format::round(value)) {}
  template <class Other>
  METAL_FUNC explicit constexpr small_float(small_float<Other> value) : bits(Format::round(float(value))) {}

  METAL_FUNC constexpr operator float() const { return Format::widen(bits); }

  static METAL_FUNC constexpr small_float from_bits(uint16_t bits) { return bit_cast<small_float>(bits); }

  METAL_FUNC constexpr small_float operator+() const { return *this; }
  METAL_FUNC constexpr small_float operator-() const { return from_bits(uint16_t(bits ^ 0x8000u)); }
  METAL_FUNC constexpr small_float& operator++() { return *this = float(*this) + 1.0f; }
  METAL_FUNC constexpr small_float& operator--() { return *this = float(*this) - 1.0f; }
  METAL_FUNC constexpr small_float operator++(int) {
    small_float old = *this;
    ++*this;
    return old;
  }
  METAL_FUNC constexpr small_float operator--(int) {
    small_float old = *this;
    --*this;
    return old;
  }
};

// The type of an arithmetic operation between a small float and a native scalar.
template <class Format, class Native>
using mixed_t = std::conditional_t<std::is_floating_point_v<Native>, Native, small_float<Format>>;

#define MSL_ARITHMETIC(op)                                                                          \
  template <class F>                                                                                \
  METAL_FUNC constexpr small_float<F> operator op(small_float<F> a, small_float<F> b) {             \
    return float(a) op float(b);                                                                    \
  }                                                                                                 \
  METAL_FUNC constexpr float operator op(small_float<half_format> a, small_float<bfloat_format> b) { \
    return float(a) op float(b);                                                                    \
  }                                                                                                 \
  METAL_FUNC constexpr float operator op(small_float<bfloat_format> a, small_float<half_format> b) { \
    return float(a) op float(b);                                                                    \
  }                                                                                                 \
  template <class F, class U, class = std::enable_if_t<is_native_v<U>>>                             \
  METAL_FUNC constexpr mixed_t<F, U> operator op(small_float<F> a, U b) {                           \
    return mixed_t<F, U>(a) op mixed_t<F, U>(b);                                                    \
  }                                                                                                 \
  template <class F, class U, class = std::enable_if_t<is_native_v<U>>>                             \
  METAL_FUNC constexpr mixed_t<F, U> operator op(U a, small_float<F> b) {                           \
    return mixed_t<F, U>(a) op mixed_t<F, U>(b);                                                    \
  }                                                                                                 \
  template <class F, class U>                                                                       \
  METAL_FUNC constexpr auto operator op##=(small_float<F>& a, U b)->decltype(a = small_float<F>(a op b)) { \
    return a = small_float<F>(a op b);                                                              \
  }
MSL_ARITHMETIC(+)
MSL_ARITHMETIC(-)
MSL_ARITHMETIC(*)
MSL_ARITHMETIC(/)
#undef MSL_ARITHMETIC

#define MSL_COMPARISON(op)                                                                \
  template <class F, class G>                                                             \
  METAL_FUNC constexpr bool operator op(small_float<F> a, small_float<G> b) {             \
    return float(a) op float(b);                                                          \
  }                                                                                       \
  template <class F, class U, class = std::enable_if_t<is_native_v<U>>>                   \
  METAL_FUNC constexpr bool operator op(small_float<F> a, U b) {                          \
    return float(a) op float(mixed_t<F, U>(b));                                           \
  }                                                                                       \
  template <class F, class U, class = std::enable_if_t<is_native_v<U>>>                   \
  METAL_FUNC constexpr bool operator op(U a, small_float<F> b) {                          \
    return float(mixed_t<F, U>(a)) op float(b);                                           \
  }
MSL_COMPARISON(==)
MSL_COMPARISON(!=)
MSL_COMPARISON(<)
MSL_COMPARISON(<=)
MSL_COMPARISON(>)
MSL_COMPARISON(>=)
#undef MSL_COMPARISON

METAL_FUNC constexpr small_float<half_format> half_literal(float value) { return value; }
METAL_FUNC constexpr small_float<bfloat_format> bfloat_literal(float value) { return value; }

}  // namespace msl

using half = msl::small_float<msl::half_format>;
using bfloat = msl::small_float<msl::bfloat_format>;
