// The same as decode_matrices.metal, for GPUs whose threads have at most 128 registers. They are a program of their
// own: NVIDIA's compiler arranges the threadgroup memory of a kernel by what else is in its program.
#include "attention/decode_matrices.h"

#define INSTANTIATE_SIZES(T)              \
  INSTANTIATE("narrow_", T, 64, 16, true) \
  INSTANTIATE("narrow_", T, 128, 8, true)

INSTANTIATE_SIZES(half)
INSTANTIATE_SIZES(bfloat)
