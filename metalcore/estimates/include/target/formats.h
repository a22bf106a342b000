// half is the compiler's own type here, so that its optimizer sees operations on half, which the host's integer
// arithmetic would hide. bfloat stays as it is on GPUs that do not have it: M1 and M2 convert it by integers.
#pragma once

#include "metal/portable_formats.h"

namespace msl {

struct half_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) { return float(bit_cast<_Float16>(bits)); }
  static METAL_FUNC constexpr float widen_rounded(uint16_t bits) { return widen(bits); }
  static METAL_FUNC constexpr uint16_t round(float value) { return bit_cast<uint16_t>(_Float16(value)); }
};
using bfloat_format = portable_bfloat;

}  // namespace msl
