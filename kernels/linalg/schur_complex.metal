// The kernels of schur and hessenberg for complex matrices.
#include <metal_stdlib>
using namespace metal;

#include "schur_kernels.h"

INSTANTIATE("schur_complex", float2, EIG_COMPLEX_SIMDGROUPS, EIG_COMPLEX_BLOCK)
