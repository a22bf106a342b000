// Divergences of rows of distributions (rows, classes), and the gradient by the first of the two.
//
// scale_(x, factor): x *= factor, where the factor is one float32 number in the device's memory. Losses multiply the
// gradients that they have by the one that reaches them.
#include "../../../kernels/loss/loss.h"
#include "../common/common.h"
#include "../common/rows.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

constexpr int64_t kMostScaling = 1 << 20;

// Returns nothing: an operator that returns its argument would be an alias of it to autograd.
Tensor scale(const Tensor& x, const Tensor& factor) {
  const char* op = "scale_";
  check_float(op, "x", x);
  check(is_dense(x), "metalcore::", op, ": x must fill its memory");
  check_float32(op, "factor", factor);
  check_same_device(op, "factor", factor, x);
  check(factor.numel() == 1, "metalcore::", op, ": factor must have one element, not ", factor.numel());
  const Tensor nothing = new_tensor({0}, x.scalar_type(), x);
  if (x.numel() == 0) return nothing;
  gpu::note_plan(op, "threads", [] { return std::string("each thread takes some elements, unless the factor is 1"); });
  gpu::record(x, [&](gpu::Recording& recording) {
    recording.kernel("scale_in_place_", suffix(x.scalar_type())).buffer(0, x).buffer(1, factor);
    recording.bytes(2, ScaleParams{.count = static_cast<uint64_t>(x.numel())});
    recording.dispatch_threads({grid_side(std::min(x.numel(), kMostScaling))}, {256});
  });
  return nothing;
}

struct Plan {
  bool threads;
  gpu::Size grid, threadgroup;
};

constexpr uint32_t kMostThreads = 512;

Plan plan_of(const Tensor& on) {
  const uint32_t rows = grid_side(on.sizes()[0]);
  const int64_t length = on.sizes()[1];
  check(length <= INT32_MAX, "metalcore: a row of ", length, " elements is longer than kernels take");
  if (length <= row_tuning(on).thread_row) return {true, {rows}, {256}};
  const int64_t threads = round_up<int64_t>(ceil_div<int64_t>(length, 4), gpu::kSimdWidth);
  const uint32_t most = std::min(kMostThreads, row_tuning(on).looped_threads);
  return {false, {rows}, {static_cast<uint32_t>(std::min<int64_t>(threads, most))}};
}

void check_pair(const char* op, const Tensor& input, const Tensor& target) {
  check_float(op, "input", input);
  check(input.dim() == 2 && input.numel() > 0, "metalcore::", op, ": input must have 2 dimensions and not be empty");
  check_same_device(op, "target", target, input);
  check_same_dtype(op, "target", target, input);
  check_same_shape(op, "target", target, input);
}

DivergenceParams params_of(const char* op, const Tensor& input, const Tensor& target, const Tensor& gradient,
                           double beta, int64_t input_kind, int64_t target_kind, double scale) {
  check(0 <= beta && beta <= 1, "metalcore::", op, ": beta must be in [0, 1], not ", beta);
  check(0 <= input_kind && input_kind <= 1 && 0 <= target_kind && target_kind <= 2, "metalcore::", op,
        ": there is no such kind of input or target");
  const int64_t length = input.sizes()[1];
  return {
      .length = grid_side(length),
      .aligned =
          aligned16(input, length, length) && aligned16(target, length, length) && aligned16(gradient, length, length),
      .input = static_cast<uint32_t>(input_kind),
      .target = static_cast<uint32_t>(target_kind),
      .beta = static_cast<float>(beta),
      .scale = static_cast<float>(scale),
  };
}

void dispatch(gpu::Recording& recording, const Plan& plan) {
  plan.threads ? recording.dispatch_threads(plan.grid, plan.threadgroup)
               : recording.dispatch_threadgroups(plan.grid, plan.threadgroup);
}

void note(const char* op, const Plan& plan) {
  gpu::note_plan(op, plan.threads ? "thread" : "group", [&] {
    return std::string(plan.threads ? "a row is one thread's work" : "a row is walked by one threadgroup");
  });
}

// The scales of rows, or of all.
void check_scale(const char* op, const Tensor& scale, const Tensor& input) {
  check_float32(op, "scale", scale);
  check_same_device(op, "scale", scale, input);
  check((scale.numel() == 1 || scale.numel() == input.sizes()[0]) && scale.is_contiguous(), "metalcore::", op,
        ": scale must have one element, or one for each row");
}

