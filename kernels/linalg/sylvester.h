// Arguments of the kernels of sylvester_triangular, shared with the host. All matrices are complex, square ones upper
// triangular, and stored column by column.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define SYLVESTER_ROWS 1024  // the most
#define SYLVESTER_THREADS 128

struct SylvesterParams {
  uint32_t matrices, rows, columns;  // of the result
  uint32_t is_root;                  // the result is the square root of C, and A and B are not read
};
