// layer_norm and add_layer_norm, over the last dimensions. The operators plain_… return no means and scales, which only
// derivatives need.
#include "../../../kernels/normalization/normalization.h"
#include "norms.h"

namespace metalcore {
namespace {

// A parameter of x's dtype with an element for each of a row, contiguous.
MaybeTensor checked_parameter(const char* op, const char* argument, const MaybeTensor& parameter, const Tensor& x,
                              int64_t length) {
  if (!parameter) return std::nullopt;
  check_same_device(op, argument, *parameter, x);
  check_same_dtype(op, argument, *parameter, x);
  check(parameter->numel() == length, "metalcore::", op, ": ", argument, " must have ", length, " elements, not ",
        parameter->numel());
  return as_contiguous(*parameter);
}

gpu::Recording& kernel(gpu::Recording& recording, const char* op, const RowPlan& plan, bool aligned, ScalarType dtype) {
  return recording.kernel(op, "_", plan.variant, aligned && !plan.threads ? "_aligned_" : "_", suffix(dtype));
}

struct Normalized {
  Tensor y, sum;              // sum: x + residual, or y if there is no residual
  MaybeTensor means, scales;  // of the rows, where a derivative will need them
};

Normalized normalize(const char* op, const Tensor& input, const MaybeTensor& residual, int64_t dims,
                     const MaybeTensor& weight_, const MaybeTensor& bias_, double eps, bool statistics) {
  check_float(op, "x", input);
  if (residual) check_like(op, "residual", *residual, input);
  const NormShape shape = norm_shape(op, input.sizes(), dims);
  const MaybeTensor weight = checked_parameter(op, "weight", weight_, input, shape.length);
  const MaybeTensor bias = checked_parameter(op, "bias", bias_, input, shape.length);
  const Tensor y = new_like(input), sum = residual ? new_like(input) : y;
  MaybeTensor means, scales;
  if (statistics) means = new_statistics(input, dims), scales = new_statistics(input, dims);
  if (shape.rows == 0 || shape.length == 0) {
    if (statistics) torch::stable::zero_(*means), torch::stable::zero_(*scales);
    return {y, sum, means, scales};
  }
  // Beside 32 float32 numbers of a row, as many of the weight and of the bias are more than 104 registers.
  const bool half_as_many = norm_tuning(input).few_registers && input.element_size() == 4;
  RowKernels kernels = half_as_many ? RowKernels{true, "block4", 16, 512, false} : one_array(shape.length);
  kernels.split = false;
  const RowPlan plan = plan_rows(shape.rows, shape.length, 1, input, kernels);
  gpu::note_plan(op, plan.variant, [&] { return why_rows(plan, shape.length, 1, input, kernels); });
  const NestedRows x = nested_rows_of(input, shape.length);
  const NestedRows added = residual ? nested_rows_of(*residual, shape.length) : x;
  const bool aligned = all_aligned16({&x, &added}, {&weight, &bias}, shape.length);
  const LayerNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .eps = static_cast<float>(eps),
      .has_weight = weight.has_value(),
      .has_bias = bias.has_value(),
      .has_residual = residual.has_value(),
      .statistics = statistics,
      .x = x.strides,
      .residual = added.strides,
  };
  gpu::record(y, [&](gpu::Recording& recording) {
    kernel(recording, "layer_norm", plan, aligned, y.scalar_type());
    recording.buffer(0, x.tensor).buffer(1, given_if(residual.has_value(), added.tensor)).buffer(2, weight);
    recording.buffer(3, bias).buffer(4, y).buffer(5, sum).buffer(6, means).buffer(7, scales);
    recording.bytes(8, params);
    dispatch(recording, plan);
  });
  return {y, sum, means, scales};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight,
                                              const MaybeTensor& bias, double eps) {
  const Normalized found = normalize("layer_norm", x, std::nullopt, dims, weight, bias, eps, true);
  return {found.y, *found.means, *found.scales};
}

namespace {

Tensor plain_layer_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return normalize("plain_layer_norm", x, std::nullopt, dims, weight, bias, eps, false).y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, int64_t dims,
                                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                                          double eps) {
  const Normalized found = normalize("add_layer_norm", x, residual, dims, weight, bias, eps, true);
  return {found.y, found.sum, *found.means, *found.scales};
}

std::tuple<Tensor, Tensor> plain_add_layer_norm(const Tensor& x, const Tensor& residual, int64_t dims,
                                                const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  const Normalized found = normalize("plain_add_layer_norm", x, residual, dims, weight, bias, eps, false);
  return {found.y, found.sum};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& means_,
                                                       const Tensor& scales_, const MaybeTensor& sum_grad, int64_t dims,
                                                       const MaybeTensor& weight_, bool parameters_wanted) {
  const char* op = "layer_norm_backward";
  check_float(op, "x", input);
  check_like(op, "grad", grad, input);
  if (sum_grad) check_like(op, "sum_grad", *sum_grad, input);
  const NormShape shape = norm_shape(op, input.sizes(), dims);
  for (const Tensor* statistic : {&means_, &scales_}) {
    check_same_device(op, "means and scales", *statistic, input);
    check_float32(op, "means and scales", *statistic);
    check(statistic->numel() == shape.rows || shape.length == 0, "metalcore::", op, ": means and scales must have ",
          shape.rows, " elements, not ", statistic->numel());
  }
  const MaybeTensor weight = checked_parameter(op, "weight", weight_, input, shape.length);
  const Tensor means = as_contiguous(means_), scales = as_contiguous(scales_);
  const int64_t length[1] = {parameters_wanted ? shape.length : 0};
  const Tensor gx = new_like(input);
  Tensor gw = new_tensor(Sizes(length, 1), input.scalar_type(), input);
  Tensor gb = new_tensor(Sizes(length, 1), input.scalar_type(), input);
  if (shape.rows == 0 || shape.length == 0) {
    torch::stable::zero_(gw);
    torch::stable::zero_(gb);
    return {gx, gw, gb};
  }
  const NormBackwardPlan plan = plan_norm_backward(shape, input, sum_grad.has_value());
  gpu::note_plan(op, plan.rows.variant, [&] { return why_rows(plan.rows, shape.length, 1, input, plan.kernels); });
  const NestedRows x = plan.rows_of(input, shape.length), g = plan.rows_of(grad, shape.length);
  const NestedRows added = sum_grad ? plan.rows_of(*sum_grad, shape.length) : g;
  const bool aligned = all_aligned16({&x, &g, &added}, {&weight}, shape.length);
  const int64_t sizes[2] = {parameters_wanted ? plan.chunks : 0, 2 * shape.length};
  const Tensor partial = new_tensor(Sizes(sizes, 2), ScalarType::Float, input);
  const LayerNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .inverse_length = 1.0f / static_cast<float>(shape.length),
      .has_weight = weight.has_value(),
      .has_residual = sum_grad.has_value(),
      .streams = grid_side(plan.chunks),
      .partial = parameters_wanted,
      .chunk_rows = grid_side(plan.chunk_rows),
      .aligned = aligned,
      .x = x.strides,
      .residual = added.strides,
      .grad = g.strides,
  };
  gpu::record(gx, [&](gpu::Recording& recording) {
    kernel(recording, op, plan.rows, aligned, gx.scalar_type());
    recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, means).buffer(3, scales);
    recording.buffer(4, weight).buffer(5, given_if(sum_grad.has_value(), added.tensor)).buffer(6, gx);
    recording.buffer(7, given_if(parameters_wanted, partial)).bytes(8, params);
    dispatch(recording, plan.rows);
    if (!parameters_wanted) return;
    if (plan.separate()) {
      recording.kernel("layer_norm_partial_", suffix(gx.scalar_type()));
      recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, means).buffer(3, scales).buffer(4, partial);
      recording.bytes(5, params);
      recording.dispatch_threads({grid_side(ceil_div<int64_t>(shape.length, 4)), grid_side(plan.chunks)}, {256});
    }
    record_column_sums(recording, partial, plan.chunks, gw, gb);
  });
  return {gx, gw, gb};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("layer_norm(Tensor x, int dims, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)");
  m.def("plain_layer_norm(Tensor x, int dims, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "plain_add_layer_norm(Tensor x, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor x, Tensor means, Tensor scales, Tensor? sum_grad, int dims, "
      "Tensor? weight, bool parameters_wanted) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::layer_norm>("layer_norm");
  m.impl<&metalcore::plain_layer_norm>("plain_layer_norm");
  m.impl<&metalcore::add_layer_norm>("add_layer_norm");
  m.impl<&metalcore::plain_add_layer_norm>("plain_add_layer_norm");
  m.impl<&metalcore::layer_norm_backward>("layer_norm_backward");
}
