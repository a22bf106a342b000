// half and bfloat: 16-bit floats held as bits. Arithmetic is done in float and rounded to nearest even after every
// operation, which for + - * / and sqrt is what a 16-bit unit gives. They are classes, so that the same rules hold with
// every compiler; target/formats.h converts them. Mixed operands follow MSL: with an integer the result has the small
// type, with float or the other small type it is float.
#pragma once

#include "target/formats.h"

namespace msl {

// A scalar type of C++ (unscoped enumerations convert as integers do).
template <class T>
constexpr bool is_native_v = std::is_arithmetic_v<T> || (std::is_enum_v<T> && std::is_convertible_v<T, int>);

template <class Format>
struct small_float;

template <class T>
struct is_small_float : std::false_type {};
template <class F>
struct is_small_float<small_float<F>> : std::true_type {};

// A number that an operation on vectors accepts as its scalar operand.
template <class T>
constexpr bool is_scalar_v = is_native_v<T> || is_small_float<T>::value;

// The type T, made dependent on a template's argument (see anonymous_structs.py).
template <class T, class>
struct in_template {
  using type = T;
};

template <class Format>
struct small_float {
  uint16_t bits;

  small_float() = default;
  template <class Native, class = std::enable_if_t<is_native_v<Native>>>
  METAL_FUNC constexpr small_float(Native value) : bits(Format::round(float(value))) {}
  // Converts a class that counts as a number; the other small float converts only explicitly.
  template <class T, std::enable_if_t<
                         std::is_class_v<T> && std::is_convertible_v<T, float> && !is_small_float<T>::value, int> = 0>
  METAL_FUNC constexpr small_float(T value) : small_float(float(value)) {}
  template <class Other>
  METAL_FUNC explicit constexpr small_float(small_float<Other> value) : bits(Format::round(float(value))) {}

  METAL_FUNC constexpr operator float() const& { return Format::widen(bits); }
  // A number that is nowhere else, as in float(bfloat(x)), has just been rounded.
  METAL_FUNC constexpr operator float() && { return Format::widen_rounded(bits); }

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

#include "target/pairs.h"

using half = msl::small_float<msl::half_format>;
using bfloat = msl::small_float<msl::bfloat_format>;

// `condition ? a : b` between a small float and another scalar is ambiguous in C++, since each converts to the other.
// In MSL it is not. The translator writes `msl::chosen(condition ? msl::arm(a) : msl::arm(b))`: arm() turns a small
// float into a type that converts one way only, and chosen() turns the result back.
namespace msl {

template <class Format>
struct small_float_arm {
  small_float<Format> value;

  METAL_FUNC constexpr explicit small_float_arm(small_float<Format> v) : value(v) {}
  template <class U, class = std::enable_if_t<is_native_v<U> && !std::is_floating_point_v<U>>>
  METAL_FUNC constexpr small_float_arm(U v) : value(float(v)) {}
  // It is a template, so that only float is considered for it.
  template <class U, class = std::enable_if_t<std::is_floating_point_v<U>>>
  METAL_FUNC constexpr operator U() const { return U(value); }
};

template <class T>
METAL_FUNC constexpr T arm(T&& value) { return static_cast<T&&>(value); }  // T is a reference for an lvalue
template <class F>
METAL_FUNC constexpr small_float_arm<F> arm(small_float<F>& value) { return small_float_arm<F>(value); }
template <class F>
METAL_FUNC constexpr small_float_arm<F> arm(const small_float<F>& value) { return small_float_arm<F>(value); }
template <class F>
METAL_FUNC constexpr small_float_arm<F> arm(small_float<F>&& value) { return small_float_arm<F>(value); }

template <class T>
METAL_FUNC constexpr T chosen(T&& value) { return static_cast<T&&>(value); }
template <class F>
METAL_FUNC constexpr small_float<F> chosen(small_float_arm<F>&& value) { return value.value; }

}  // namespace msl
