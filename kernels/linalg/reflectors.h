// Arguments of the kernels for block reflectors I - V T Vᵀ, shared with the host. V is unit lower trapezoidal and lies
// below the diagonal of a row-major matrix, as LAPACK's geqrf leaves it.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The most columns of V in a block reflector: of one QR panel, and of several.
#define REFLECTORS_NARROW 16
#define REFLECTORS_WIDE 64

#define REFLECTORS_THREADS 256
#define REFLECTORS_COLUMNS 64  // columns of the target that a threadgroup takes
#define REFLECTORS_ROWS 64     // slabs and spans have a multiple of this many rows

// Block reflectors with up to `width` columns, whose corners are (first, first), (first + width, first + width) … of
// each rows x columns matrix; all together have `count` columns. They are applied to the columns [target_first,
// target_end) of the target, a rows x target_columns matrix. Rows are split into parts of part_rows, columns into
// `tiles`. Products have product_columns columns, of which `skip` precede target_first: V's own columns, if the target
// is the matrix with V.
struct ReflectorsParams {
  uint32_t rows, columns;
  uint32_t first, width, blocks, count;
  uint32_t target_columns, target_first, target_end;
  uint32_t product_columns, skip;
  uint32_t slabs;  // slabs over which products are summed
  uint32_t tiles, parts, part_rows;
  uint32_t transpose;
};

// T of such blocks, from the first columns of Vᵀ V's product_columns. tau has `count` numbers per matrix. The T of one
// block for all matrices are contiguous.
struct ReflectorsFactorParams {
  uint32_t matrices;
  uint32_t first, width, blocks, count;
  uint32_t slabs, product_columns;
};
