// The kernels of eig for complex matrices.
#include <metal_stdlib>
using namespace metal;

#include "eig_kernels.h"

SIMD("eig_complex", float2, EIG_COMPLEX_SIMDGROUPS, 16)
SIMD("eig_complex", float2, EIG_COMPLEX_SIMDGROUPS, 32)
LARGER("eig_complex", float2, EIG_COMPLEX_BLOCK)
