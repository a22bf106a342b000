// Cross entropy of logits (N, C, …) with targets that are classes (N, …) or probabilities of classes (N, C, …).
#include "../../../kernels/loss/loss.h"
#include "../../gpu/tuning.h"
#include "../common/rows.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

enum Reduction : int64_t { kNone, kMean, kSum };  // as PyTorch's numbers

struct Options {
  int64_t ignore_index;
  double label_smoothing, softcap, z_loss;
};

struct Shape {
  int64_t rows, classes, inner;  // the logits of a row lie `inner` apart in a contiguous tensor
};

Shape shape_of(const char* op, const Tensor& x) {
  const auto sizes = x.sizes();
  check(!sizes.empty(), "metalcore::", op, ": x needs a dimension of classes");
  Shape shape{1, sizes[sizes.size() == 1 ? 0 : 1], 1};
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (d >= 2) shape.inner *= sizes[d];
    if (d != 1 && sizes.size() > 1) shape.rows *= sizes[d];
  }
  check(shape.rows > 0 && shape.classes > 0, "metalcore::", op, ": x must not be empty");
  return shape;
}

// The targets, contiguous. Those that are not classes are probabilities.
Tensor checked_target(const char* op, const Tensor& target, const Tensor& x, const Shape& shape) {
  check_same_device(op, "target", target, x);
  if (target.scalar_type() == ScalarType::Long) {
    check(target.numel() == shape.rows, "metalcore::", op, ": target must have ", shape.rows, " classes, not ",
          target.numel());
  } else {
    check_same_dtype(op, "target", target, x);
    check_same_shape(op, "target", target, x);
  }
  return as_contiguous(target);
}

MaybeTensor checked_weight(const char* op, const MaybeTensor& weight, const Tensor& x, const Shape& shape) {
  if (!weight) return std::nullopt;
  check_float(op, "weight", *weight);
  check_same_device(op, "weight", *weight, x);
  check(weight->numel() == shape.classes, "metalcore::", op, ": weight must have ", shape.classes, " elements, not ",
        weight->numel());
  return as_contiguous(weight->scalar_type() == ScalarType::Float ? *weight
                                                                  : torch::stable::to(*weight, ScalarType::Float));
}

// A threadgroup's threads have at least so many elements of a row each. Where the gradient takes the logits' place, the
// second walk finds more of a long row in the cache if fewer threadgroups run at once.
constexpr int64_t kLeastElements = 8, kMostThreads = 512, kMostThreadsInPlace = 1024;
constexpr int64_t kLongRow = 1 << 17;  // bytes

struct Plan {
  const char* variant;
  gpu::Size grid, threadgroup;
};

Plan plan_of(const Shape& shape, const Tensor& on, bool in_place = false) {
  const uint32_t rows = grid_side(shape.rows);
  check(shape.classes <= INT32_MAX, "metalcore: a row of ", shape.classes, " elements is longer than kernels take");
  if (shape.inner > 1 || shape.classes <= row_tuning(on).thread_row) return {"thread", {rows}, {256}};
  const int64_t threads = round_up<int64_t>(ceil_div(shape.classes, kLeastElements), gpu::kSimdWidth);
  const bool few = in_place && shape.classes * static_cast<int64_t>(on.element_size()) > kLongRow;
  const int64_t most = std::min<int64_t>(few ? kMostThreadsInPlace : kMostThreads, row_tuning(on).looped_threads);
  return {"group", {rows}, {static_cast<uint32_t>(std::min(threads, most))}};
}

std::string why(const Plan& plan, const Shape& shape) {
  const std::string row = "a row of " + std::to_string(shape.classes);
  if (shape.inner > 1) return row + ", whose elements lie apart, is one thread's work, as its neighbours are others'";
  return row + (plan.threadgroup.x == 256 && plan.variant[0] == 't' ? " is one thread's work"
                                                                    : " is walked by one threadgroup");
}

void dispatch(gpu::Recording& recording, const Plan& plan) {
  plan.variant[0] == 't' ? recording.dispatch_threads(plan.grid, plan.threadgroup)
                         : recording.dispatch_threadgroups(plan.grid, plan.threadgroup);
}

