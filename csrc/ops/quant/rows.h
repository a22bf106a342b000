// What kernels over packed weights share on the host: rows of any format as numbers, and the shapes of products.
#pragma once

#include "../common/common.h"

#include <functional>
#include <string>

namespace metalcore {

// Packed rows and the kernel that makes numbers of them.
struct RowsReader {
  std::string kernel;
  std::string format;  // as plans name it
  Tensor packed;
  int64_t rows, length;                           // length: the numbers in a row
  uint64_t row_bytes;                             // how far the next row is, in what the kernel counts
  std::function<uint32_t(gpu::Recording&)> bind;  // binds the weights, and returns the first index behind them
  std::function<double(int64_t)> bytes;           // of so many rows
};

// Checks the indices and the dtype that an operator was given.
void check_rows(const char* op, const MaybeTensor& rows, ScalarType dtype, const Tensor& packed);

// Rows as numbers: all of them, or those of the indices.
Tensor rows_as_numbers(const char* op, const RowsReader& reader, const MaybeTensor& rows, ScalarType dtype);

// Checks x of a product with `rows` rows of `length` weights. Returns its rows.
int64_t check_x(const char* op, const Tensor& x, const Tensor& packed, int64_t rows, int64_t length, bool transposed);

// Experts of a product: x has a row for each token, or one for each token and expert.
struct ChosenExperts {
  Tensor experts;  // contiguous
  int64_t tokens, each;
  int64_t shared;  // results that share a row of x

  int64_t results() const { return tokens * each; }
};
ChosenExperts check_experts(const char* op, const Tensor& x, const Tensor& experts);

// A tensor with the sizes of x and another last one.
Tensor result_like(const Tensor& x, int64_t last);

// x times weights as numbers, by PyTorch's matmul. `numbers` makes them after the plan was noted.
Tensor multiply_numbers(const char* op, const Tensor& x, int64_t x_rows, bool transposed,
                        const std::function<Tensor()>& numbers);

}  // namespace metalcore
