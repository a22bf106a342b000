// Arguments of the kernels that scale matrices, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A batch whose matrices are each multiplied by a power of two that brings the largest entry to about one, so that the
// norms of a QR decomposition neither overflow nor lose digits. (LAPACK's gesvd and gels scale matrices that leave a
// narrower range.) `parts` threadgroups share a matrix, part_rows rows each.
#define SCALE_THREADS 256
struct ScaleParams {
  int64_t batch_stride, row_stride, column_stride;
  uint32_t matrices;
  uint32_t rows, columns;
  uint32_t parts, part_rows;
};
