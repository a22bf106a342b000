#include "matrices.h"

#include <algorithm>
#include <optional>

namespace metalcore {

namespace {

// The stride from one matrix to the next, if all matrices have the same.
std::optional<int64_t> batch_stride(const Tensor& a) {
  std::optional<int64_t> inner, span;  // the innermost batch stride, and the stride that the next dimension must have
  for (int64_t d = a.dim() - 3; d >= 0; --d) {
    if (a.size(d) == 1) continue;
    if (span && a.stride(d) != *span) return std::nullopt;
    if (!inner) inner = a.stride(d);
    span = a.stride(d) * a.size(d);
  }
  return inner.value_or(0);
}

template <typename Sequence>
MatrixShape shape_of(const Sequence& sizes) {
  MatrixShape shape{sizes[sizes.size() - 2], sizes[sizes.size() - 1], 1};
  for (size_t i = 0; i + 2 < sizes.size(); ++i) shape.batch *= sizes[i];
  return shape;
}

}  // namespace

MatrixShape matrix_shape(Sizes sizes) { return shape_of(sizes); }
MatrixShape matrix_shape(const std::vector<int64_t>& sizes) { return shape_of(sizes); }

MatrixShape check_matrices(const char* op, const std::vector<int64_t>& sizes) {
  check(sizes.size() >= 2, "linalg.", op, ": The input tensor A must have at least 2 dimensions.");
  return matrix_shape(sizes);
}

MatrixShape check_matrices(const char* op, const Tensor& a) {
  check_float32(op, "A", a);
  return check_matrices(op, sizes_of(a));
}

MatrixShape check_square(const char* op, const Tensor& a) {
  check_float32(op, "A", a);
  return check_square(op, sizes_of(a));
}

MatrixShape check_square(const char* op, const std::vector<int64_t>& sizes) {
  const MatrixShape shape = check_matrices(op, sizes);
  check(shape.rows == shape.columns, "linalg.", op, ": A must be batches of square matrices, but they are ", shape.rows,
        " by ", shape.columns, " matrices");
  return shape;
}

uint32_t power_from_8(int64_t n) {
  uint32_t power = 8;
  while (power < n) power *= 2;
  return power;
}

Matrices matrices(const Tensor& tensor) {
  const std::optional<int64_t> stride = batch_stride(tensor);
  const Tensor strided = stride ? tensor : torch::stable::contiguous(tensor);
  const MatrixShape shape = matrix_shape(strided.sizes());
  return {shape, strided, stride ? *stride : shape.rows * shape.columns, strided.stride(-2), strided.stride(-1)};
}

std::vector<int64_t> broadcast_batches(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const size_t dims = std::max(a.size(), b.size());
  std::vector<int64_t> batch(dims - 2);
  for (size_t back = 3; back <= dims; ++back) {
    const int64_t i = back <= a.size() ? a[a.size() - back] : 1, j = back <= b.size() ? b[b.size() - back] : 1;
    check(i == j || i == 1 || j == 1, "The size of tensor a (", i, ") must match the size of tensor b (", j,
          ") at non-singleton dimension ", dims - back);
    batch[dims - back] = i == 1 ? j : i;
  }
  return batch;
}

std::vector<int64_t> batch_sizes(const Tensor& like, std::initializer_list<int64_t> and_then) {
  const auto sizes = like.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end() - 2);
  result.insert(result.end(), and_then);
  return result;
}

}  // namespace metalcore
