// Circular functions of float and their inverses. The argument is reduced and the polynomials are evaluated in double.
#pragma once

#include "target/math/exponential.h"

namespace msl::math {

constexpr double kPi = 3.14159265358979323846;

// An angle: a whole number of quarter turns (its last two bits count) and the rest in [-pi/4, pi/4].
struct Angle {
  int quarters;
  double rest;
};

// Reduces any finite angle in radians. 1 / (2 pi) is cut into pieces of 29 bits. Their products with a float are exact
// in double, so whole turns can be dropped from each product before the products are added (Payne and Hanek's idea).
METAL_FUNC Angle reduce_angle(float x) {
  constexpr double pieces[] = {0x145f306dp-31,  0x19391054p-60,  0x14fe13abp-89, 0x1d1f534dp-118,
                               0x1b81b6c5p-147, 0x05664f10p-176, 0x1c820ff2p-205};
  double turns = 0.0, quarters = 0.0;
#pragma GCC unroll 8
  for (double piece : pieces) {
    double product = double(x) * piece;
    turns += product - __builtin_rint(product);
    double whole = __builtin_rint(turns * 4.0);
    quarters += whole;
    turns -= whole * 0.25;
  }
  return {int(quarters), turns * (2 * kPi)};
}

// Reduces an angle of x half turns.
METAL_FUNC Angle reduce_half_turns(float x) {
  float turns = x * 0.5f;  // an underflow here is far below what sin and tan can show beside x itself
  double fraction = double(turns) - __builtin_rint(double(turns));
  fraction = abs(x) < 1.0f ? double(x) * 0.5 : fraction;
  double whole = __builtin_rint(fraction * 4.0);
  return {int(whole), (fraction - whole * 0.25) * (2 * kPi)};
}

// sin and cos on [-pi/4, pi/4]: the minimax polynomials of FreeBSD's k_sinf and k_cosf.
METAL_FUNC double sin_polynomial(double r) {
  double z = r * r;
  return r + r * z * polynomial(z, 0.0000027183114939898219064, -0.000198393348360966317347, 0.0083333293858894631756,
                                -0.166666666416265235595);
}
METAL_FUNC double cos_polynomial(double r) {
  double z = r * r;
  return polynomial(z, 0.0000243904487962774090654, -0.00138867637746099294692, 0.0416666233237390631894,
                    -0.499999997251031003120, 1.0);
}

METAL_FUNC float sin_of(Angle angle) {
  double value = angle.quarters & 1 ? cos_polynomial(angle.rest) : sin_polynomial(angle.rest);
  return float(angle.quarters & 2 ? -value : value);
}
METAL_FUNC float cos_of(Angle angle) { return sin_of({angle.quarters + 1, angle.rest}); }
METAL_FUNC float tan_of(Angle angle) {
  double s = sin_polynomial(angle.rest), c = cos_polynomial(angle.rest);
  return float(angle.quarters & 1 ? -c / s : s / c);
}

METAL_FUNC float sin(float x) { return x == 0.0f ? x : sin_of(reduce_angle(x)); }
METAL_FUNC float cos(float x) { return cos_of(reduce_angle(x)); }
METAL_FUNC float sincos(float x, float& cosine) {
  Angle angle = reduce_angle(x);
  cosine = cos_of(angle);
  return x == 0.0f ? x : sin_of(angle);
}
METAL_FUNC float tan(float x) { return x == 0.0f ? x : tan_of(reduce_angle(x)); }
// Zeros are exact. Those of sinpi and tanpi have the argument's sign, those of cospi are positive.
METAL_FUNC float sinpi(float x) {
  float value = sin_of(reduce_half_turns(x));
  return value == 0.0f ? copysign(value, x) : value;
}
METAL_FUNC float cospi(float x) { return cos_of(reduce_half_turns(x)) + 0.0f; }
METAL_FUNC float tanpi(float x) {
  float value = tan_of(reduce_half_turns(x));
  return value == 0.0f ? copysign(value, x) : value;
}

// The angle of the point (x, y) for finite x, y >= 0 that are not both zero. The addition theorem brings the quotient
// of the smaller by the larger below tan(pi/8); then the series converges like 0.172^k.
METAL_FUNC double first_octant_angle(double quotient) {
  bool large = quotient > 0.41421356237309504880;
  double q = large ? (quotient - 1.0) / (quotient + 1.0) : quotient;
  double z = q * q;
  double angle = q + q * z * polynomial(z, -1.0 / 19, 1.0 / 17, -1.0 / 15, 1.0 / 13, -1.0 / 11, 1.0 / 9, -1.0 / 7,
                                        1.0 / 5, -1.0 / 3);
  return large ? angle + kPi / 4 : angle;
}

METAL_FUNC double atan2_64(double y, double x) {
  double height = __builtin_fabs(y), width = __builtin_fabs(x);
  double larger = height > width ? height : width, smaller = height > width ? width : height;
  double quotient = smaller / larger;
  quotient = larger == 0.0 ? 0.0 : quotient;
  quotient = smaller == double(kInfinity) ? 1.0 : quotient;
  double angle = first_octant_angle(quotient);
  angle = height > width ? kPi / 2 - angle : angle;
  angle = __builtin_signbit(x) ? kPi - angle : angle;
  angle = y != y || x != x ? double(kNaN) : angle;
  return __builtin_copysign(angle, y);
}

METAL_FUNC float atan2(float y, float x) { return float(atan2_64(y, x)); }
METAL_FUNC float atan(float x) { return float(atan2_64(x, 1.0)); }
METAL_FUNC float asin(float x) {
  return float(atan2_64(x, __builtin_sqrt((1.0 - double(x)) * (1.0 + double(x)))));
}
METAL_FUNC float acos(float x) {
  return float(atan2_64(__builtin_sqrt((1.0 - double(x)) * (1.0 + double(x))), x));
}

}  // namespace msl::math
