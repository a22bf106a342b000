// The same as decode_matrices.metal for heads of up to 256 numbers. They are a program of their own: NVIDIA's compiler
// arranges the threadgroup memory of a kernel by what else is in its program.
#include "attention/decode_matrices.h"

INSTANTIATE("", half, 256, 16, false)
INSTANTIATE("", bfloat, 256, 16, false)
