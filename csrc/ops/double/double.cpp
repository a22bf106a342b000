// double_function, double_sum and double_matmul: numbers as pairs of floats, which are the last dimension of a tensor.
#include "../../../kernels/double/double.h"

#include "../../gpu/cost.h"
#include "../common/common.h"

#include <algorithm>
#include <string>
#include <vector>

namespace metalcore {
namespace {

constexpr const char* kOfOne[] = {"sqrt", "exp", "log", "sin", "cos", "tanh"};
constexpr const char* kOfTwo[] = {"add", "mul", "div"};
constexpr double kFunctionFlops = 300.0, kProductFlops = 12.0;  // about, for the bound of a dispatch's work

void check_pairs(const char* op, const char* argument, const Tensor& tensor) {
  check_float32(op, argument, tensor);
  check(tensor.dim() >= 1 && tensor.size(-1) == 2, "metalcore::", op, ": ", argument,
        " must have pairs in its last dimension, but its shape is ", shape_text(tensor));
}
void check_alike(const char* op, const Tensor& y, const Tensor& x) {
  check_pairs(op, "y", y);
  check_same_device(op, "y", y, x);
  check_same_shape(op, "y", y, x);
}

// Kernels read a pair at once, as a float2.
Tensor contiguous_pairs(const Tensor& tensor) {
  const Tensor pairs = as_contiguous(tensor);
  return gpu::view_of(pairs).offset % 8 == 0 ? pairs : torch::stable::clone(pairs);
}

Tensor double_function(const Tensor& x_, const MaybeTensor& y_, const std::string& name) {
  const char* const op = "double_function";
  check_pairs(op, "x", x_);
  if (y_) check_alike(op, *y_, x_);
  const bool known = y_ ? std::find(std::begin(kOfTwo), std::end(kOfTwo), name) != std::end(kOfTwo)
                        : std::find(std::begin(kOfOne), std::end(kOfOne), name) != std::end(kOfOne);
  check(known, "metalcore::", op, ": there is no function '", name, "' of ", y_ ? "two arguments" : "one argument");
  const Tensor result = new_like(x_);
  const int64_t count = result.numel() / 2;
  if (count == 0) return result;
  const Tensor x = contiguous_pairs(x_), y = y_ ? contiguous_pairs(*y_) : x;
  gpu::note_plan(op, name.c_str(), [&] { return std::to_string(count) + " pairs, one a thread"; });
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel("double_", name).buffer(0, x);
    if (y_) recording.buffer(1, y);
    recording.buffer(y_ ? 2 : 1, result).work(kFunctionFlops * count, 24.0 * count);
    recording.dispatch_threads({grid_side(count)}, {DOUBLE_THREADS});
  });
  return result;
}

// The terms of a row that a threadgroup takes. Where a row has more, a second dispatch adds the parts of a row.
constexpr int64_t kShare = 32 * DOUBLE_THREADS;

Tensor double_sum(const Tensor& x_, const MaybeTensor& y_) {
  const char* const op = "double_sum";
  check_pairs(op, "x", x_);
  check(x_.dim() >= 2, "metalcore::", op, ": x must have a dimension to sum over before that of its pairs");
  if (y_) check_alike(op, *y_, x_);
  std::vector<int64_t> sizes(x_.sizes().begin(), x_.sizes().end());
  sizes.erase(sizes.end() - 2);
  const Tensor result = new_tensor(sizes, ScalarType::Float, x_);
  const int64_t rows = result.numel() / 2, length = x_.size(-2), parts = std::max<int64_t>(1, ceil_div(length, kShare));
  if (rows == 0) return result;
  const Tensor x = contiguous_pairs(x_), y = y_ ? contiguous_pairs(*y_) : x;
  gpu::note_plan(op, parts == 1 ? "one" : "parts", [&] {
    return std::to_string(rows) + " rows of " + std::to_string(length) +
           " pairs, threadgroups a row: " + std::to_string(parts);
  });
  const Tensor sums = parts == 1 ? result : new_tensor({rows * parts * 2}, ScalarType::Float, x_);
  gpu::record(result, [&](gpu::Recording& recording) {
    const auto record = [&](const char* kernel, const Tensor& from, const Tensor& other, const Tensor& to,
                            int64_t terms, int64_t threadgroups) {
      const DoubleSumParams p{
          .length = terms, .share = threadgroups == 1 ? terms : kShare, .parts = grid_side(threadgroups)};
      recording.kernel(kernel).buffer(0, from).buffer(1, other).buffer(2, to).bytes(3, p);
      recording.work(kProductFlops * rows * terms, 16.0 * rows * terms);
      recording.dispatch_threadgroups({grid_side(rows * threadgroups)}, {DOUBLE_THREADS});
    };
    record(y_ ? "double_dot" : "double_sum", x, y, sums, length, parts);
    if (parts > 1) record("double_sum", sums, sums, result, parts, 1);
  });
  return result;
}

