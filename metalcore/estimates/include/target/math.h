// Functions on float: a call is an instruction, or a few, as the model says (../../chips.py).
#pragma once

#include "metal/values.h"

#pragma push_macro("METAL_FUNC")
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((noinline))
#include_next "target/math.h"
#pragma pop_macro("METAL_FUNC")
