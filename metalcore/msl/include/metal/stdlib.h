// All of <metal_stdlib>.
#pragma once

#include "metal/array.h"
#include "metal/atomic.h"
#include "metal/common.h"
#include "metal/geometric.h"
#include "metal/integer.h"
#include "metal/internal.h"
#include "metal/limits.h"
#include "metal/math.h"
#include "metal/matrix.h"
#include "metal/namespaces.h"
#include "metal/pack.h"
#include "metal/relational.h"
#include "metal/simd.h"
#include "metal/simdgroup.h"
#include "metal/simdgroup_matrix.h"
#include "metal/synchronize.h"
#include "metal/type_traits.h"
#include "metal/types.h"

// <metal_assert> does nothing, as in release builds of Apple's compiler.
#undef assert
#define assert(condition) static_cast<void>(0)
