// softmax and log_softmax along any dimension.
#include "activation.h"

#include "../../../kernels/activation/activation.h"
#include "../common/replacement.h"
#include "../common/rows.h"

namespace metalcore {
namespace {

struct Shape {
  int64_t rows;    // a row has all elements along `dim`
  int64_t length;  // elements of a row
  int64_t inner;   // distance of a row's elements in a contiguous tensor
};

Shape shape_along(Sizes sizes, int64_t dim) {
  Shape shape{1, sizes.empty() ? 1 : sizes[dim], 1};
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (static_cast<int64_t>(d) != dim) shape.rows *= sizes[d];
    if (static_cast<int64_t>(d) > dim) shape.inner *= sizes[d];
  }
  return shape;
}

// `dim` from the first dimension on, or -1 where a tensor of so many dimensions has none. A scalar counts as one row.
int64_t place_of(int64_t dim, int64_t dims) {
  const int64_t range = dims ? dims : 1;
  return dim < -range || dim >= range ? -1 : dim < 0 ? dim + range : dim;
}

int64_t require_place(const char* op, int64_t dim, int64_t dims) {
  const int64_t place = place_of(dim, dims), range = dims ? dims : 1;
  check(place >= 0, "metalcore::", op, ": dim must be in [", -range, ", ", range - 1, "], not ", dim);
  return place;
}

constexpr RowKernels kBackward = {true, "block4", 16, 512, true};  // two arrays in registers

// With few rows, a thread per row leaves most of a GPU idle. A copy with contiguous rows is faster.
bool copy_is_faster(const Shape& shape) { return shape.inner > 1 && shape.rows < 4096 && shape.length > 256; }

gpu::Recording& kernel(gpu::Recording& recording, const char* op, const RowPlan& plan, ScalarType in, ScalarType out) {
  return recording.kernel(op, "_", plan.variant, "_", suffix(in), in == out ? "" : "_to_float");
}
// This kernel is the first of two dispatches where several threadgroups share a row. Both ops need the same: the
// maximum and the sum of each part of a row.
gpu::Recording& split_sum_kernel(gpu::Recording& recording, ScalarType in, ScalarType out) {
  return recording.kernel("softmax_split_sum_", suffix(in), in == out ? "" : "_to_float");
}
gpu::Recording& split_total_kernel(gpu::Recording& recording, const char* op, ScalarType out) {
  return recording.kernel(op, "_split_total_", suffix(out));
}

Tensor beginning_at_16(const Tensor& tensor) { return start_of(tensor) ? torch::stable::clone(tensor) : tensor; }

// Fills y, a contiguous tensor with the shape of `input`. `dim` is not negative.
void forward_into(const char* op, const Tensor& y, const Tensor& input, int64_t dim, double scale, bool copied) {
  const ScalarType in = input.scalar_type(), out = y.scalar_type();
  const Shape shape = shape_along(input.sizes(), dim);
  if (shape.rows == 0 || shape.length == 0) return;
  const Rows x =
      shape.inner == 1 ? rows_of(input, shape.length) : contiguous_rows_of(input, shape.length * shape.inner);
  const int64_t row = shape.inner == 1 ? shape.length : shape.inner;  // the length along which kernels load vectors
  const RowKernels& kernels = one_array(shape.length);
  const RowPlan plan = plan_rows(shape.rows, shape.length, shape.inner, input, kernels);
  gpu::note_plan(op, plan.variant, [&] {
    return (copied ? "a copy with contiguous rows is made first; " : "") +
           why_rows(plan, shape.length, shape.inner, input, kernels);
  });
  const auto parts = new_parts(plan, shape.rows, 2, y);
  const uint32_t start = start_of(x.tensor);
  const SoftmaxParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .inner = grid_side(shape.inner),
      .aligned = aligned16(x.tensor, shape.inner == 1 ? x.stride : row, row) && aligned16(y, row, row),
      .start = start,
      .together = start == start_of(y) && (x.stride - shape.length) * x.tensor.element_size() % 16 == 0,
      .splits = plan.splits,
      .share = plan.share,
      .scale = static_cast<float>(scale),
      .x_stride = x.stride,
  };
  gpu::record(y, [&](gpu::Recording& recording) {
    if (parts) {
      split_sum_kernel(recording, in, out).buffer(0, x.tensor).buffer(1, *parts).bytes(2, params);
      dispatch(recording, plan);
      kernel(recording, op, plan, in, out).buffer(0, x.tensor).buffer(1, y).bytes(2, params).buffer(3, *parts);
      dispatch(recording, plan);
      return;
    }
    kernel(recording, op, plan, in, out).buffer(0, x.tensor).buffer(1, y).bytes(2, params);
    dispatch(recording, plan);
  });
}

Tensor forward(const char* op, const Tensor& input, int64_t dim, bool half_to_float, double scale = 1,
               bool copied = false) {
  check_float(op, "x", input);
  dim = require_place(op, dim, input.dim());
  if (copy_is_faster(shape_along(input.sizes(), dim)))
    return as_contiguous(torch::stable::transpose(
        forward(op, torch::stable::transpose(input, dim, -1), -1, half_to_float, scale, true), dim, -1));
  Tensor y = new_tensor(input.sizes(), half_to_float ? ScalarType::Float : input.scalar_type(), input);
  forward_into(op, y, input, dim, scale, copied);
  return y;
}

