// The functions of metal::fast that a target may have by itself: the precise ones here.
#pragma once

#include "metal/math.h"

namespace metal::fast {
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
}  // namespace metal::fast
