// info_any(info) returns a number that is not 0 if an info of the batch is not 0, which means that a matrix failed. The
// functions that raise errors wait for it. It takes one launch, or two for more than INFO_BLOCK matrices.
#include "matrices.h"

#include "../../../kernels/linalg/steps.h"
#include "../common/rows.h"

#include <algorithm>
#include <optional>
#include <vector>

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

void check_number(const char* op, const char* argument, const Tensor& tensor) {
  if (!is_complex(tensor)) check_float32(op, argument, tensor);
}

MatrixShape check_matrices_of_numbers(const char* op, const Tensor& a) {
  check_number(op, "A", a);
  return check_matrices(op, sizes_of(a));
}

MatrixShape check_square_of_numbers(const char* op, const Tensor& a) {
  check_number(op, "A", a);
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

namespace {

ScaleParams params_of(int64_t rows, int64_t columns, int64_t batch) {
  constexpr int64_t kElements = 16384, kParts = 1024;  // enough for a threadgroup; each one reads all parts' results
  const int64_t part_rows = std::max(ceil_div(kElements, columns), ceil_div(rows, kParts));
  return {.batch_stride = 0,
          .row_stride = 0,
          .column_stride = 0,
          .matrices = grid_side(batch),
          .rows = grid_side(rows),
          .columns = grid_side(columns),
          .parts = grid_side(ceil_div(rows, part_rows)),
          .part_rows = grid_side(part_rows)};
}

}  // namespace

Scaled scaled(const Tensor& input) {
  const Tensor scales = new_tensor(batch_sizes(input, {1, 1}), ScalarType::Float, input);
  const Tensor result = new_like(input);
  if (input.numel() == 0) {
    Tensor ones = scales;
    torch::stable::fill_(ones, 1.0);
    return {result, scales};
  }
  const Matrices a = matrices(input);
  ScaleParams p = params_of(a.rows, a.columns, a.batch);
  p.batch_stride = a.batch_stride, p.row_stride = a.row_stride, p.column_stride = a.column_stride;
  const Tensor magnitudes = new_tensor({a.batch, p.parts}, ScalarType::Int, input);
  const gpu::Size groups{grid_side(a.batch * p.parts)}, threads{SCALE_THREADS};
  gpu::record(input, [&](gpu::Recording& recording) {
    recording.kernel(std::string("scale_magnitudes") + complex_suffix(input))
        .buffer(0, a.tensor)
        .buffer(1, magnitudes)
        .bytes(2, p);
    recording.dispatch_threadgroups(groups, threads);
    recording.kernel(std::string("scale_matrices") + complex_suffix(input))
        .buffer(0, a.tensor)
        .buffer(1, magnitudes)
        .buffer(2, result)
        .buffer(3, scales);
    recording.bytes(4, p).dispatch_threadgroups(groups, threads);
  });
  return {result, scales};
}

namespace {

Tensor info_any(const Tensor& info) {
  check(info.scalar_type() == ScalarType::Int, "metalcore::info_any: info must be int32, not ",
        dtype_name(info.scalar_type()));
  Tensor infos = as_contiguous(info);
  const uint32_t threads = std::min<uint32_t>(INFO_THREADS, row_tuning(info).looped_threads);
  do {
    const int64_t count = infos.numel(), blocks = std::max<int64_t>(1, ceil_div<int64_t>(count, INFO_BLOCK));
    const std::vector<int64_t> sizes(blocks > 1 ? 1 : 0, blocks);
    const Tensor fewer = new_tensor(sizes, ScalarType::Int, info);
    gpu::record(info, [&](gpu::Recording& recording) {
      recording.kernel("info_any").buffer(0, infos).buffer(1, fewer).bytes(2, grid_side(count));
      recording.dispatch_threadgroups({grid_side(blocks)}, {threads});
    });
    infos = fewer;
  } while (infos.numel() > 1);
  return infos;
}

}  // namespace

Tensor in_shape(const Tensor& contiguous, Sizes sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(contiguous.get(), &offset));
  AtenTensorHandle shaped = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(contiguous.get(), static_cast<int64_t>(sizes.size()),
                                                        sizes.data(), strides.data(), offset, &shaped));
  return Tensor(shaped);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("info_any(Tensor info) -> Tensor"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::info_any>("info_any"); }
