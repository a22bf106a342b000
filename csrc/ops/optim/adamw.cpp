// adamw_: one step of AdamW on many parameters, in place.
#include "../../../kernels/optim/optim.h"
#include "multi_tensor.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

struct Hyperparameters {
  double lr, beta1, beta2, weight_decay, eps;
  bool maximize;
  std::optional<int64_t> seed;
  DeviceScalars device;
};

std::string adamw_kernel(ScalarType dtype, ScalarType state_dtype, bool amsgrad, bool stochastic) {
  const std::string stem = std::string("adamw") + (amsgrad ? "_amsgrad" : "") + (stochastic ? "_stochastic_" : "_");
  return kernel_name((stem + suffix(dtype)).c_str(), state_dtype);
}

// ---------------------------------------------------------------- steps

// Steps on the CPU count in their own dtype, as in PyTorch's loop.
bool counts_on_host(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long: return true;
    default: return false;
  }
}

// Returns whether the steps are in device memory. All must be there, or all on the CPU.
bool check_steps(const TensorList& steps, const ParameterArrays& arrays, size_t params) {
  check(steps.size() == params, "metalcore::adamw_: state_steps has ", steps.size(), " tensors, params ", params);
  const bool on_device = !steps.tensor(0).is_cpu();
  const TensorKind first = kind_of(steps[0]);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i > 0 && numel_of(steps[i]) == 1 && kind_of(steps[i]) == first) continue;
    const Tensor step = steps.tensor(i);
    check(step.numel() == 1, "metalcore::adamw_: a step must have one element, not shape ", shape_text(step));
    if (on_device) check_same_device("adamw_", "state_steps (unless all are on the CPU)", step, arrays.first());
    check(on_device || step.is_cpu(), "metalcore::adamw_: state_steps must be all on the CPU or all on the device");
    const ScalarType dtype = step.scalar_type();
    check(on_device ? dtype == ScalarType::Float : counts_on_host(dtype), "metalcore::adamw_: a step must be ",
          on_device ? "float32, not " : "a float or an integer, not ", dtype_name(dtype));
  }
  return on_device;
}

// Puts the steps in the order of the slots. The steps of empty parameters, which only count, come last.
std::vector<AtenTensorHandle> in_order(const TensorList& steps, const std::vector<ParameterSlot>& slots) {
  std::vector<AtenTensorHandle> ordered, idle;
  ordered.reserve(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool has_slot = ordered.size() < slots.size() && slots[ordered.size()].parameter == i;
    (has_slot ? ordered : idle).push_back(steps[i]);
  }
  ordered.insert(ordered.end(), idle.begin(), idle.end());
  return ordered;
}

template <typename F>
void with_value(AtenTensorHandle step, const F& f) {
  void* data = nullptr;
  int32_t dtype = -1;
  aoti_torch_get_data_ptr(step, &data);
  aoti_torch_get_dtype(step, &dtype);
  if (dtype == aoti_torch_dtype_float32()) return f(*static_cast<float*>(data));
  if (dtype == aoti_torch_dtype_float64()) return f(*static_cast<double*>(data));
  if (dtype == aoti_torch_dtype_float16()) return f(*static_cast<c10::Half*>(data));
  if (dtype == aoti_torch_dtype_bfloat16()) return f(*static_cast<c10::BFloat16*>(data));
  if (dtype == aoti_torch_dtype_uint8()) return f(*static_cast<uint8_t*>(data));
  if (dtype == aoti_torch_dtype_int8()) return f(*static_cast<int8_t*>(data));
  if (dtype == aoti_torch_dtype_int16()) return f(*static_cast<int16_t*>(data));
  if (dtype == aoti_torch_dtype_int32()) return f(*static_cast<int32_t*>(data));
  f(*static_cast<int64_t*>(data));
}
double next(AtenTensorHandle step) {
  double result = 0;
  with_value(step, [&](auto value) { result = static_cast<double>(static_cast<decltype(value)>(value + 1)); });
  return result;
}
void increment(AtenTensorHandle step) {
  with_value(step, [](auto& value) { value = static_cast<std::decay_t<decltype(value)>>(value + 1); });
}

