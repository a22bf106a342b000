// Arguments of the kernels for block reflectors I - V T Vᵀ, shared with the host. V, unit lower trapezoidal, lies below
// the diagonal of a row-major matrix, as LAPACK's geqrf leaves it.
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

// The block reflectors with up to `width` columns each whose corners are (first, first), (first + width, first + width)
// … of each rows x columns matrix, `count` columns of reflectors in all; and the columns [target_first, target_end) of
// the target, a rows x target_columns matrix. Rows are split into parts of part_rows, columns into `tiles`. Products,
// of product_columns columns, have `skip` of them before target_first: V's own, where the target is the matrix with V.
struct ReflectorsParams {
  uint32_t rows, columns;
  uint32_t first, width, blocks, count;
  uint32_t target_columns, target_first, target_end;
  uint32_t product_columns, skip;
  uint32_t slabs;  // that products are summed over
  uint32_t tiles, parts, part_rows;
  uint32_t transpose;
};

// T of such blocks from the first columns of Vᵀ V's product_columns; tau has `count` numbers a matrix. T of one block
// for all matrices lie together.
struct ReflectorsFactorParams {
  uint32_t matrices;
  uint32_t first, width, blocks, count;
  uint32_t slabs, product_columns;
};
