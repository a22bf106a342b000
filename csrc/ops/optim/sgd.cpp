// sgd_: one step of stochastic gradient descent on many parameters, in place.
#include "../../../kernels/optim/sgd.h"
#include "multi_tensor.h"

namespace metalcore {
namespace {

void sgd_(const TensorList& params, const TensorList& grads, const TensorList& momentum_buffers, double lr,
          double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first,
          const MaybeTensor& lr_tensor, const MaybeTensor& grad_scale, const MaybeTensor& found_inf) {
  if (params.empty()) return;
  const DeviceScalars scalars = {lr_tensor, grad_scale, found_inf};
  ParameterArrays arrays(
      "sgd_",
      {{.name = "params", .tensors = params, .written = true},
       {.name = "grads", .tensors = grads, .written = grad_scale.has_value()},
       {.name = "momentum_buffers", .tensors = momentum_buffers, .written = true, .state = true, .optional = true}});
  const Tensor& param = arrays.first();
  check(arrays.state_dtype() == param.scalar_type(), "metalcore::sgd_: momentum_buffers must be ",
        dtype_name(param.scalar_type()), ", not ", dtype_name(arrays.state_dtype()));
  scalars.check("sgd_", param);
  SgdParams p = {.grid = {},
                 .lr = static_cast<float>(lr),
                 .grad_sign = maximize ? -1.0f : 1.0f,
                 .weight_decay = static_cast<float>(weight_decay),
                 .momentum = static_cast<float>(momentum),
                 .gradient_weight = first ? 1.0f : static_cast<float>(1.0 - dampening),
                 .first = first,
                 .nesterov = nesterov,
                 .unscale = grad_scale.has_value()};
  gpu::note_plan("sgd", "multi_tensor", [&] { return plan_reason(arrays); });
  if (first && !momentum_buffers.empty()) gpu::note_host_step("sgd_ begins its momentum, as only the first step does");
  record_updates(arrays, [&](gpu::Recording& recording, const OptimPlan& plan) {
    for (const OptimDispatch& dispatch : plan.dispatches) {
      p.grid = dispatch.grid;
      dispatch.begin(recording, kernel_name("sgd", param.scalar_type()), arrays.arrays()).bytes(3, p);
      scalars.bind(recording, 2);
      dispatch.end(recording);
    }
  });
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, *, float lr, float momentum, "
      "float dampening, float weight_decay, bool nesterov, bool maximize, bool first, Tensor? lr_tensor=None, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::sgd_>("sgd_"); }
