// conv2d(x, weight, …) = activation(scale * (x convolved with weight) + bias + residual), for batches of images.
#include "conv2d.h"

#include "../../gpu/cost.h"
#include "../common/common.h"

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

// Writes transposed matrices of 16-bit elements, of which `from` has `count`.
void transpose_matrices(const Tensor& from, const Tensor& to, int64_t count, int64_t rows, int64_t columns) {
  ConvOrderParams params{.rows = grid_side(rows), .columns = grid_side(columns), .first = 0};
  const double bytes = 2.0 * static_cast<double>(rows * columns * from.element_size());
  gpu::record(to, [&](gpu::Recording& recording) {
    gpu::in_pieces(recording, count, {0, bytes}, [&](const gpu::Piece& piece) {
      params.first = static_cast<uint32_t>(piece.first);
      recording.kernel("conv2d_order").buffer(0, from).buffer(1, to).bytes(2, params).work(0, piece.work.bytes);
      const auto tiles = [](uint32_t n) { return ceil_div<uint32_t>(n, CONV_ORDER_SIDE); };
      recording.dispatch_threadgroups({tiles(params.columns), tiles(params.rows), grid_side(piece.count)},
                                      {CONV_ORDER_THREADS});
    });
  });
}

// Writes contiguous images of 16-bit elements to channels_last ones, or the other way.
void exchange_order(const Tensor& from, const Tensor& to, bool is_to_last) {
  const int64_t channels = from.size(1), pixels = from.size(2) * from.size(3);
  transpose_matrices(from, to, from.size(0), is_to_last ? channels : pixels, is_to_last ? pixels : channels);
}

std::array<int64_t, 4> channels_last_strides(const Tensor& tensor) {
  const int64_t channels = tensor.size(1), width = tensor.size(3);
  return {channels * tensor.size(2) * width, 1, channels * width, channels};
}
bool is_channels_last(const Tensor& tensor) {
  const auto strides = channels_last_strides(tensor);
  return std::equal(strides.begin(), strides.end(), tensor.strides().begin());
}

// The tensor itself if it has that order.
Tensor in_channels_last(const Tensor& tensor) {
  if (is_channels_last(tensor)) return tensor;
  const auto strides = channels_last_strides(tensor);
  const Tensor copy = new_strided(tensor.sizes(), Sizes(strides.data(), 4), tensor.scalar_type(), tensor);
  exchange_order(as_contiguous(tensor), copy, true);
  return copy;
}

