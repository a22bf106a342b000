// The kernels of eig for real matrices.
#include <metal_stdlib>
using namespace metal;

#include "eig_kernels.h"

SIMD("eig", float, EIG_SIMDGROUPS, 16)
SIMD("eig", float, EIG_SIMDGROUPS, 32)
LARGER("eig", float, EIG_BLOCK)
