// Products of 8 by 8 matrices: a call is an instruction.
#pragma once

#include "target/lanes.h"
#include "target/math.h"
#include "metal/matrix_place.h"

#pragma push_macro("METAL_FUNC")
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((noinline))
#include_next "target/matrix_product.h"
#pragma pop_macro("METAL_FUNC")
