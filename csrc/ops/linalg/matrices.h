// Batches of matrices: how a kernel gets a tensor of any strides, and what several ops do with matrices.
#pragma once

#include "../../../kernels/linalg/steps.h"
#include "../common/common.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace metalcore {

// The last two dimensions of a shape, and the number of matrices: the product of the other dimensions.
struct MatrixShape {
  int64_t rows, columns, batch;
};
// `sizes` must have at least two entries.
MatrixShape matrix_shape(Sizes sizes);
MatrixShape matrix_shape(const std::vector<int64_t>& sizes);
// These check an op's argument A and return its shape. A must consist of matrices, or of square matrices, and a tensor
// must be float32. The messages are PyTorch's.
MatrixShape check_matrices(const char* op, const std::vector<int64_t>& sizes);
MatrixShape check_matrices(const char* op, const Tensor& a);
MatrixShape check_square(const char* op, const std::vector<int64_t>& sizes);
MatrixShape check_square(const char* op, const Tensor& a);
// These take tensors of numbers: float32 or complex64.
void check_number(const char* op, const char* argument, const Tensor& tensor);
MatrixShape check_matrices_of_numbers(const char* op, const Tensor& a);
MatrixShape check_square_of_numbers(const char* op, const Tensor& a);
inline bool is_complex(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::ComplexFloat; }
// "_complex" in the names of kernels for complex numbers.
inline const char* complex_suffix(const Tensor& tensor) { return is_complex(tensor) ? "_complex" : ""; }
inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// A batch in which one stride leads from each matrix to the next. Strides are in elements.
struct Matrices : MatrixShape {
  Tensor tensor;  // the given tensor, or a contiguous copy where its batch has no single stride
  int64_t batch_stride, row_stride, column_stride;
};
Matrices matrices(const Tensor& tensor);

// A kernel for each matrix of a batch, chosen by the matrices' size. There is no kernel where `threads` is 0.
struct KernelPlan {
  const char* variant;
  std::string why, kernel;
  uint32_t matrices_per_threadgroup, threads;
};

// Broadcasts the batches of two shapes of matrices. It raises PyTorch's error where they do not fit.
std::vector<int64_t> broadcast_batches(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

// The sizes of `like`'s batch followed by `and_then`, for a result with a matrix, a vector or a number per matrix.
std::vector<int64_t> batch_sizes(const Tensor& like, std::initializer_list<int64_t> and_then);

// "20x30", for the reasons that plans give.
inline std::string times(int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); }

// The first of 8, 16, 32 … that is at least n. Kernels exist for these sizes.
uint32_t power_from_8(int64_t n);

inline Tensor transposed(const Tensor& tensor) { return torch::stable::transpose(tensor, -2, -1); }

// A, row-major, with each matrix times a power of two that brings its largest entry to about one, and these powers,
// (*, 1, 1). A matrix with NaN or infinities gets some power of two.
struct Scaled {
  Tensor a, scales;
};
Scaled scaled(const Tensor& a);

// Records a symmetric rank-k update of `batch` matrices, one dispatch of kernels/linalg/syrk.metal, and sets p.tiles.
void record_syrk(gpu::Recording& recording, const gpu::BufferView& a, const gpu::BufferView& c,
                 const gpu::BufferView& result, SyrkParams p, uint32_t batch);

// The operator metalcore::cholesky_ex returns (L, info). It reads one triangle.
std::tuple<Tensor, Tensor> cholesky_ex(const Tensor& input, bool upper);

// The operator metalcore::solve_triangular returns X with A X = B (left) or X A = B, for float32 matrices. It reads
// only the named triangle of A, and not its diagonal where `unitriangular`. Batches broadcast, and X is row-major.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular);

// The numbers of a contiguous tensor in another shape. aten::view fails within a dispatch mode of Python's.
Tensor in_shape(const Tensor& contiguous, Sizes sizes);

}  // namespace metalcore
