// adamw_: one step of AdamW on many parameters, in place.
#include "../../kernels/adamw.h"
#include "../gpu/tuning.h"
#include "common.h"
#include "plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

using Tensors = std::vector<Tensor>;

constexpr size_t kPointers = 512;  // that a table of device pointers holds
constexpr size_t kArrays = 5;      // that a parameter has in the table: AdamWPointers in the kernel
constexpr size_t kPerDispatch = kPointers / kArrays;

// ---------------------------------------------------------------- plan

struct AdamWDispatch {
  size_t first, count;  // into the list of sizes
  uint32_t threadgroups;
};

struct AdamWPlan {
  std::vector<AdamWTensor> tensors;
  std::vector<AdamWDispatch> dispatches;
};

// Cuts a list of parameters, none of them empty, into dispatches of as many as a table of pointers can hold.
AdamWPlan plan_adamw(const std::vector<uint64_t>& numels) {
  AdamWPlan plan;
  plan.tensors.reserve(numels.size());
  for (uint64_t numel : numels) {
    const uint64_t chunks = ceil_div<uint64_t>(numel, ADAMW_CHUNK);
    if (plan.dispatches.empty() || plan.dispatches.back().count == kPerDispatch ||
        plan.dispatches.back().threadgroups + chunks > UINT32_MAX / ADAMW_THREADS)
      plan.dispatches.push_back({plan.tensors.size(), 0, 0});
    AdamWDispatch& dispatch = plan.dispatches.back();
    plan.tensors.push_back({numel, dispatch.threadgroups, 0});
    dispatch.count += 1;
    dispatch.threadgroups += grid_side(static_cast<int64_t>(chunks));
  }
  return plan;
}

std::string adamw_kernel(ScalarType dtype, bool amsgrad) {
  return kernel_name(amsgrad ? "adamw_amsgrad" : "adamw", dtype);
}

// Shapes are those of the parameters.
Explanation explain_adamw(const Request& request) {
  std::vector<uint64_t> numels;
  for (const auto& shape : request.shapes) {
    const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    if (numel > 0) numels.push_back(static_cast<uint64_t>(numel));
  }
  const AdamWPlan plan = plan_adamw(numels);
  const bool amsgrad = request.option("amsgrad", "False") == "True";
  const bool on_device = request.option("capturable", "False") == "True" || request.option("fused", "None") == "True";
  Explanation explanation;
  explanation.variant = on_device ? "multi_tensor, steps on the device" : "multi_tensor, steps on the host";
  explanation.why = std::to_string(numels.size()) + " parameters that are not empty, at most " +
                    std::to_string(kPerDispatch) + " in a dispatch; a threadgroup updates " +
                    std::to_string(ADAMW_CHUNK) + " elements";
  const uint32_t steps = static_cast<uint32_t>(request.shapes.size());
  for (uint32_t first = 0; on_device && first < steps; first += kPointers)
    explanation.steps.push_back({"adamw_scalars", {std::min<uint32_t>(kPointers, steps - first)}, {64}, true});
  for (const AdamWDispatch& dispatch : plan.dispatches)
    explanation.steps.push_back({adamw_kernel(request.dtype, amsgrad), {dispatch.threadgroups}, {ADAMW_THREADS}});
  return explanation;
}

const ExplainOp explain_adamw_op("adamw", explain_adamw);

// ---------------------------------------------------------------- arguments

struct Hyperparameters {
  double lr, beta1, beta2, weight_decay, eps;
  bool maximize;
  std::optional<Tensor> lr_tensor, grad_scale, found_inf;
};

// The tensors of one parameter; max_exp_avg_sq only with amsgrad.
struct Slot {
  Tensor param, grad, exp_avg, exp_avg_sq;
  std::optional<Tensor> max_exp_avg_sq;
};

void check_writable(const char* argument, const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i)
    check(strides[i] != 0 || sizes[i] <= 1, "metalcore::adamw_: ", argument,
          " is to be written, but is an expanded tensor: several of its elements are one memory location");
}

