// metal::fast and metal::precise. Both have the precise functions, except for the few of which a target has faster
// ones. Using-declarations bring every overload.
#pragma once

#include "metal/common.h"
#include "target/fast_math.h"

#define MSL_FLOAT_FUNCTIONS                                                                                          \
  using metal::abs; using metal::acos; using metal::acosh; using metal::asin; using metal::asinh; using metal::atan; \
  using metal::atan2; using metal::atanh; using metal::ceil; using metal::clamp; using metal::copysign;              \
  using metal::cos; using metal::cosh; using metal::cospi; using metal::exp10; using metal::fabs; \
  using metal::fdim; using metal::floor; using metal::fma; using metal::fmax;  \
  using metal::fmax3; using metal::fmedian3; using metal::fmin; using metal::fmin3; using metal::fmod;               \
  using metal::fract; using metal::frexp; using metal::ilogb; using metal::ldexp;                                    \
  using metal::log10; using metal::max; using metal::max3; using metal::median3;                  \
  using metal::min; using metal::min3; using metal::mix; using metal::modf; using metal::nextafter;                  \
  using metal::pow; using metal::powr; using metal::rint; using metal::round; using metal::rsqrt;                    \
  using metal::saturate; using metal::sign; using metal::sin; using metal::sincos; using metal::sinh;                \
  using metal::sinpi; using metal::smoothstep; using metal::sqrt; using metal::step; using metal::tan;               \
  using metal::tanh; using metal::tanpi; using metal::trunc;

namespace metal {
namespace fast {
MSL_FLOAT_FUNCTIONS
}
namespace precise {
MSL_FLOAT_FUNCTIONS
using metal::divide; using metal::exp; using metal::exp2; using metal::log; using metal::log2;
}
}  // namespace metal

#undef MSL_FLOAT_FUNCTIONS
