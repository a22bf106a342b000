// The kernels that multiply matrices for few queries, for GPUs whose threads have up to 255 registers.
#include "attention/decode_matrices.h"

#define INSTANTIATE_SIZES(T) \
  INSTANTIATE(T, 64, 8, 4)   \
  INSTANTIATE(T, 64, 16, 4)  \
  INSTANTIATE(T, 64, 32, 4)  \
  INSTANTIATE(T, 128, 8, 4)  \
  INSTANTIATE(T, 128, 16, 4) \
  INSTANTIATE(T, 128, 32, 4)

INSTANTIATE_SIZES(half)
INSTANTIATE_SIZES(bfloat)
