// The types of packed weights that kernels take, by their numbers in GGML.
#pragma once

#include "../common/common.h"

namespace metalcore {

struct QuantFormat {
  int64_t number;
  const char* name;      // as in the kernels' names
  int64_t block, bytes;  // weights of a block, and its bytes
};

// Throws std::runtime_error for types without kernels.
const QuantFormat& quant_format(const char* op, int64_t type);

// Rows of packed weights: uint8 (*, rows, bytes of a row).
struct PackedRows {
  Tensor tensor;                              // contiguous from a multiple of 16 bytes on, in whole words
  int64_t matrices, rows, row_bytes, length;  // length: the numbers in a row
};
PackedRows packed_rows(const char* op, const Tensor& packed, const QuantFormat& format, int64_t dims);

// The tensor, contiguous and from a multiple of 16 bytes on.
Tensor from_multiple_of_16(const Tensor& tensor);

// Rows of packed weights as numbers: all of them, or those of the indices.
Tensor quant_rows(const Tensor& packed, const MaybeTensor& rows, int64_t type, ScalarType dtype);

// A dtype's number in the kernels' parameters.
uint32_t quant_dtype(ScalarType dtype);

}  // namespace metalcore
