// The functions of metal::fast of which a target may have its own. The host has the precise ones.
#pragma once

#include "metal/math.h"

namespace metal::fast {
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
}  // namespace metal::fast
