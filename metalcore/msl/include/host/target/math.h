// msl::math: the functions on float from which metal/math.h makes MSL's overloads.
#pragma once

#include "target/math/exponential.h"
#include "target/math/hyperbolic.h"
#include "target/math/rounding.h"
#include "target/math/trigonometric.h"

namespace msl::math {

METAL_FUNC constexpr float least(float a, float b) { return b < a || a != a ? b : a; }
METAL_FUNC constexpr float greatest(float a, float b) { return a < b || a != a ? b : a; }

}  // namespace msl::math
