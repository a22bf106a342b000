// The lesser and the greater of two numbers; a NaN loses against a number.
#pragma once

#include "target/math.h"

namespace msl {

struct Min {
  template <class T>
  METAL_FUNC constexpr T operator()(T a, T b) const {
    if constexpr (std::is_same_v<T, float>) return math::least(a, b);
    else return b < a || a != a ? b : a;
  }
};
struct Max {
  template <class T>
  METAL_FUNC constexpr T operator()(T a, T b) const {
    if constexpr (std::is_same_v<T, float>) return math::greatest(a, b);
    else return a < b || a != a ? b : a;
  }
};

}  // namespace msl