AdamWScalars host_scalars(const Hyperparameters& h, double step) {
  const double correction1 = 1.0 - std::pow(h.beta1, step), correction2 = 1.0 - std::pow(h.beta2, step);
  return {static_cast<float>(1.0 - h.lr * h.weight_decay),
          static_cast<float>(-h.lr / correction1),
          static_cast<float>(std::sqrt(correction2)),
          1.0f,
          0,
          static_cast<uint32_t>(step)};
}

// The scalars of the next values of steps[first] to steps[end - 1]. Most parameters have the same step.
std::vector<AdamWScalars> host_scalars(const std::vector<AtenTensorHandle>& steps, size_t first, size_t end,
                                       const Hyperparameters& h) {
  std::vector<AdamWScalars> scalars;
  scalars.reserve(end - first);
  double last = 0;
  for (size_t i = first; i < end; ++i) {
    const double step = next(steps[i]);
    scalars.push_back(!scalars.empty() && step == last ? scalars.back() : host_scalars(h, step));
    last = step;
  }
  return scalars;
}

// ---------------------------------------------------------------- encoding

// log(beta) as a sum of two floats. exp(-1e4) is zero in float32, like a power of beta = 0.
std::pair<float, float> log_parts(double beta) {
  const double value = std::max(std::log(beta), -1e4);
  const float high = static_cast<float>(value);
  return {high, static_cast<float>(value - high)};
}

// Elements [first, first + count) of an array of AdamWScalars.
gpu::BufferView part_of(const Tensor& scalars, size_t first, size_t count) {
  const gpu::BufferView view = gpu::view_of(scalars);
  return {view.storage, view.offset + first * sizeof(AdamWScalars), count * sizeof(AdamWScalars), view.tensor};
}

// Increments steps[begin] to steps[end - 1] and computes the scalars of steps[i] into element i of `scalars`.
void record_scalars(gpu::Recording& recording, const std::vector<AtenTensorHandle>& steps, size_t begin, size_t end,
                    const Tensor& scalars, const Hyperparameters& h) {
  const auto [log_beta1, log_beta1_low] = log_parts(h.beta1);
  const auto [log_beta2, log_beta2_low] = log_parts(h.beta2);
  const AdamWStepParams params = {
      static_cast<float>(h.lr), static_cast<float>(h.weight_decay), log_beta1, log_beta1_low, log_beta2, log_beta2_low};
  std::vector<gpu::BufferView> views;
  views.reserve(end - begin);
  for (size_t i = begin; i < end; ++i) views.push_back(gpu::view_of(steps[i], sizeof(float), sizeof(float)));
  for (size_t first = begin; first < end; first += kPointers) {
    const size_t count = std::min(kPointers, end - first);
    recording.kernel("adamw_scalars")
        .pointers(0, &views[first - begin], count)
        .buffer(1, part_of(scalars, first, count))
        .bytes(3, params);
    h.device.bind(recording, 2);
    recording.dispatch_threads({static_cast<uint32_t>(count)}, {64});
  }
}

// Updates the slots of a plan. The scalars of slot i are element i of `device_scalars`, or else element i - first of
// `scalars_of_host`.
void record_steps(gpu::Recording& recording, const ParameterArrays& arrays, const OptimPlan& plan, size_t first,
                  const std::vector<AdamWScalars>& scalars_of_host, const MaybeTensor& device_scalars,
                  const Hyperparameters& h, bool amsgrad) {
  const std::string kernel =
      adamw_kernel(arrays.first().scalar_type(), arrays.state_dtype(), amsgrad, h.seed.has_value());
  const auto seed = static_cast<uint64_t>(h.seed.value_or(0));
  AdamWParams params = {{},
                        static_cast<uint32_t>(seed),
                        static_cast<uint32_t>(seed >> 32),
                        h.maximize ? -1.0f : 1.0f,
                        static_cast<float>(h.beta2),
                        static_cast<float>(1.0 - h.beta1),
                        static_cast<float>(1.0 - h.beta2),
                        static_cast<float>(h.eps),
                        h.device.grad_scale.has_value()};
  for (const OptimDispatch& dispatch : plan.dispatches) {
    params.grid = dispatch.grid;
    dispatch.begin(recording, kernel, arrays.arrays()).bytes(3, params);
    if (device_scalars)
      recording.buffer(2, part_of(*device_scalars, dispatch.first, dispatch.count));
    else
      recording.bytes(2, &scalars_of_host[dispatch.first - first], dispatch.count * sizeof(AdamWScalars));
    dispatch.end(recording);
  }
}

