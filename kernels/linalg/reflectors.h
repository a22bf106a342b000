// Arguments of the kernels for block reflectors I - V T Vᵀ, shared with the host. V, unit lower trapezoidal, lies below the
// diagonal of a row-major matrix, as LAPACK's geqrf leaves it.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Columns of V that a block reflector has at most: of one panel of QR, and of several.
#define REFLECTORS_NARROW 16
#define REFLECTORS_WIDE 64

#define REFLECTORS_THREADS 256
#define REFLECTORS_COLUMNS 64  // of the target, that a threadgroup takes
#define REFLECTORS_ROWS 64     // slabs and spans have a multiple of as many

// The block reflector with `width` columns whose corner is (first, first) of each rows x columns matrix, and the columns
// [target_first, target_end) of the target, a rows x target_columns matrix. Rows are split into `slabs` of slab_rows,
// columns into `tiles`.
struct ReflectorsParams {
  uint32_t rows, columns;
  uint32_t first, width;
  uint32_t target_columns, target_first, target_end;
  uint32_t tiles;
  uint32_t slabs, slab_rows;        // of Vᵀ C
  uint32_t own;                     // C is the matrix with V, whose own columns count as V
  uint32_t product_columns, skip;   // of Vᵀ C as it lies in memory; how many of them are before target_first
  uint32_t spans, span_rows;        // of the update
  uint32_t transpose;
};

// T of width columns from the first of Vᵀ V's product_columns columns; tau is part of `count` numbers a matrix.
struct ReflectorsFactorParams {
  uint32_t first, width, count;
  uint32_t slabs, product_columns;
};
