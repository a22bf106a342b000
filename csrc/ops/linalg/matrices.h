// Batches of matrices: how a tensor of any strides is given to a kernel, and PyTorch's own ops for what we leave to it.
#pragma once

#include "../common.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace metalcore {

// The last two dimensions of a shape, and how many matrices the others make.
struct MatrixShape {
  int64_t rows, columns, batch;
};
// `sizes` must be at least two.
MatrixShape matrix_shape(Sizes sizes);
MatrixShape matrix_shape(const std::vector<int64_t>& sizes);
// The shape of an op's argument A, which must be matrices, or square ones, and as a tensor float32. Errors in PyTorch's
// words.
MatrixShape check_matrices(const char* op, const std::vector<int64_t>& sizes);
MatrixShape check_matrices(const char* op, const Tensor& a);
MatrixShape check_square(const char* op, const std::vector<int64_t>& sizes);
MatrixShape check_square(const char* op, const Tensor& a);
inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// A batch whose matrices are one distance apart. Strides are in elements.
struct Matrices : MatrixShape {
  Tensor tensor;  // the one that was given, or a contiguous copy where its batch has no single stride
  int64_t batch_stride, row_stride, column_stride;
};
Matrices matrices(const Tensor& tensor);

// The batches of two shapes of matrices, broadcast; with PyTorch's error where they do not fit.
std::vector<int64_t> broadcast_batches(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

// The sizes of `like`'s batch, and then those given: of a result with a matrix, a vector or a number for each matrix.
std::vector<int64_t> batch_sizes(const Tensor& like, std::initializer_list<int64_t> and_then);

// "20x30", for the reasons that plans give.
inline std::string times(int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); }

// The first of 8, 16, 32 … that is not below n: kernels exist for these.
uint32_t power_from_8(int64_t n);

inline Tensor transposed(const Tensor& tensor) { return torch::stable::transpose(tensor, -2, -1); }

// PyTorch's own op of this name: call_torch<2>("aten::linalg_qr", "", a, std::string("reduced")) for one with two
// results, each of them a tensor. Arguments have to have the schema's types: bool, int64_t, double, std::string,
// Tensor.
template <size_t RESULTS, typename... Arguments>
std::array<Tensor, RESULTS> call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, (sizeof...(Arguments) > RESULTS ? sizeof...(Arguments) : RESULTS)> stack{
      torch::stable::detail::from(arguments)...};
  check(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS,
        "metalcore: ", name, " failed");
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, RESULTS>{torch::stable::detail::to<Tensor>(stack[I])...};
  }(std::make_index_sequence<RESULTS>());
}

}  // namespace metalcore
