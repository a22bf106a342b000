// The kernels of schur and hessenberg for real matrices.
#include <metal_stdlib>
using namespace metal;

#include "schur_kernels.h"

INSTANTIATE("schur", float, EIG_SIMDGROUPS, EIG_BLOCK)
