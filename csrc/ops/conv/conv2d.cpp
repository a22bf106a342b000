// conv2d(x, weight, …) = activation(scale * (x convolved with weight) + bias + residual), for batches of images.
#include "../../gpu/cost.h"
#include "../common/common.h"
#include "../gemm/gemm.h"
#include "plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace metalcore {
namespace {

constexpr int64_t kCounted = INT32_MAX;
constexpr const char* kOp = "conv2d";

using Numbers = std::vector<int64_t>;

ConvPair pair_of(int64_t y, int64_t x) { return {static_cast<uint32_t>(y), static_cast<uint32_t>(x)}; }

// A dimension of size 1 has no distance. All of one image has to be near its beginning.
ConvImages images_of(const char* name, const Tensor& tensor) {
  std::array<int64_t, 4> strides{};
  int64_t last = 0;
  for (int64_t d = 0; d < 4; ++d) {
    strides[d] = tensor.size(d) == 1 ? 0 : tensor.stride(d);
    if (d > 0) last += strides[d] * std::max<int64_t>(tensor.size(d) - 1, 0);
  }
  check(last <= kCounted, "metalcore::", kOp, ": ", name, " has images that are larger than kernels can count");
  return {strides[0], static_cast<int32_t>(strides[1]), static_cast<int32_t>(strides[2]),
          static_cast<int32_t>(strides[3])};
}

void check_numbers(const char* name, const Numbers& numbers, size_t count, int64_t least) {
  check(numbers.size() == count &&
            std::all_of(numbers.begin(), numbers.end(), [=](int64_t n) { return n >= least && n <= kCounted; }),
        "metalcore::", kOp, ": ", name, " must be ", count, " numbers from ", least, " on");
}

// Computes the size of a dimension with `before` and `after` zeros around it.
int64_t out_size(int64_t size, int64_t before, int64_t after, int64_t window, int64_t stride, int64_t dilation) {
  const int64_t room = size + before + after - dilation * (window - 1) - 1;
  check(room >= 0, "metalcore::", kOp, ": a weight of ", window, " elements with dilation ", dilation,
        " does not fit into ", size + before + after, " elements");
  return room / stride + 1;
}

void check_channel_vector(const char* name, const MaybeTensor& tensor, const Tensor& weight, const Tensor& x) {
  if (!tensor) return;
  check_same_dtype(kOp, name, *tensor, x);
  check_same_device(kOp, name, *tensor, x);
  check(tensor->dim() == 1 && tensor->size(0) == weight.size(0), "metalcore::", kOp, ": ", name, " must have shape [",
        weight.size(0), "], not ", shape_text(*tensor));
}

// padding has the numbers of zeros above, left of, below and right of an image.
Tensor conv2d(const Tensor& x, const Tensor& weight_, const MaybeTensor& scale, const MaybeTensor& bias,
              const MaybeTensor& residual, const Numbers& stride, const Numbers& padding, const Numbers& dilation,
              int64_t groups, const std::string& activation, bool channels_last) {
  check_float(kOp, "x", x);
  check_same_dtype(kOp, "weight", weight_, x);
  check_same_device(kOp, "weight", weight_, x);
  check(x.dim() == 4 && weight_.dim() == 4, "metalcore::", kOp, ": x and weight must have 4 dimensions, not ", x.dim(),
        " and ", weight_.dim());
  check_numbers("stride", stride, 2, 1), check_numbers("padding", padding, 4, 0);
  check_numbers("dilation", dilation, 2, 1);
  check(groups > 0 && weight_.numel() > 0 && x.size(1) == groups * weight_.size(1) && weight_.size(0) % groups == 0,
        "metalcore::", kOp, ": x of shape ", shape_text(x), " does not go with weight of shape ", shape_text(weight_),
        " in ", groups, " groups");
  check_channel_vector("scale", scale, weight_, x), check_channel_vector("bias", bias, weight_, x);
  const std::array<int64_t, 4> sizes = {
      x.size(0), weight_.size(0), out_size(x.size(2), padding[0], padding[2], weight_.size(2), stride[0], dilation[0]),
      out_size(x.size(3), padding[1], padding[3], weight_.size(3), stride[1], dilation[1])};
  const auto [images, channels, height, width] = sizes;
  const std::array<int64_t, 4> strides = {channels * height * width, 1, channels * width, channels};
  const Sizes shape(sizes.data(), sizes.size());
  const Tensor result = channels_last ? new_strided(shape, Sizes(strides.data(), 4), x.scalar_type(), x)
                                      : new_tensor(shape, x.scalar_type(), x);
  if (residual) {
    check_same_dtype(kOp, "residual", *residual, x);
    check_same_device(kOp, "residual", *residual, x);
    check_same_shape(kOp, "residual", *residual, result);
  }
  const uint32_t number = activation_number(kOp, activation);
  if (result.numel() == 0) return result;
  check(x.numel() > 0, "metalcore::", kOp, ": x has no elements");
  check(result.numel() <= kCounted, "metalcore::", kOp, ": the result has more elements than kernels can count");

  Tensor weight = weight_;
  ConvProblem problem{.params = {}, .images = images, .x_aligned = begins_aligned(x), .weight_aligned = false};
  ConvParams& p = problem.params;
  p.x = images_of("x", x), p.weight = images_of("weight", weight), p.result = images_of("the result", result);
  if (channels_last) p.result.channel = 1;
  if (residual) p.residual = images_of("residual", *residual);
  p.size = pair_of(x.size(2), x.size(3)), p.out = pair_of(height, width);
  p.window = pair_of(weight.size(2), weight.size(3)), p.stride = pair_of(stride[0], stride[1]);
  p.dilation = pair_of(dilation[0], dilation[1]), p.padding = pair_of(padding[0], padding[1]);
  p.groups = static_cast<uint32_t>(groups), p.channels = static_cast<uint32_t>(weight.size(1));
  p.outputs = static_cast<uint32_t>(channels / groups);
  p.terms = p.channels * p.window.y * p.window.x;
  p.pixels = static_cast<uint32_t>(images * height * width);
  p.activation = number;
  p.has_scale = scale.has_value(), p.has_bias = bias.has_value(), p.has_residual = residual.has_value();
  p.scale_step = scale ? static_cast<int32_t>(scale->stride(0)) : 0;
  p.bias_step = bias ? static_cast<int32_t>(bias->stride(0)) : 0;
  if (!conv_weight_has_order(p)) {
    weight = as_contiguous(weight);
    p.weight = images_of("weight", weight);
  }
  problem.weight_aligned = begins_aligned(weight);

  ConvPlan plan = plan_conv(problem, x.element_size());
  gpu::note_plan(kOp, plan.variant, [&] { return why_conv(plan); });
  const int64_t elements = x.numel() + weight.numel() + result.numel() * (residual ? 2 : 1);
  const double bytes = static_cast<double>(elements * x.element_size()) / static_cast<double>(plan.items);
  gpu::record(result, [&](gpu::Recording& recording) {
    gpu::in_pieces(recording, plan.items, {plan.item_flops, bytes}, [&](const gpu::Piece& piece) {
      plan.params.first = static_cast<uint32_t>(piece.first);
      recording.kernel("conv2d_", plan.variant, "_", suffix(x.scalar_type()));
      recording.buffer(0, x).buffer(1, weight).buffer(2, scale).buffer(3, bias);
      recording.buffer(4, residual).buffer(5, result).bytes(6, plan.params);
      recording.work(piece.work.flops, piece.work.bytes);
      const uint32_t count = grid_side(piece.count);
      if (plan.tiled)
        recording.dispatch_threadgroups({plan.across, count}, {GEMM_THREADS});
      else
        recording.dispatch_threads({count}, {std::min<uint32_t>(count, CONV_THREADS)});
    });
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "conv2d(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
      "int[] dilation, int groups, str activation, bool channels_last) -> Tensor");
  m.def(
      "conv2d_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, "
      "bool by_x, bool by_weight) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::conv2d>("conv2d"); }