Tensor backward(const char* op, const Tensor& grad, const Tensor& output, int64_t dim, ScalarType in) {
  const ScalarType out = output.scalar_type();
  check_float(op, "output", output);
  check_same_device(op, "grad", grad, output);
  check_same_dtype(op, "grad", grad, output);
  check_same_shape(op, "grad", grad, output);
  check(in == out || (out == ScalarType::Float && (in == ScalarType::Half || in == ScalarType::BFloat16)),
        "metalcore::", op, ": input_dtype ", dtype_name(in), " does not go with output's ", dtype_name(out));
  dim = require_place(op, dim, output.dim());
  const Shape shape = shape_along(output.sizes(), dim);
  if (copy_is_faster(shape))
    return as_contiguous(torch::stable::transpose(
        backward(op, torch::stable::transpose(grad, dim, -1), torch::stable::transpose(output, dim, -1), -1, in), dim,
        -1));

  Tensor gx = new_tensor(output.sizes(), in, output);
  if (shape.rows == 0 || shape.length == 0) return gx;
  const Tensor g = beginning_at_16(as_contiguous(grad)), y = beginning_at_16(as_contiguous(output));
  const int64_t row = shape.inner == 1 ? shape.length : shape.inner;  // the length along which kernels load vectors
  const RowPlan plan = plan_rows(shape.rows, shape.length, shape.inner, output, kBackward);
  gpu::note_plan(op, plan.variant, [&] { return why_rows(plan, shape.length, shape.inner, output, kBackward); });
  const auto parts = new_parts(plan, shape.rows, 1, gx);
  const SoftmaxParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .inner = grid_side(shape.inner),
      .aligned = aligned16(g, row, row) && aligned16(y, row, row) && aligned16(gx, row, row),
      .splits = plan.splits,
      .share = plan.share,
      .x_stride = shape.length,
  };
  gpu::record(gx, [&](gpu::Recording& recording) {
    if (parts) {
      split_total_kernel(recording, op, out).buffer(0, g).buffer(1, y).buffer(2, *parts).bytes(3, params);
      dispatch(recording, plan);
      kernel(recording, op, plan, in, out).buffer(0, g).buffer(1, y).buffer(2, gx).bytes(3, params);
      recording.buffer(4, *parts);
      dispatch(recording, plan);
      return;
    }
    kernel(recording, op, plan, in, out).buffer(0, g).buffer(1, y).buffer(2, gx).bytes(3, params);
    dispatch(recording, plan);
  });
  return gx;
}

Tensor softmax(const Tensor& x, int64_t dim, bool half_to_float) { return forward("softmax", x, dim, half_to_float); }
Tensor softmax_scaled(const Tensor& x, int64_t dim, bool half_to_float, double scale) {
  check(scale > 0, "metalcore::softmax_scaled: scale must be positive, not ", scale);
  return forward("softmax", x, dim, half_to_float, scale);
}
Tensor log_softmax(const Tensor& x, int64_t dim, bool half_to_float) {
  return forward("log_softmax", x, dim, half_to_float);
}
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, ScalarType input_dtype) {
  return backward("softmax_backward", grad, output, dim, input_dtype);
}
Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, ScalarType input_dtype) {
  return backward("log_softmax_backward", grad, output, dim, input_dtype);
}

// In the place of PyTorch's kernels. They take rows that kernels can count.

bool takes_rows(const Tensor& x, int64_t dim) {
  const int64_t place = place_of(dim, x.dim());
  if (place < 0) return false;
  const Shape shape = shape_along(x.sizes(), place);
  return shape.length <= INT32_MAX && shape.rows <= UINT32_MAX;
}
bool takes(const Tensor& x, int64_t dim, bool) { return is_float(x) && takes_rows(x, dim); }
bool takes_backward(const Tensor& grad, const Tensor& output, int64_t dim, ScalarType input_dtype) {
  const ScalarType out = output.scalar_type();
  const bool narrowed =
      out == ScalarType::Float && (input_dtype == ScalarType::Half || input_dtype == ScalarType::BFloat16);
  return are_alike(grad, output) && takes_rows(output, dim) && (input_dtype == out || narrowed);
}

Replacement<&takes, &softmax> softmax_replacement("_softmax", "softmax");
Replacement<&takes, &log_softmax> log_softmax_replacement("_log_softmax", "log_softmax");
Replacement<&takes_backward, &softmax_backward> softmax_backward_replacement("_softmax_backward_data",
                                                                             "softmax_backward");
Replacement<&takes_backward, &log_softmax_backward> log_softmax_backward_replacement("_log_softmax_backward_data",
                                                                                     "log_softmax_backward");

}  // namespace

void softmax_into(const Tensor& y, const Tensor& x, double scale) {
  forward_into("softmax", y, x, x.dim() - 1, scale, false);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("softmax(Tensor x, int dim, bool half_to_float) -> Tensor");
  m.def("softmax_scaled(Tensor x, int dim, bool half_to_float, float scale) -> Tensor");
  m.def("log_softmax(Tensor x, int dim, bool half_to_float) -> Tensor");
  m.def("softmax_backward(Tensor grad, Tensor output, int dim, ScalarType input_dtype) -> Tensor");
  m.def("log_softmax_backward(Tensor grad, Tensor output, int dim, ScalarType input_dtype) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::softmax>("softmax");
  m.impl<&metalcore::softmax_scaled>("softmax_scaled");
  m.impl<&metalcore::log_softmax>("log_softmax");
  m.impl<&metalcore::softmax_backward>("softmax_backward");
  m.impl<&metalcore::log_softmax_backward>("log_softmax_backward");
}
