// A translated program includes this header on the host: all of <metal_stdlib>, and the glue that makes functions
// kernels.
#pragma once

#include "host/checking.h"
#include "host/stops.h"
#include "metal/stdlib.h"

#include "host/entry.h"
