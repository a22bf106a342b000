// The types of <metal_stdlib>, with which Clang checks a program as C++ for OpenCL.
#pragma once

#define device __attribute__((opencl_global_device))
#define constant const __global
#define threadgroup __local
#define thread __private

// Names that Clang declares for OpenCL. Messages show them without the suffix.
#define atomic_int atomic_int_of_msl
#define atomic_uint atomic_uint_of_msl
#define atomic_long atomic_long_of_msl
#define atomic_ulong atomic_ulong_of_msl
#define atomic_float atomic_float_of_msl
#define atomic_bool atomic_bool_of_msl

#define MSL_UNROLL
#define MSL_UNROLL_BY(count)

#include "traits.h"

#include "types.h"

#include "limits.h"
#include "math.h"
#include "integer.h"
#include "matrix.h"
#include "atomic.h"
#include "simdgroup.h"
#include "builtins.h"

#undef device
#undef constant
#undef threadgroup
#undef thread
