// array<T, N>, and the parts of MSL that are neither numbers nor memory: assume, os_log.
#pragma once

#include "target/runtime.h"

namespace metal {

template <class T, size_t N>
struct array {
  using value_type = T;
  using size_type = size_t;
  using iterator = T*;
  using const_iterator = const T*;

  T elements[N];

  METAL_FUNC constexpr T& operator[](size_t i) { return MSL_CHECK_INDEX(i, N), elements[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return MSL_CHECK_INDEX(i, N), elements[i]; }
  METAL_FUNC constexpr size_t size() const { return N; }
  METAL_FUNC constexpr size_t max_size() const { return N; }
  METAL_FUNC constexpr bool empty() const { return N == 0; }
  METAL_FUNC constexpr T* data() { return elements; }
  METAL_FUNC constexpr const T* data() const { return elements; }
  METAL_FUNC constexpr T& front() { return elements[0]; }
  METAL_FUNC constexpr const T& front() const { return elements[0]; }
  METAL_FUNC constexpr T& back() { return elements[N - 1]; }
  METAL_FUNC constexpr const T& back() const { return elements[N - 1]; }
  METAL_FUNC constexpr T* begin() { return elements; }
  METAL_FUNC constexpr const T* begin() const { return elements; }
  METAL_FUNC constexpr T* end() { return elements + N; }
  METAL_FUNC constexpr const T* end() const { return elements + N; }
  METAL_FUNC constexpr void fill(const T& value) {
    for (T& element : elements) element = value;
  }
};

METAL_FUNC void assume(bool condition) {
  if (!condition) __builtin_unreachable();
}

// Shader logging is accepted and prints nothing.
struct os_log {
  METAL_FUNC constexpr os_log(const char*, const char*) {}
#define MSL_LOG(name)             \
  template <class... Arguments>   \
  METAL_FUNC constexpr void name(const char*, const Arguments&...) const {}
  MSL_LOG(log) MSL_LOG(log_debug) MSL_LOG(log_info) MSL_LOG(log_error) MSL_LOG(log_fault)
#undef MSL_LOG
};
constexpr os_log os_log_default("", "");

}  // namespace metal