// The logits as the kernels read them: rows of contiguous elements at any distance, or blocks of rows.
Rows rows_of_logits(const Tensor& x, const Shape& shape) {
  return shape.inner == 1 ? rows_of(x, shape.classes) : contiguous_rows_of(x, shape.classes * shape.inner);
}

CrossEntropyParams params_of(const Shape& shape, const Rows& x, const Tensor& gradient, const Tensor& target,
                             const MaybeTensor& weight, const Options& options) {
  const auto start =
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x.tensor.data_ptr()) % 16 / x.tensor.element_size());
  const bool probabilities = target.scalar_type() != ScalarType::Long,
             in_place = gradient.data_ptr() == x.tensor.data_ptr();
  return {
      .length = grid_side(shape.classes),
      .rows = grid_side(shape.rows),
      .inner = grid_side(shape.inner),
      .aligned = aligned16(x.tensor, x.stride, shape.classes) &&
                 (in_place || aligned16(gradient, shape.classes, shape.classes)),
      .start = start,
      .together = in_place || (start == 0 && (x.stride - shape.classes) * x.tensor.element_size() % 16 == 0 &&
                               reinterpret_cast<uintptr_t>(gradient.data_ptr()) % 16 == 0),
      .has_weight = weight.has_value(),
      .probabilities = probabilities,
      .general = weight || probabilities || options.label_smoothing != 0,
      .vectors = !weight && !probabilities && shape.classes >= 16,  // their edges need 15 elements
      .smoothing = static_cast<float>(options.label_smoothing),
      .softcap = static_cast<float>(options.softcap),
      .z_loss = static_cast<float>(options.z_loss),
      .ignore_index = options.ignore_index,
      .x_stride = x.stride,
  };
}

// A threadgroup sums kSummed losses, or more where there would be more than kMostParts threadgroups.
constexpr int64_t kSummed = 8192, kMostParts = 1024;

// The losses of rows, in the shape of the targets if nothing reduces them.
Tensor new_losses(const Tensor& x, const Shape& shape, int64_t reduction) {
  if (reduction != kNone) return new_tensor({shape.rows}, x.scalar_type(), x);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < x.dim() && x.dim() > 1; ++d)
    if (d != 1) sizes.push_back(x.sizes()[d]);
  return new_tensor(Sizes(sizes.data(), sizes.size()), x.scalar_type(), x);
}

// The loss that the losses of rows are reduced to, and by what it is divided.
class LossSum {
 public:
  LossSum(const Tensor& x, const Tensor& losses, const Shape& shape, int64_t reduction)
      : loss(reduction == kNone ? losses : new_tensor(Sizes(), x.scalar_type(), x)),
        total(new_tensor({reduction == kNone ? 0 : 1}, ScalarType::Float, x)),
        share_(std::max(kSummed, ceil_div(shape.rows, kMostParts))),
        groups_(ceil_div(shape.rows, share_)),
        rows_(grid_side(shape.rows)),
        reduction_(reduction) {
    if (reduction != kNone && groups_ > 1) parts_ = new_tensor({groups_, 2}, ScalarType::Float, x);
  }

  // `results` has the loss and the weight of each row.
  void record(gpu::Recording& recording, const Tensor& results) const {
    if (reduction_ == kNone) return;
    const uint32_t threads = row_tuning(results).looped_threads;
    CrossEntropySumParams sums{.count = rows_, .share = grid_side(share_), .mean = reduction_ == kMean};
    if (parts_) {
      recording.kernel("cross_entropy_parts").buffer(0, results).buffer(1, *parts_).bytes(2, sums);
      recording.dispatch_threadgroups({grid_side(groups_)}, {threads});
      sums.count = grid_side(groups_);
    }
    recording.kernel("cross_entropy_total_", suffix(loss.scalar_type()));
    recording.buffer(0, parts_ ? *parts_ : results).buffer(1, loss).buffer(2, total).bytes(3, sums);
    recording.dispatch_threadgroups({1}, {threads});
  }

  const Tensor loss, total;

