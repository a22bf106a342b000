// How half and bfloat convert to and from float: this integer formulation vectorizes everywhere, while compilers in use
// (g++ 12) neither know bfloat nor vectorize loops over _Float16.
#pragma once

#include "metal/portable_formats.h"

namespace msl {

using half_format = portable_half;
using bfloat_format = portable_bfloat;

}  // namespace msl