void check_list(const char* argument, const Tensors& tensors, const Tensors& params, ScalarType dtype, bool written) {
  check(tensors.size() == params.size(), "metalcore::adamw_: ", argument, " has ", tensors.size(), " tensors, params ",
        params.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    check(tensor.layout() == torch::headeronly::Layout::Strided, "metalcore::adamw_: ", argument,
          " must not be sparse");
    check_same_device("adamw_", argument, tensor, params[0]);
    check_same_shape("adamw_", argument, tensor, params[i]);
    check(tensor.scalar_type() == dtype, "metalcore::adamw_: ", argument, " must be ", dtype_name(dtype), ", not ",
          dtype_name(tensor.scalar_type()));
    if (written) check_writable(argument, tensor);
  }
}

void check_scalar(const char* argument, const std::optional<Tensor>& tensor, const Tensor& as) {
  if (!tensor) return;
  check_same_device("adamw_", argument, *tensor, as);
  check(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Float, "metalcore::adamw_: ", argument,
        " must be one float32 element");
}

// Whether the steps are in device memory; they are all there or all on the CPU.
bool check_steps(const Tensors& steps, const Tensors& params) {
  check(steps.size() == params.size(), "metalcore::adamw_: state_steps has ", steps.size(), " tensors, params ",
        params.size());
  const bool on_device = !steps[0].is_cpu();
  for (const Tensor& step : steps) {
    check(step.numel() == 1, "metalcore::adamw_: a step must have one element, not shape ", shape_text(step));
    if (on_device) check_same_device("adamw_", "state_steps (unless all are on the CPU)", step, params[0]);
    check(on_device || step.is_cpu(), "metalcore::adamw_: state_steps must be all on the CPU or all on the device");
    const ScalarType dtype = step.scalar_type();
    check(dtype == ScalarType::Float || (dtype == ScalarType::Double && !on_device),
          "metalcore::adamw_: a step must be float32, not ", dtype_name(dtype));
  }
  return on_device;
}

// ---------------------------------------------------------------- layout

// Tensors of one parameter brought to one dense layout, so that one index serves them all. Those that are not in it
// are replaced by copies; write_back() copies the results home.
class Gathered {
 public:
  Gathered(Slot& slot, bool writes_grad) {
    const Tensor param = slot.param;
    Sizes strides = param.strides();
    std::vector<int64_t> contiguous;
    if (!is_dense(param)) {
      const auto sizes = param.sizes();
      contiguous.resize(sizes.size());
      int64_t stride = 1;
      for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) contiguous[i] = stride;
      strides = Sizes(contiguous.data(), contiguous.size());
    }
    place(slot.param, strides, true);
    place(slot.grad, strides, writes_grad);
    place(slot.exp_avg, strides, true);
    place(slot.exp_avg_sq, strides, true);
    if (slot.max_exp_avg_sq) place(*slot.max_exp_avg_sq, strides, true);
  }

  void write_back() {
    for (auto& [home, copy] : copies_) torch::stable::copy_(home, copy);
  }

 private:
  void place(Tensor& tensor, Sizes strides, bool written) {
    const auto sizes = tensor.sizes(), own = tensor.strides();
    bool placed = true;
    for (size_t i = 0; i < sizes.size(); ++i) placed = placed && (own[i] == strides[i] || sizes[i] == 1);
    if (placed) return;
    Tensor copy = new_strided(sizes, strides, tensor.scalar_type(), tensor);
    torch::stable::copy_(copy, tensor);
    if (written) copies_.emplace_back(tensor, copy);
    tensor = copy;
  }

  std::vector<std::pair<Tensor, Tensor>> copies_;
};

// Whether the memory of two parameters overlaps (judged by their spans: a false alarm costs time only).
bool overlap(const std::vector<Slot>& slots) {
  std::vector<std::pair<char*, size_t>> spans;
  spans.reserve(slots.size());
  for (const Slot& slot : slots) {
    const gpu::BufferView view = gpu::view_of(slot.param);
    spans.emplace_back(static_cast<char*>(view.storage) + view.offset, view.span);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i)
    if (spans[i - 1].first + spans[i - 1].second > spans[i].first) return true;
  return false;
}

// ---------------------------------------------------------------- encoding

// Whether a kernel may take all of the slot's arrays as vectors of four.
bool all_aligned4(const Slot& slot) {
  return aligned4(slot.param) && aligned4(slot.grad) && aligned4(slot.exp_avg) && aligned4(slot.exp_avg_sq) &&
         (!slot.max_exp_avg_sq || aligned4(*slot.max_exp_avg_sq));
}

