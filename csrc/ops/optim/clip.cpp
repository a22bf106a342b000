// grad_norm: the norm of many gradients taken together. grad_clip_norm_, grad_clip_value_: clip them in place.
#include "../../../kernels/optim/optim.h"
#include "multi_tensor.h"

#include <cmath>
#include <limits>

namespace metalcore {
namespace {

uint32_t kind_of_norm(double power) {
  check(power > 0, "metalcore::grad_norm: norm_type must be positive, not ", power);
  if (power == 2) return NORM_SQUARES;
  if (power == 1) return NORM_ABSOLUTE;
  return power == std::numeric_limits<double>::infinity() ? NORM_LARGEST : NORM_POWERS;
}

// The total's one threadgroup adds up about so many sums in the time of a few loads.
constexpr uint64_t kMostPartials = 4096;

Tensor grad_norm(const TensorList& grads, double norm_type) {
  ParameterArrays arrays("grad_norm", {{.name = "grads", .tensors = grads, .written = false}});
  const Tensor& first = arrays.first();
  const uint32_t kind = kind_of_norm(norm_type);
  const auto power = static_cast<float>(norm_type);
  const size_t count = arrays.slots().size();
  const std::vector<GatheredParameter> gathered = arrays.gather(0, count);
  const OptimPlan plan(arrays, 0, count, kMostPartials);
  const Tensor total = new_tensor(Sizes(), ScalarType::Float, first);
  const auto partials_count = static_cast<int64_t>(plan.threadgroups());
  const int64_t room = std::max<int64_t>(partials_count, 1);
  const Tensor partials = new_tensor(Sizes(&room, 1), ScalarType::Float, first);
  gpu::note_plan("grad_norm", "multi_tensor", [&] { return plan_reason(arrays); });
  gpu::record(first, [&](gpu::Recording& recording) {
    NormParams p = {.grid = {}, .kind = kind, .power = power, .first_partial = 0};
    for (const OptimDispatch& dispatch : plan.dispatches) {
      p.grid = dispatch.grid;
      dispatch.begin(recording, kernel_name("grad_norm", first.scalar_type()), 1).buffer(2, partials).bytes(3, p);
      dispatch.end(recording);
      p.first_partial += dispatch.threadgroups;
    }
    const NormTotalParams totals = {.kind = kind, .power = power, .partials = static_cast<uint32_t>(partials_count)};
    recording.kernel("grad_norm_total").buffer(0, partials).buffer(1, total).bytes(2, totals);
    recording.dispatch_threadgroups({1}, {NORM_TOTAL_THREADS});
  });
  return total;
}

// Records a kernel that changes the gradients, and binds what it needs besides.
template <typename Bind>
void clip(ParameterArrays& arrays, const char* kernel, double limit, const Bind& bind) {
  ClipParams p = {.grid = {}, .limit = static_cast<float>(limit)};
  gpu::note_plan(kernel, "multi_tensor", [&] { return plan_reason(arrays); });
  record_updates(arrays, [&](gpu::Recording& recording, const OptimPlan& plan) {
    for (const OptimDispatch& dispatch : plan.dispatches) {
      p.grid = dispatch.grid;
      bind(dispatch.begin(recording, kernel_name(kernel, arrays.first().scalar_type()), 1).bytes(3, p));
      dispatch.end(recording);
    }
  });
}

void grad_clip_norm_(const TensorList& grads, const Tensor& norm, double max_norm) {
  if (grads.empty()) return;
  ParameterArrays arrays("grad_clip_norm_", {{.name = "grads", .tensors = grads, .written = true}});
  check_same_device("grad_clip_norm_", "norm", norm, arrays.first());
  check_float32("grad_clip_norm_", "norm", norm);
  check(norm.numel() == 1, "metalcore::grad_clip_norm_: norm must have one element, not shape ", shape_text(norm));
  clip(arrays, "grad_clip_norm", max_norm, [&](gpu::Recording& recording) { recording.buffer(2, norm); });
}

void grad_clip_value_(const TensorList& grads, double clip_value) {
  if (grads.empty()) return;
  ParameterArrays arrays("grad_clip_value_", {{.name = "grads", .tensors = grads, .written = true}});
  clip(arrays, "grad_clip_value", clip_value, [](gpu::Recording&) {});
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("grad_norm(Tensor[] grads, float norm_type) -> Tensor");
  m.def("grad_clip_norm_(Tensor(a!)[] grads, Tensor norm, float max_norm) -> ()");
  m.def("grad_clip_value_(Tensor(a!)[] grads, float clip_value) -> ()");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::grad_norm>("grad_norm");
  m.impl<&metalcore::grad_clip_norm_>("grad_clip_norm_");
  m.impl<&metalcore::grad_clip_value_>("grad_clip_value_");
}
