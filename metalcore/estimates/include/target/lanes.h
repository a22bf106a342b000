// Exchanges of lanes: a call is an instruction.
#pragma once

#include "metal/lane_operations.h"

#pragma push_macro("METAL_FUNC")
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((noinline))
#include_next "target/lanes.h"
#pragma pop_macro("METAL_FUNC")