// A tensor of shape (batch, rows, columns, 2), whose pairs are contiguous.
Tensor as_matrices(const Tensor& tensor) {
  const bool pairs = tensor.stride(-1) == 1 && tensor.stride(0) % 2 == 0 && tensor.stride(1) % 2 == 0 &&
                     tensor.stride(2) % 2 == 0 && gpu::view_of(tensor).offset % 8 == 0;
  return pairs ? tensor : torch::stable::clone(as_contiguous(tensor));
}

Tensor double_matmul(const Tensor& a_, const Tensor& b_) {
  const char* const op = "double_matmul";
  check_pairs(op, "a", a_);
  check_pairs(op, "b", b_);
  check_same_device(op, "b", b_, a_);
  check(a_.dim() == 4 && b_.dim() == 4, "metalcore::", op, ": a and b must have 4 dimensions, not ", a_.dim(), " and ",
        b_.dim());
  const int64_t batch = a_.size(0), rows = a_.size(1), terms = a_.size(2), columns = b_.size(2);
  check(b_.size(0) == batch, "metalcore::", op, ": a has ", batch, " matrices, and b has ", b_.size(0));
  check(b_.size(1) == terms, "metalcore::", op, ": a has ", terms, " columns, and b has ", b_.size(1), " rows");
  const Tensor result = new_tensor({{batch, rows, columns, 2}}, ScalarType::Float, a_);
  if (result.numel() == 0) return result;
  const Tensor a = as_matrices(a_), b = as_matrices(b_);
  const DoubleMatmulParams p{.a_batch = a.stride(0) / 2,
                             .a_row = a.stride(1) / 2,
                             .a_column = a.stride(2) / 2,
                             .b_batch = b.stride(0) / 2,
                             .b_row = b.stride(1) / 2,
                             .b_column = b.stride(2) / 2,
                             .rows = grid_side(rows),
                             .columns = grid_side(columns),
                             .terms = grid_side(terms),
                             .down = grid_side(ceil_div<int64_t>(rows, DOUBLE_TILE)),
                             .across = grid_side(ceil_div<int64_t>(columns, DOUBLE_TILE))};
  const int64_t tiles = batch * p.down * p.across;
  gpu::note_plan(op, "tiles", [&] {
    return std::to_string(tiles) + " tiles of " + std::to_string(DOUBLE_TILE) + "x" + std::to_string(DOUBLE_TILE) +
           " pairs, with sums and their errors in registers";
  });
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel("double_matmul").buffer(0, a).buffer(1, b).buffer(2, result).bytes(3, p);
    recording.work(kProductFlops * batch * rows * columns * terms, 16.0 * tiles * DOUBLE_TILE * terms);
    recording.dispatch_threadgroups({grid_side(tiles)}, {DOUBLE_MATMUL_THREADS});
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("double_function(Tensor x, Tensor? y, str name) -> Tensor");
  m.def("double_sum(Tensor x, Tensor? y) -> Tensor");
  m.def("double_matmul(Tensor a, Tensor b) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::double_function>("double_function");
  m.impl<&metalcore::double_sum>("double_sum");
  m.impl<&metalcore::double_matmul>("double_matmul");
}