// Writes images of 16-bit elements to channels_last ones whose channels fill packs. They are the weight where groups,
// which have so many outputs, are joined.
Tensor packed_channels(const char* name, const Tensor& tensor, int64_t outputs = 1, int64_t joined = 1) {
  const int64_t channels = ceil_div<int64_t>(tensor.size(1) * joined, 8) * 8, height = tensor.size(2),
                width = tensor.size(3);
  const std::array<int64_t, 4> sizes = {tensor.size(0), channels, height, width};
  const std::array<int64_t, 4> strides = {channels * height * width, 1, channels * width, channels};
  const Tensor packed = new_strided(Sizes(sizes.data(), 4), Sizes(strides.data(), 4), tensor.scalar_type(), tensor);
  ConvOrderPacksParams params{.from = images_of(name, tensor),
                              .size = pair_of(height, width),
                              .channels = static_cast<uint32_t>(tensor.size(1)),
                              .outputs = static_cast<uint32_t>(outputs),
                              .joined = static_cast<uint32_t>(joined),
                              .packs = static_cast<uint32_t>(channels / 8),
                              .first = 0};
  gpu::record(packed, [&](gpu::Recording& recording) {
    gpu::in_pieces(recording, packed.numel() / 8, {0, 32.0}, [&](const gpu::Piece& piece) {
      params.first = static_cast<uint32_t>(piece.first);
      recording.kernel("conv2d_order_packs")
          .buffer(0, tensor)
          .buffer(1, packed)
          .bytes(2, params)
          .work(0, piece.work.bytes);
      recording.dispatch_threads({grid_side(piece.count)}, {CONV_ORDER_THREADS});
    });
  });
  return packed;
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
  p.activation = number, p.together = 1;
  p.has_scale = scale.has_value(), p.has_bias = bias.has_value(), p.has_residual = residual.has_value();
  p.scale_step = scale ? static_cast<int32_t>(scale->stride(0)) : 0;
  p.bias_step = bias ? static_cast<int32_t>(bias->stride(0)) : 0;
  if (!conv_weight_has_order(p)) {
    weight = as_contiguous(weight);
    p.weight = images_of("weight", weight);
  }
  problem.weight_aligned = begins_aligned(weight);

  const int64_t unit_cores = unit_threadgroups(x);
  if (unit_cores != 0 && units_take_packed(p))
    return conv2d(packed_channels("x", x), packed_channels("weight", weight), scale, bias, residual, stride, padding,
                  dilation, groups, activation, channels_last);
  const bool has_order = x.is_contiguous() || (is_channels_last(x) && problem.x_aligned);
  if (const int64_t joined = joined_groups(p); unit_cores != 0 && joined > 1) {
    ConvProblem whole = problem;
    whole.params.groups /= joined, whole.params.channels *= joined, whole.params.outputs *= joined;
    if (channels_last ? units_take_images(whole) : units_take_channels(whole.params) && has_order)
      return conv2d(x, packed_channels("weight", weight, p.outputs, joined), scale, bias, residual, stride, padding,
                    dilation, groups / joined, activation, channels_last);
  }
  // A contiguous image's channels are rows of a matrix. Where these do not begin at multiples of 16 bytes, units take
  // copies in the other order sooner.
  const bool has_packs = p.result.channel == 1 || p.size.y * p.size.x % 8 == 0 || !units_take_channels(p);
  if (const auto product = product_of(problem); product && has_packs && units_take(*product, x)) {
    const bool flips = product->bias_of_rows;
    const GemmOperands operands{flips ? weight : x, flips ? x : weight, bias ? MaybeTensor(as_contiguous(*bias)) : bias,
                                residual, std::nullopt};
    gemm_into(kOp, *product, operands, number, 1.0, 1.0, result);
    return result;
  }
  // Units take a weight in channels_last order, which conv2d_order makes of a contiguous one. PyTorch would have to
  // copy a weight in a third order, such as that of programs for GPUs without units: a recording could not have that.
  const bool orders = term_distance(p, true) == 1 || weight.is_contiguous();
  if (orders && unit_cores != 0 && p.result.channel != 1 && units_take_channels(p) && has_order) {
    const MaybeTensor added = residual ? MaybeTensor(in_channels_last(*residual)) : residual;
    exchange_order(
        conv2d(in_channels_last(x), weight, scale, bias, added, stride, padding, dilation, groups, activation, true),
        result, false);
    return result;
  }
  const bool by_units = orders && unit_cores != 0 && units_take_images(problem);
  if (by_units && term_distance(p, true) != 1) {
    weight = in_channels_last(weight);
    p.weight = images_of("weight", weight);
  }
  // Where each channel is a group, channels are neighbours in a copy of the weight.
  if (unit_cores != 0 && goes_by_channels(problem, 8) && p.weight.image != 1) {
    const int64_t places = int64_t{p.window.y} * p.window.x;
    const Tensor by_places = new_tensor({{places, channels}}, x.scalar_type(), x);
    transpose_matrices(as_contiguous(weight), by_places, 1, channels, places);
    weight = by_places, problem.weight_aligned = true;
    p.weight = {.image = 1,
                .channel = 0,
                .y = static_cast<int32_t>(channels * p.window.x),
                .x = static_cast<int32_t>(channels)};
  }
  ConvPlan plan = by_units ? unit_plan(problem, unit_cores, x) : plan_conv(problem, x.element_size());
  gpu::note_plan(kOp, plan.variant, [&] { return why_conv(plan); });
  const int64_t elements = x.numel() + weight.numel() + result.numel() * (residual ? 2 : 1);
  const double bytes = static_cast<double>(elements * x.element_size()) / static_cast<double>(plan.items);
  MaybeTensor parts;
  const uint32_t together = plan.params.together;
  if (plan.splits > together) parts = new_tensor({{plan.splits, p.pixels, channels}}, ScalarType::Float, result);
  gpu::record(result, [&](gpu::Recording& recording) {
    gpu::in_pieces(recording, plan.items, {plan.item_flops, bytes}, [&](const gpu::Piece& piece) {
      plan.params.first = static_cast<uint32_t>(piece.first);
      recording.kernel("conv2d_", plan.variant, "_", suffix(x.scalar_type()));
      recording.buffer(0, x).buffer(1, weight).buffer(2, scale).buffer(3, bias);
      recording.buffer(4, residual).buffer(5, parts ? *parts : result).bytes(6, plan.params);
      recording.work(piece.work.flops, piece.work.bytes);
      const uint32_t count = grid_side(piece.count);
      if (plan.threads != 0)
        recording.together(together).dispatch_threadgroups(
            {plan.across, grid_side(piece.count * together), plan.splits / together}, {plan.threads});
      else
        recording.dispatch_threads({count}, {std::min<uint32_t>(count, CONV_THREADS)});
    });
    if (!parts) return;
    recording.kernel("conv2d_unit_sum_", suffix(x.scalar_type())).buffer(0, *parts).buffer(2, scale).buffer(3, bias);
    recording.buffer(4, residual).buffer(5, result).bytes(6, plan.params);
    recording.dispatch_threads({ceil_div<uint32_t>(static_cast<uint32_t>(result.numel()), GEMM_UNIT_SUMS)},
                               {GEMM_UNIT_SUMS_THREADS});
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