AdamWScalars host_scalars(const Hyperparameters& h, double step) {
  const double correction1 = 1.0 - std::pow(h.beta1, step), correction2 = 1.0 - std::pow(h.beta2, step);
  return {static_cast<float>(1.0 - h.lr * h.weight_decay), static_cast<float>(-h.lr / correction1),
          static_cast<float>(std::sqrt(correction2)), 1.0f, 0};
}

double incremented(const Tensor& step) {
  if (step.scalar_type() == ScalarType::Double) return *static_cast<double*>(step.data_ptr()) += 1.0;
  return *static_cast<float*>(step.data_ptr()) += 1.0f;
}

// log(beta) as a sum of two floats. exp(-1e4) is zero in float32, as a power of beta = 0 is.
std::pair<float, float> log_parts(double beta) {
  const double value = std::max(std::log(beta), -1e4);
  const float high = static_cast<float>(value);
  return {high, static_cast<float>(value - high)};
}

// Elements [first, first + count) of an array of AdamWScalars.
gpu::BufferView part_of(const Tensor& scalars, size_t first, size_t count) {
  const gpu::BufferView all = gpu::view_of(scalars);
  return {all.storage, all.offset + first * sizeof(AdamWScalars), count * sizeof(AdamWScalars)};
}

gpu::BufferView view_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? gpu::view_of(*tensor) : gpu::BufferView{nullptr, 0, 0};
}

// Increments the steps and computes the scalars of steps[i] into element i of `scalars`.
void encode_scalars(gpu::Encoder& encoder, const Tensors& steps, const Tensor& scalars, const Hyperparameters& h) {
  const std::array<gpu::BufferView, 3> single = {view_or_null(h.lr_tensor), view_or_null(h.grad_scale),
                                                 view_or_null(h.found_inf)};
  const auto [log_beta1, log_beta1_low] = log_parts(h.beta1);
  const auto [log_beta2, log_beta2_low] = log_parts(h.beta2);
  const AdamWStepParams params = {static_cast<float>(h.lr), static_cast<float>(h.weight_decay), log_beta1,
                                  log_beta1_low, log_beta2, log_beta2_low};
  std::vector<gpu::BufferView> views;
  for (const Tensor& step : steps) views.push_back(gpu::view_of(step));
  for (size_t first = 0; first < steps.size(); first += kPointers) {
    const size_t count = std::min(kPointers, steps.size() - first);
    encoder.kernel("adamw_scalars")
        .pointers(0, &views[first], count)
        .buffer(1, part_of(scalars, first, count))
        .pointers(2, single.data(), single.size())
        .bytes(3, params);
    encoder.dispatch_threads({static_cast<uint32_t>(count)}, {64});
  }
}

