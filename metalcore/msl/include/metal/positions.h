// Positions of threads in the types that kernels ask for.
#pragma once

#include "target/runtime.h"
#include "target/standard.h"

namespace msl {

// Makes the kernel's type (an integer, or a vector of two or three) of an index in three dimensions.
template <class T, class = void>
struct from_uint3 {
  static METAL_FUNC T make(Uint3 v) { return T(v.x); }
};
template <class T>
struct from_uint3<
    T, std::enable_if_t<!std::is_arithmetic_v<T> && (sizeof(T) / sizeof(typename T::element_type) == 2)>> {
  using E = typename T::element_type;
  static METAL_FUNC T make(Uint3 v) { return T(E(v.x), E(v.y)); }
};
template <class T>
struct from_uint3<
    T, std::enable_if_t<!std::is_arithmetic_v<T> && (sizeof(T) / sizeof(typename T::element_type) >= 3)>> {
  using E = typename T::element_type;
  static METAL_FUNC T make(Uint3 v) { return T(E(v.x), E(v.y), E(v.z)); }
};

}  // namespace msl
