// The kernels whose lanes load operands of products for few queries, for GPUs whose threads have up to 255 registers.
#include "attention/decode_lanes.h"

INSTANTIATE(half, 16)
INSTANTIATE(half, 32)
INSTANTIATE(bfloat, 16)
INSTANTIATE(bfloat, 32)
