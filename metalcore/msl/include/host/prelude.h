// What a translated kernel includes: all of <metal_stdlib> for the host, and the glue that makes functions kernels.
#pragma once

#include "host/checking.h"
#include "host/runtime.h"
#include "metal/atomic.h"
#include "metal/common.h"
#include "metal/conditional.h"
#include "metal/limits.h"
#include "metal/math.h"
#include "metal/namespaces.h"
#include "metal/simdgroup.h"
#include "metal/synchronize.h"
#include "metal/types.h"
#if __has_include("host/entry.h")
#include "host/entry.h"
#endif
