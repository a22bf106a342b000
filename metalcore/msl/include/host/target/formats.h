// How half and bfloat convert to and from float. This integer arithmetic vectorizes everywhere; compilers in use (g++
// 12) do not know bfloat and do not vectorize loops over _Float16.
#pragma once

#include "metal/portable_formats.h"

namespace msl {

using half_format = portable_half;
using bfloat_format = portable_bfloat;

}  // namespace msl