 private:
  int64_t share_, groups_;
  uint32_t rows_;
  int64_t reduction_;
  MaybeTensor parts_;
};

// Returns the loss or the losses; the largest logit, the sum of exponentials and that of coefficients of each row; and
// by what a reduced loss is divided, which has no elements for losses that are not reduced.
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target_, const MaybeTensor& weight_,
                                                 int64_t reduction, int64_t ignore_index, double label_smoothing,
                                                 double softcap, double z_loss) {
  const char* op = "cross_entropy";
  check_float(op, "x", input);
  check(kNone <= reduction && reduction <= kSum, "metalcore::", op, ": reduction must be 0, 1 or 2, not ", reduction);
  const Shape shape = shape_of(op, input);
  const Tensor target = checked_target(op, target_, input, shape);
  const MaybeTensor weight = checked_weight(op, weight_, input, shape);
  const ScalarType dtype = input.scalar_type();
  const Rows x = rows_of_logits(input, shape);
  const Plan plan = plan_of(shape, input);
  gpu::note_plan(op, plan.variant, [&] { return why(plan, shape); });

  const Tensor losses = new_losses(input, shape, reduction);
  const Tensor results = new_tensor({shape.rows, 2}, ScalarType::Float, input);
  const Tensor saved = new_tensor({shape.rows, 3}, ScalarType::Float, input);
  const LossSum sum(input, losses, shape, reduction);
  const CrossEntropyParams params =
      params_of(shape, x, x.tensor, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  gpu::record(sum.loss, [&](gpu::Recording& recording) {
    recording.kernel("cross_entropy_", plan.variant, "_", suffix(dtype));
    recording.buffer(0, x.tensor).buffer(1, given_if(!params.probabilities, target));
    recording.buffer(2, given_if(params.probabilities, target))
        .buffer(3, weight)
        .buffer(4, losses)
        .buffer(5, results)
        .buffer(6, saved);
    recording.bytes(7, params);
    dispatch(recording, plan);
    sum.record(recording, results);
  });
  return {sum.loss, saved, sum.total};
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target_,
                              const MaybeTensor& weight_, const Tensor& saved, const Tensor& total, int64_t reduction,
                              int64_t ignore_index, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_backward";
  check_float(op, "x", input);
  check_same_device(op, "grad", grad, input);
  check_same_dtype(op, "grad", grad, input);
  const Shape shape = shape_of(op, input);
  check(grad.numel() == (reduction == kNone ? shape.rows : 1), "metalcore::", op,
        ": grad does not have the shape of the loss");
  check_float32(op, "saved", saved);
  check_same_device(op, "saved", saved, input);
  check(saved.numel() == 3 * shape.rows && saved.is_contiguous(), "metalcore::", op, ": saved does not belong to x");
  check_float32(op, "total", total);
  check_same_device(op, "total", total, input);
  check(total.numel() == (reduction == kNone ? 0 : 1), "metalcore::", op,
        ": total must have one element, or none where losses are not reduced");
  const Tensor target = checked_target(op, target_, input, shape);
  const MaybeTensor weight = checked_weight(op, weight_, input, shape);
  const Rows x = rows_of_logits(input, shape);
  const Tensor g = as_contiguous(grad), gx = new_like(input);
  const Plan plan = plan_of(shape, input);
  gpu::note_plan(op, plan.variant, [&] { return why(plan, shape); });
  CrossEntropyParams params = params_of(shape, x, gx, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  params.scale_of_row = reduction == kNone;
  gpu::record(gx, [&](gpu::Recording& recording) {
    recording.kernel("cross_entropy_backward_", plan.variant, "_", suffix(input.scalar_type()));
    recording.buffer(0, x.tensor).buffer(1, given_if(!params.probabilities, target));
    recording.buffer(2, given_if(params.probabilities, target))
        .buffer(3, weight)
        .buffer(4, g)
        .buffer(5, given_if(reduction != kNone, total))
        .buffer(6, saved);
    recording.buffer(7, gx).bytes(8, params);
    dispatch(recording, plan);
  });
  return gx;
}

// Puts the gradient of sum(scale * loss) in the place of the logits (N, C), and returns the losses of the rows.
Tensor cross_entropy_replace(const Tensor& x, const Tensor& target_, const MaybeTensor& weight_, const Tensor& scale,
                             int64_t ignore_index, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_";
  check_float(op, "x", x);
  check(x.dim() == 2 && x.is_contiguous(), "metalcore::", op, ": x must be contiguous and have 2 dimensions");
  const Shape shape = shape_of(op, x);
  check(target_.scalar_type() == ScalarType::Long, "metalcore::", op, ": target must be classes");
  check_float32(op, "scale", scale);
  check_same_device(op, "scale", scale, x);
  check((scale.numel() == 1 || scale.numel() == shape.rows) && scale.is_contiguous(), "metalcore::", op,
        ": scale must have one element, or one for each row");
  const Tensor target = checked_target(op, target_, x, shape);
  const MaybeTensor weight = checked_weight(op, weight_, x, shape);
  const Tensor losses = new_tensor({shape.rows}, ScalarType::Float, x);
  const Plan plan = plan_of(shape, x, true);
  gpu::note_plan(op, plan.variant, [&] { return why(plan, shape) + ", and replaced by its gradient"; });
  CrossEntropyParams params =
      params_of(shape, {x, shape.classes}, x, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  params.scale_of_row = scale.numel() > 1;
  gpu::record(losses, [&](gpu::Recording& recording) {
    recording.kernel("cross_entropy_replace_", plan.variant, "_", suffix(x.scalar_type()));
    recording.buffer(0, x).buffer(1, target).buffer(2, weight).buffer(3, scale).buffer(4, losses);
    recording.bytes(5, params);
    dispatch(recording, plan);
  });
  return losses;
}

// Returns the loss or the losses, their gradient for an upstream gradient of 1, and by what a reduced loss is divided.
// With `divided` the gradient already is; otherwise it is that of the sum.
std::tuple<Tensor, Tensor, Tensor> cross_entropy_ahead(const Tensor& input, const Tensor& target_,
                                                       const MaybeTensor& weight_, int64_t reduction,
                                                       int64_t ignore_index, double label_smoothing, bool divided) {
  const char* op = "cross_entropy_ahead";
  check_float(op, "x", input);
  check(kNone <= reduction && reduction <= kSum, "metalcore::", op, ": reduction must be 0, 1 or 2, not ", reduction);
  check(!divided || reduction == kMean, "metalcore::", op, ": only the gradient of a mean is divided");
  const Shape shape = shape_of(op, input);
  const Tensor target = checked_target(op, target_, input, shape);
  const MaybeTensor weight = checked_weight(op, weight_, input, shape);
  const Rows x = rows_of_logits(input, shape);
  const Plan plan = plan_of(shape, input, true);
  gpu::note_plan(op, plan.variant, [&] { return why(plan, shape) + ", which writes its gradient as well"; });
  const Tensor losses = new_losses(input, shape, reduction), gradient = new_like(input);
  const Tensor results = new_tensor({shape.rows, 2}, ScalarType::Float, input);
  const MaybeTensor weights = divided ? MaybeTensor(new_tensor({1}, ScalarType::Float, input)) : std::nullopt;
  const LossSum sum(input, losses, shape, reduction);
  const CrossEntropyParams params =
      params_of(shape, x, gradient, target, weight, {ignore_index, label_smoothing, 0.0, 0.0});
  gpu::record(sum.loss, [&](gpu::Recording& recording) {
    const MaybeTensor classes = given_if(!params.probabilities, target);
    if (divided) {
      recording.kernel("cross_entropy_weights").buffer(0, classes).buffer(1, weight).buffer(2, *weights);
      recording.bytes(3, params).dispatch_threadgroups({1}, {row_tuning(input).looped_threads});
    }
    recording.kernel("cross_entropy_ahead_", plan.variant, "_", suffix(input.scalar_type()));
    recording.buffer(0, x.tensor).buffer(1, classes).buffer(2, given_if(params.probabilities, target));
    recording.buffer(3, weight).buffer(4, losses).buffer(5, results).buffer(6, weights).buffer(7, gradient);
    recording.bytes(8, params).bytes(9, static_cast<uint32_t>(divided));
    dispatch(recording, plan);
    sum.record(recording, results);
  });
  return {sum.loss, gradient, sum.total};
}

// Multiplies what cross_entropy_ahead gave by an upstream gradient, which is one number or has one for each row, and
// divides it by `total` if that is given. Returns nothing: an operator that returns its argument would be an alias of
// it.
Tensor cross_entropy_finish(const Tensor& gradient, const Tensor& grad_, const Tensor& target_,
                            const MaybeTensor& total, int64_t ignore_index) {
  const char* op = "cross_entropy_finish_";
  check_float(op, "gradient", gradient);
  check(gradient.is_contiguous(), "metalcore::", op, ": gradient must be contiguous");
  const Shape shape = shape_of(op, gradient);
  check_same_device(op, "grad", grad_, gradient);
  check_same_dtype(op, "grad", grad_, gradient);
  check(grad_.numel() == 1 || grad_.numel() == shape.rows, "metalcore::", op, ": grad must have one element, or one ",
        "for each row");
  if (total) {
    check_float32(op, "total", *total);
    check_same_device(op, "total", *total, gradient);
    check(total->numel() == 1, "metalcore::", op, ": total must have one element");
  }
  const Tensor target = checked_target(op, target_, gradient, shape), grad = as_contiguous(grad_);
  const Plan plan = plan_of(shape, gradient);
  gpu::note_plan(op, plan.variant, [&] { return why(plan, shape) + ", unless its scale is 1"; });
  CrossEntropyParams params =
      params_of(shape, {gradient, shape.classes}, gradient, target, std::nullopt, {ignore_index, 0.0, 0.0, 0.0});
  params.scale_of_row = grad.numel() > 1;
  gpu::record(gradient, [&](gpu::Recording& recording) {
    recording.kernel("cross_entropy_finish_", plan.variant, "_", suffix(gradient.scalar_type()));
    recording.buffer(0, gradient).buffer(1, given_if(!params.probabilities, target)).buffer(2, grad).buffer(3, total);
    recording.bytes(4, params).bytes(5, static_cast<uint32_t>(total.has_value()));
    dispatch(recording, plan);
  });
  return new_tensor({0}, gradient.scalar_type(), gradient);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "cross_entropy(Tensor x, Tensor target, Tensor? weight, int reduction, int ignore_index, float label_smoothing, "
      "float softcap, float z_loss) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor x, Tensor target, Tensor? weight, Tensor saved, Tensor total, "
      "int reduction, int ignore_index, float label_smoothing, float softcap, float z_loss) -> Tensor");
  m.def(
      "cross_entropy_ahead(Tensor x, Tensor target, Tensor? weight, int reduction, int ignore_index, "
      "float label_smoothing, bool divided) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_finish_(Tensor(a!) gradient, Tensor grad, Tensor target, Tensor? total, int ignore_index) "
      "-> Tensor");
  // Made of products and of the operators here, in Python (metalcore/loss).
  m.def(
      "fused_linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
      "Tensor? token_weight, int reduction, bool squares_wanted, bool predictions_wanted, bool token_scaling, "
      "bool wide, int ignore_index, float label_smoothing, float softcap, float z_loss, int chunk, "
      "bool hidden_wanted, bool weight_wanted, bool bias_wanted) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "fused_linear_cross_entropy_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
      "Tensor? class_weight, bool token_scaling, bool wide, int ignore_index, float label_smoothing, float softcap, "
      "float z_loss, int chunk, bool hidden_wanted, bool weight_wanted, bool bias_wanted) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_(Tensor(a!) x, Tensor target, Tensor? weight, Tensor scale, int ignore_index, "
      "float label_smoothing, float softcap, float z_loss) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::cross_entropy>("cross_entropy");
  m.impl<&metalcore::cross_entropy_backward>("cross_entropy_backward");
  m.impl<&metalcore::cross_entropy_replace>("cross_entropy_");
  m.impl<&metalcore::cross_entropy_ahead>("cross_entropy_ahead");
  m.impl<&metalcore::cross_entropy_finish>("cross_entropy_finish_");
}
