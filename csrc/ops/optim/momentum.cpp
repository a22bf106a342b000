// Optimizers whose one state is a momentum. sgd_ is one step of stochastic gradient descent on many parameters, and
// lion_ one of Lion, both in place.
#include "../../../kernels/optim/optim.h"
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

void lion_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, double lr, double beta1,
           double beta2, double weight_decay, bool maximize, const MaybeTensor& lr_tensor,
           const MaybeTensor& grad_scale, const MaybeTensor& found_inf) {
  if (params.empty()) return;
  const DeviceScalars scalars = {lr_tensor, grad_scale, found_inf};
  ParameterArrays arrays("lion_", {{.name = "params", .tensors = params, .written = true},
                                   {.name = "grads", .tensors = grads, .written = grad_scale.has_value()},
                                   {.name = "exp_avgs", .tensors = exp_avgs, .written = true, .state = true}});
  const Tensor& param = arrays.first();
  scalars.check("lion_", param);
  LionParams p = {.grid = {},
                  .lr = static_cast<float>(lr),
                  .weight_decay = static_cast<float>(weight_decay),
                  .beta1 = static_cast<float>(beta1),
                  .beta2 = static_cast<float>(beta2),
                  .one_minus_beta1 = static_cast<float>(1.0 - beta1),
                  .one_minus_beta2 = static_cast<float>(1.0 - beta2),
                  .grad_sign = maximize ? -1.0f : 1.0f,
                  .unscale = grad_scale.has_value()};
  const std::string stem = kernel_name("lion", param.scalar_type());
  gpu::note_plan("lion", "multi_tensor", [&] { return plan_reason(arrays); });
  record_updates(arrays, [&](gpu::Recording& recording, const OptimPlan& plan) {
    for (const OptimDispatch& dispatch : plan.dispatches) {
      p.grid = dispatch.grid;
      dispatch.begin(recording, kernel_name(stem.c_str(), arrays.state_dtype()), arrays.arrays()).bytes(3, p);
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
  m.def(
      "lion_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, *, float lr, float beta1, float beta2, "
      "float weight_decay, bool maximize, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) "
      "-> ()");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::sgd_>("sgd_");
  m.impl<&metalcore::lion_>("lion_");
}
