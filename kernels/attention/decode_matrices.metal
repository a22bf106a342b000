// The kernels that multiply matrices for few queries, for GPUs whose threads have up to 255 registers.
#include "attention/decode_matrices.h"

#define INSTANTIATE_SIZES(T)         \
  INSTANTIATE("", T, 64, 16, false)  \
  INSTANTIATE("", T, 64, 32, false)  \
  INSTANTIATE("", T, 128, 16, false) \
  INSTANTIATE("", T, 128, 32, false)

INSTANTIATE_SIZES(half)
INSTANTIATE_SIZES(bfloat)
