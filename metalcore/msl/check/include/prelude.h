// The types of <metal_stdlib>, with which Clang checks a program as C++ for OpenCL.
#pragma once

#ifdef __OPENCL_CPP_VERSION__
#define MSL_DEVICE __attribute__((opencl_global_device))
#else  // the second reading, as C++14, knows no address spaces; see clang.py
#define MSL_DEVICE
#define __global
#define __local
#define __private
#define __generic
#define __constant
using half = _Float16;
using bfloat = __bf16;
#endif

#if MSL_VERSION < 320
#define MSL_SINCE_3_2 __attribute__((unavailable("it is new in MSL 3.2")))
#else
#define MSL_SINCE_3_2
#endif

#define device MSL_DEVICE
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

#ifdef __OPENCL_CPP_VERSION__
#include "types.h"
#endif
#include "vectors.h"

#include "limits.h"
#include "math.h"
#include "matrix.h"
#include "atomic.h"
#include "simdgroup.h"
#include "builtins.h"

#undef device
#undef constant
#undef threadgroup
#undef thread