// Updates the slots. The scalars of slots[i] are at on_host[i], or in element first + i of on_device.
void encode_updates(gpu::Encoder& encoder, const Slot* slots, size_t count, const AdamWScalars* on_host,
                    const std::optional<Tensor>& on_device, size_t first, const Hyperparameters& h) {
  std::vector<gpu::BufferView> views;
  std::vector<uint64_t> numels;
  views.reserve(count * kArrays);
  numels.reserve(count);
  for (const Slot* slot = slots; slot != slots + count; ++slot) {
    numels.push_back(static_cast<uint64_t>(slot->param.numel()));
    for (const Tensor* tensor : {&slot->param, &slot->grad, &slot->exp_avg, &slot->exp_avg_sq})
      views.push_back(gpu::view_of(*tensor));
    views.push_back(view_or_null(slot->max_exp_avg_sq));
  }

  AdamWPlan plan = plan_adamw(numels);
  if (gpu::tuning(slots->param).adamw_vectors)
    for (size_t i = 0; i < count; ++i) plan.tensors[i].vectors = all_aligned4(slots[i]);
  const std::string kernel = adamw_kernel(slots->param.scalar_type(), slots->max_exp_avg_sq.has_value());
  AdamWParams params = {0,
                        h.maximize ? -1.0f : 1.0f,
                        static_cast<float>(h.beta2),
                        static_cast<float>(1.0 - h.beta1),
                        static_cast<float>(1.0 - h.beta2),
                        static_cast<float>(h.eps),
                        h.grad_scale.has_value()};
  for (const AdamWDispatch& dispatch : plan.dispatches) {
    params.tensors = static_cast<uint32_t>(dispatch.count);
    encoder.kernel(kernel)
        .pointers(0, &views[dispatch.first * kArrays], dispatch.count * kArrays)
        .bytes(1, &plan.tensors[dispatch.first], dispatch.count * sizeof(AdamWTensor))
        .bytes(3, params);
    if (on_device)
      encoder.buffer(2, part_of(*on_device, first + dispatch.first, dispatch.count));
    else
      encoder.bytes(2, on_host + dispatch.first, dispatch.count * sizeof(AdamWScalars));
    encoder.dispatch_threadgroups({dispatch.threadgroups}, {ADAMW_THREADS});
  }
}

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs,
            Tensors state_steps, double lr, double beta1, double beta2, double weight_decay, double eps, bool maximize,
            std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const Hyperparameters h = {lr, beta1, beta2, weight_decay, eps, maximize, lr_tensor, grad_scale, found_inf};
  if (params.empty()) return;
  check_float("adamw_", "params", params[0]);
  const ScalarType dtype = params[0].scalar_type();
  const bool amsgrad = !max_exp_avg_sqs.empty();
  check_list("params", params, params, dtype, true);
  check_list("grads", grads, params, dtype, grad_scale.has_value());
  check_list("exp_avgs", exp_avgs, params, ScalarType::Float, true);
  check_list("exp_avg_sqs", exp_avg_sqs, params, ScalarType::Float, true);
  if (amsgrad) check_list("max_exp_avg_sqs", max_exp_avg_sqs, params, ScalarType::Float, true);
  check(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "metalcore::adamw_: betas must be in [0, 1)");
  const bool steps_on_device = check_steps(state_steps, params);
  check_scalar("lr_tensor", lr_tensor, params[0]);
  check_scalar("grad_scale", grad_scale, params[0]);
  check_scalar("found_inf", found_inf, params[0]);
  check(steps_on_device || !(lr_tensor || grad_scale || found_inf),
        "metalcore::adamw_: lr_tensor, grad_scale and found_inf need state_steps on the device");

  // Steps in the order of the slots; those of empty parameters, which only count, come last.
  std::vector<Slot> slots;
  Tensors steps, idle_steps;
  slots.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].numel() == 0) {
      idle_steps.push_back(state_steps[i]);
      continue;
    }
    slots.push_back({params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], std::nullopt});
    if (amsgrad) slots.back().max_exp_avg_sq = max_exp_avg_sqs[i];
    steps.push_back(state_steps[i]);
  }
  steps.insert(steps.end(), idle_steps.begin(), idle_steps.end());

  std::vector<AdamWScalars> on_host;
  std::optional<Tensor> on_device;
  if (steps_on_device) {
    const int64_t words = static_cast<int64_t>(steps.size() * sizeof(AdamWScalars) / sizeof(float));
    on_device = new_tensor(Sizes(&words, 1), ScalarType::Float, params[0]);
  } else {
    for (const Tensor& step : steps) on_host.push_back(host_scalars(h, incremented(step)));
  }

  // Parameters that overlap are updated one after the other, as PyTorch's loop would.
  const size_t at_once = overlap(slots) ? 1 : slots.size();
  size_t first = 0;
  do {
    std::vector<Gathered> gathered;
    gathered.reserve(at_once);
    for (size_t i = 0; i < at_once; ++i) gathered.emplace_back(slots[first + i], grad_scale.has_value());
    gpu::encode(params[0], [&](gpu::Encoder& encoder) {
      if (on_device && first == 0) encode_scalars(encoder, steps, *on_device, h);
      if (at_once > 0) encode_updates(encoder, &slots[first], at_once, on_host.data() + first, on_device, first, h);
    });
    for (Gathered& one : gathered) one.write_back();
    first += at_once;
  } while (first < slots.size());
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
      "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, *, float lr, float beta1, float beta2, "
      "float weight_decay, float eps, bool maximize, Tensor? lr_tensor=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None) -> ()");
}

METALCORE_KERNELS(m) {
  m.impl("adamw_", TORCH_BOX(&metalcore::adamw_));
}
