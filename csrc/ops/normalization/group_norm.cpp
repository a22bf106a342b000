// group_norm, over groups of channels.
#include "../../../kernels/normalization/normalization.h"
#include "norms.h"

#include <algorithm>
#include <string>

namespace metalcore {
namespace {

struct Groups {
  int64_t batch, groups, channels, area;  // `channels` of each group
  int64_t rows() const { return batch * groups; }
  int64_t length() const { return channels * area; }
};

Groups groups_of(const char* op, const Tensor& x, int64_t groups) {
  const auto sizes = x.sizes();
  check(x.dim() >= 2 && groups > 0 && sizes[1] % groups == 0, "metalcore::", op, ": the channels of x, ", shape_text(x),
        ", must be a multiple of groups, ", groups);
  Groups found{sizes[0], groups, sizes[1] / groups, 1};
  for (int64_t d = 2; d < x.dim(); ++d) found.area *= sizes[d];
  return found;
}

MaybeTensor checked_parameter(const char* op, const char* argument, const MaybeTensor& parameter, const Tensor& x) {
  if (!parameter) return std::nullopt;
  check_same_device(op, argument, *parameter, x);
  check_same_dtype(op, argument, *parameter, x);
  check(parameter->numel() == x.sizes()[1], "metalcore::", op, ": ", argument, " must have ", x.sizes()[1],
        " elements, not ", parameter->numel());
  return as_contiguous(*parameter);
}

// Short groups go to a thread each, where a thread takes rows of that length; others to a threadgroup.
struct GroupPlan {
  bool threads;
  uint32_t group_threads;
};
GroupPlan plan_groups(const Groups& shape, const Tensor& on) {
  constexpr int64_t kElements = 16;  // of a thread, before a threadgroup gets more threads
  check(shape.length() <= INT32_MAX, "metalcore: a group of ", shape.length(), " elements is longer than kernels take");
  const RowTuning& tuning = row_tuning(on);
  const int64_t wanted = round_up<int64_t>(ceil_div(shape.length(), kElements), gpu::kSimdWidth);
  return {shape.length() <= tuning.thread_row, static_cast<uint32_t>(std::min<int64_t>(wanted, tuning.looped_threads))};
}
void note(const char* op, const GroupPlan& plan, const Groups& shape) {
  gpu::note_plan(op, plan.threads ? "thread" : "looped", [&] {
    return "a group of " + std::to_string(shape.length()) +
           (plan.threads ? " is one thread's work" : " is walked twice by a threadgroup");
  });
}
void dispatch(gpu::Recording& recording, const GroupPlan& plan, const Groups& shape) {
  const uint32_t rows = grid_side(shape.rows());
  plan.threads ? recording.dispatch_threads({rows}, {256})
               : recording.dispatch_threadgroups({rows}, {plan.group_threads});
}

// Channels whose bytes are whole vectors begin at multiples of 16 bytes if the tensor does.
bool whole_vectors(const Tensor& x, const Groups& shape) { return aligned16(x, shape.area, shape.length()); }

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input, int64_t groups, const MaybeTensor& weight_,
                                              const MaybeTensor& bias_, double eps) {
  const char* op = "group_norm";
  check_float(op, "x", input);
  const Groups shape = groups_of(op, input, groups);
  const MaybeTensor weight = checked_parameter(op, "weight", weight_, input);
  const MaybeTensor bias = checked_parameter(op, "bias", bias_, input);
  const Tensor x = as_contiguous(input), y = new_like(input);
  const int64_t sizes[2] = {shape.batch, shape.groups};
  Tensor means = new_tensor(Sizes(sizes, 2), ScalarType::Float, input);
  Tensor scales = new_tensor(Sizes(sizes, 2), ScalarType::Float, input);
  if (y.numel() == 0) {
    torch::stable::zero_(means);
    torch::stable::zero_(scales);
    return {y, means, scales};
  }
  const GroupPlan plan = plan_groups(shape, input);
  note(op, plan, shape);
  const GroupNormParams params{
      .groups = grid_side(groups),
      .channels = grid_side(shape.channels),
      .area = grid_side(shape.area),
      .eps = static_cast<float>(eps),
      .has_weight = weight.has_value(),
      .has_bias = bias.has_value(),
  };
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel(plan.threads ? "group_norm_thread" : "group_norm_looped",
                     !plan.threads && whole_vectors(x, shape) ? "_aligned_" : "_", suffix(y.scalar_type()));
    recording.buffer(0, x).buffer(1, weight).buffer(2, bias);
    recording.buffer(3, y).buffer(4, means).buffer(5, scales).bytes(6, params);
    dispatch(recording, plan, shape);
  });
  return {y, means, scales};
}