void adamw_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
            const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs, const TensorList& state_steps, double lr,
            double beta1, double beta2, double weight_decay, double eps, bool maximize, const MaybeTensor& lr_tensor,
            const MaybeTensor& grad_scale, const MaybeTensor& found_inf, std::optional<int64_t> seed) {
  if (params.empty()) return;
  const Hyperparameters h = {lr, beta1, beta2, weight_decay, eps, maximize, seed, {lr_tensor, grad_scale, found_inf}};
  ParameterArrays arrays("adamw_", {{"params", params, true},
                                    {"grads", grads, grad_scale.has_value()},
                                    {"exp_avgs", exp_avgs, true, true},
                                    {"exp_avg_sqs", exp_avg_sqs, true, true},
                                    {"max_exp_avg_sqs", max_exp_avg_sqs, true, true, true}});
  const bool amsgrad = !max_exp_avg_sqs.empty();
  const Tensor& param = arrays.first();
  check(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "metalcore::adamw_: betas must be in [0, 1)");
  check(!seed || (param.scalar_type() == ScalarType::BFloat16 && arrays.state_dtype() != ScalarType::Half),
        "metalcore::adamw_: a seed, for stochastic rounding, needs bfloat16 params, not ",
        dtype_name(param.scalar_type()));
  const bool steps_on_device = check_steps(state_steps, arrays, params.size());
  h.device.check("adamw_", param);
  check(steps_on_device || !h.device.any(),
        "metalcore::adamw_: lr_tensor, grad_scale and found_inf need state_steps on the device");

  gpu::note_plan("adamw", steps_on_device ? "multi_tensor, steps on the device" : "multi_tensor, steps on the host",
                 [&] { return plan_reason(arrays); });
  const std::vector<AtenTensorHandle> steps = in_order(state_steps, arrays.slots());
  std::vector<AdamWScalars> scalars_of_host;
  MaybeTensor device_scalars;
  if (!steps_on_device)
    gpu::note_host_step("adamw_ counts its steps on the host; capturable=True has them counted on the device");
  if (steps_on_device) {
    const int64_t words = static_cast<int64_t>(steps.size() * sizeof(AdamWScalars) / sizeof(float));
    device_scalars = new_tensor(Sizes(&words, 1), ScalarType::Float, param);
  }

  // Parameters that overlap, or share a step or a moment, are updated one after the other, as in PyTorch's loop,
  // because each needs the results of the one before. The steps of empty parameters come last.
  const size_t slots = arrays.slots().size();
  const size_t at_once = arrays.overlap() || arrays.share_state(steps) ? 1 : steps.size();
  for (size_t first = 0; first < steps.size(); first += at_once) {
    const size_t end = first + at_once, updates = std::min(end, slots) - std::min(first, slots);
    std::vector<GatheredParameter> gathered = arrays.gather(first, updates);
    if (!device_scalars) scalars_of_host = host_scalars(steps, first, end, h);
    const OptimPlan plan(arrays, first, updates);
    gpu::record(param, [&](gpu::Recording& recording) {
      if (device_scalars) record_scalars(recording, steps, first, end, *device_scalars, h);
      record_steps(recording, arrays, plan, first, scalars_of_host, device_scalars, h, amsgrad);
    });
    if (!device_scalars)  // last, so that an error before it has changed nothing
      for (size_t i = first; i < end; ++i) increment(steps[i]);
    for (GatheredParameter& parameter : gathered) parameter.write_back();
  }
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
      "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, *, float lr, float beta1, float beta2, "
      "float weight_decay, float eps, bool maximize, Tensor? lr_tensor=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, int? seed=None) -> ()");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::adamw_>("adamw_"); }
