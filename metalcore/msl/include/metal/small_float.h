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

// Each conversion ends in a right shift of 32 bits: the vectorizer would do anything it could in 16 bits, with many more
// instructions.
struct half_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) {
    // Shifted, sign and exponent are in place but for the exponent's bias, which a multiplication by 2^(127-15) sets
    // right for subnormal numbers too; infinities and NaNs then need the top exponent.
    uint32_t shifted = uint32_t(int32_t(int16_t(bits)) << 13) & 0x8fffe000u;
    uint32_t special = (shifted & 0x0f800000u) == 0x0f800000u ? 0x7f800000u : 0u;
    return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(shifted) * 0x1p112f) | special);
  }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t nan = uint32_t(int32_t(0x7f800000u - magnitude) >> 31) & 0x02000000u;
    magnitude = magnitude < 0x47800000u ? magnitude : 0x47800000u;  // 2^16 becomes infinity
    // 2^(e + 13), e the exponent but at least half's least: adding it rounds the value to half's last place.
    uint32_t exponent = magnitude & 0x7f800000u;
    exponent = exponent > 0x38800000u ? exponent : 0x38800000u;
    float sum = bit_cast<float>(magnitude) + bit_cast<float>(exponent + (13u << 23));
    uint32_t places = bit_cast<uint32_t>(sum) - exponent - (13u << 23);
    uint32_t result = places + (exponent >> 13) - (113u << 10);
    return uint16_t((result << 16 | nan | (bits & 0x80000000u)) >> 16);
  }
};

struct bfloat_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t nan = uint32_t(int32_t(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
    uint32_t increment = (0x7fffu + ((bits >> 16) & 1u)) & ~nan;
    return uint16_t(((bits + increment) | (nan & 0x00400000u)) >> 16);
  }
};

// A scalar of the language itself (unscoped enumerations convert like integers).
template <class T>
constexpr bool is_native_v = std::is_arithmetic_v<T> || (std::is_enum_v<T> && std::is_convertible_v<T, int>);

template <class Format>
struct small_float;

template <class T>
struct is_small_float : std::false_type {};
template <class F>
struct is_small_float<small_float<F>> : std::true_type {};

// A number an operation on vectors accepts as its scalar operand.
template <class T>
constexpr bool is_scalar_v = is_native_v<T> || is_small_float<T>::value;

// How the translator stores a small float in an anonymous struct, where g++ allows no class with constructors.
template <class Format>
struct stored_small_float {
  uint16_t bits;

  METAL_FUNC constexpr operator float() const { return Format::widen(bits); }
  METAL_FUNC stored_small_float& operator=(small_float<Format> value) {
    bits = value.bits;
    return *this;
  }
  METAL_FUNC small_float<Format>* operator&() { return reinterpret_cast<small_float<Format>*>(this); }
  METAL_FUNC const small_float<Format>* operator&() const { return reinterpret_cast<const small_float<Format>*>(this); }
};
using stored_half = stored_small_float<half_format>;
using stored_bfloat = stored_small_float<bfloat_format>;

template <class Format>
struct small_float {
  uint16_t bits;

  small_float() = default;
  template <class Native, class = std::enable_if_t<is_native_v<Native>>>
  METAL_FUNC constexpr small_float(Native value) : bits(Format::round(float(value))) {}
  METAL_FUNC constexpr small_float(stored_small_float<Format> value) : bits(value.bits) {}
  // A class that counts as a number; the other small float does so only where it is asked to.
  template <class T, std::enable_if_t<std::is_class_v<T> && std::is_convertible_v<T, float> && !is_small_float<T>::value, int> = 0>
  METAL_FUNC constexpr small_float(T value) : small_float(float(value)) {}
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