namespace {

// The segments of a channel: some for each simdgroup, so that all have about as much to do.
struct Segments {
  int64_t count, elements;
};
Segments segments_of(const Groups& shape, const GroupPlan& plan) {
  constexpr int64_t kLeast = 512;  // elements of a segment, of which a simdgroup takes 256 at a time
  const int64_t wanted = ceil_div<int64_t>(4 * plan.group_threads / gpu::kSimdWidth, shape.channels);
  const int64_t count = std::clamp<int64_t>(shape.area / kLeast, 1, wanted);
  const int64_t elements = count == 1 ? shape.area : round_up<int64_t>(ceil_div(shape.area, count), 8);
  return {ceil_div(shape.area, elements), elements};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad_, const Tensor& input, const Tensor& means_,
                                                       const Tensor& scales_, int64_t groups,
                                                       const MaybeTensor& weight_, bool parameters_wanted) {
  const char* op = "group_norm_backward";
  check_float(op, "x", input);
  check_like(op, "grad", grad_, input);
  const Groups shape = groups_of(op, input, groups);
  for (const Tensor* statistic : {&means_, &scales_}) {
    check_same_device(op, "means and scales", *statistic, input);
    check_float32(op, "means and scales", *statistic);
    check(statistic->numel() == shape.rows(), "metalcore::", op, ": means and scales must have ", shape.rows(),
          " elements, not ", statistic->numel());
  }
  const MaybeTensor weight = checked_parameter(op, "weight", weight_, input);
  const Tensor x = as_contiguous(input), grad = as_contiguous(grad_), gx = new_like(input);
  const Tensor means = as_contiguous(means_), scales = as_contiguous(scales_);
  const int64_t sizes[1] = {parameters_wanted ? input.sizes()[1] : 0};
  Tensor gw = new_tensor(Sizes(sizes, 1), input.scalar_type(), input);
  Tensor gb = new_tensor(Sizes(sizes, 1), input.scalar_type(), input);
  if (gx.numel() == 0) {
    torch::stable::zero_(gw);
    torch::stable::zero_(gb);
    return {gx, gw, gb};
  }
  const GroupPlan plan = plan_groups(shape, input);
  note(op, plan, shape);
  const Segments segments = plan.threads ? Segments{1, shape.area} : segments_of(shape, plan);
  const Tensor parts = new_tensor({2 * shape.rows() * shape.channels * segments.count}, ScalarType::Float, input);
  const GroupNormParams params{
      .groups = grid_side(groups),
      .channels = grid_side(shape.channels),
      .area = grid_side(shape.area),
      .has_weight = weight.has_value(),
      .segments = grid_side(segments.count),
      .segment = grid_side(segments.elements),
  };
  const GroupNormWeightParams weight_params{
      .batch = grid_side(shape.batch),
      .channels = grid_side(input.sizes()[1]),
      .segments = params.segments,
  };
  const bool aligned = whole_vectors(x, shape) && whole_vectors(grad, shape);
  gpu::record(gx, [&](gpu::Recording& recording) {
    recording.kernel(plan.threads ? "group_norm_backward_thread" : "group_norm_backward_looped",
                     !plan.threads && aligned ? "_aligned_" : "_", suffix(gx.scalar_type()));
    recording.buffer(0, grad).buffer(1, x).buffer(2, means).buffer(3, scales).buffer(4, weight);
    recording.buffer(5, gx).buffer(6, parts).bytes(7, params);
    dispatch(recording, plan, shape);
    if (!parameters_wanted) return;
    constexpr uint32_t kChannels = 8;  // of a threadgroup
    recording.kernel("group_norm_weight_", suffix(gx.scalar_type()));
    recording.buffer(0, parts).buffer(1, gw).buffer(2, gb).bytes(3, weight_params);
    recording.dispatch_threadgroups({ceil_div(weight_params.channels, kChannels)}, {kChannels * gpu::kSimdWidth});
  });
  return {gx, gw, gb};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor grad, Tensor x, Tensor means, Tensor scales, int groups, Tensor? weight, "
      "bool parameters_wanted) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::group_norm>("group_norm");
  m.impl<&metalcore::group_norm_backward>("group_norm_backward");
}