// The divergences of rows; and for the gradient the two normalizations and the sum of derivatives of each row.
std::tuple<Tensor, Tensor> divergence(const Tensor& input_, const Tensor& target_, double beta, int64_t input_kind,
                                      int64_t target_kind, double scale) {
  const char* op = "divergence";
  check_pair(op, input_, target_);
  const Tensor input = as_contiguous(input_), target = as_contiguous(target_);
  const int64_t rows = input.sizes()[0];
  const Tensor losses = new_tensor({rows}, ScalarType::Float, input);
  const Tensor saved = new_tensor({rows, DIVERGENCE_SAVED}, ScalarType::Float, input);
  const DivergenceParams params = params_of(op, input, target, input, beta, input_kind, target_kind, scale);
  const Plan plan = plan_of(input);
  note(op, plan);
  gpu::record(losses, [&](gpu::Recording& recording) {
    recording.kernel("divergence_", plan.threads ? "thread_" : "group_", suffix(input.scalar_type()));
    recording.buffer(0, input).buffer(1, target).buffer(2, losses).buffer(3, saved).bytes(4, params);
    dispatch(recording, plan);
  });
  return {losses, saved};
}

// The gradient of sum(grad * divergence) by the input.
Tensor divergence_backward(const Tensor& grad_, const Tensor& input_, const Tensor& target_, const Tensor& saved,
                           double beta, int64_t input_kind, int64_t target_kind, double scale) {
  const char* op = "divergence_backward";
  check_pair(op, input_, target_);
  const Tensor grad = as_contiguous(grad_), input = as_contiguous(input_), target = as_contiguous(target_);
  check_scale(op, grad, input);
  check_float32(op, "saved", saved);
  check_same_device(op, "saved", saved, input);
  check(saved.numel() == DIVERGENCE_SAVED * input.sizes()[0] && saved.is_contiguous(), "metalcore::", op,
        ": saved does not belong to input");
  const Tensor gradient = new_like(input);
  DivergenceParams params = params_of(op, input, target, gradient, beta, input_kind, target_kind, scale);
  params.scale_of_row = grad.numel() > 1;
  const Plan plan = plan_of(input);
  note(op, plan);
  gpu::record(gradient, [&](gpu::Recording& recording) {
    recording.kernel("divergence_backward_", plan.threads ? "thread_" : "group_", suffix(input.scalar_type()));
    recording.buffer(0, grad).buffer(1, input).buffer(2, target).buffer(3, saved).buffer(4, gradient);
    recording.bytes(5, params);
    dispatch(recording, plan);
  });
  return gradient;
}

// Puts the gradient of sum(scale * divergence) in the place of the input, and returns the divergences of rows.
Tensor divergence_replace(const Tensor& input, const Tensor& target_, const Tensor& scales, double beta,
                          int64_t input_kind, int64_t target_kind, double scale) {
  const char* op = "divergence_";
  check_pair(op, input, target_);
  check(input.is_contiguous(), "metalcore::", op, ": input must be contiguous");
  check_scale(op, scales, input);
  const Tensor target = as_contiguous(target_);
  const Tensor losses = new_tensor({input.sizes()[0]}, ScalarType::Float, input);
  DivergenceParams params = params_of(op, input, target, input, beta, input_kind, target_kind, scale);
  params.scale_of_row = scales.numel() > 1;
  const Plan plan = plan_of(input);
  note(op, plan);
  gpu::record(losses, [&](gpu::Recording& recording) {
    recording.kernel("divergence_replace_", plan.threads ? "thread_" : "group_", suffix(input.scalar_type()));
    recording.buffer(0, input).buffer(1, target).buffer(2, scales).buffer(3, losses).bytes(4, params);
    dispatch(recording, plan);
  });
  return losses;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("scale_(Tensor(a!) x, Tensor factor) -> Tensor");
  m.def(
      "divergence(Tensor input, Tensor target, float beta, int input_kind, int target_kind, float scale) "
      "-> (Tensor, Tensor)");
  m.def(
      "divergence_backward(Tensor grad, Tensor input, Tensor target, Tensor saved, float beta, int input_kind, "
      "int target_kind, float scale) -> Tensor");
  m.def(
      "divergence_(Tensor(a!) input, Tensor target, Tensor scales, float beta, int input_kind, int target_kind, "
      "float scale) -> Tensor");
  // Made of products and of the operators here, in Python (metalcore/loss).
  m.def(
      "fused_linear_divergence(Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, "
      "Tensor scales, float beta, float scale, int chunk, bool hidden_wanted, bool weight_wanted) "
      "-> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::scale>("scale_");
  m.impl<&metalcore::divergence>("divergence");
  m.impl<&metalcore::divergence_backward>("divergence_backward");
  m.impl<&metalcore::divergence_replace>("divergence_");
}
