// `condition ? a : b` between a small float and another scalar is ambiguous in C++, since each converts to the other.
// In MSL it is not. The translator writes `msl::chosen(condition ? msl::arm(a) : msl::arm(b))`: arm() turns a small
// float into a type that converts one way only, and chosen() turns the result back.
#pragma once

#include "metal/small_float.h"

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
