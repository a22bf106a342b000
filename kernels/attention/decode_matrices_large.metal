// The same as decode_matrices.metal for heads of up to 256 numbers, whose tiles leave room for half the simdgroups.
// They are a program of their own: NVIDIA's compiler arranges the threadgroup memory of a kernel by what else is in its
// program.
#include "attention/decode_matrices.h"

INSTANTIATE(half, 256, 16, 2)
INSTANTIATE(bfloat, 256, 16, 2)
