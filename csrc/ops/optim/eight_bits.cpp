// update_8bit_: one step of an optimizer whose states have 8 bits, on many parameters, in place.
#include "../../../kernels/optim/optim.h"
#include "multi_tensor.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

// The states of one parameter, in the order of their memory, which is that of the parameter's.
struct States {
  const TensorList &first, &second, &first_scales, &second_scales;

  void check_slot(const ParameterSlot& slot, const Tensor& param) const {
    const auto blocks = static_cast<int64_t>(ceil_div<uint64_t>(slot.numel, OPTIM_BLOCK));
    check_list("states1", first, slot, ScalarType::Byte, static_cast<int64_t>(slot.numel), param);
    check_list("states2", second, slot, ScalarType::Byte, static_cast<int64_t>(slot.numel), param);
    check_list("absmax1", first_scales, slot, ScalarType::Float, blocks, param);
    check_list("absmax2", second_scales, slot, ScalarType::Float, blocks, param);
  }
  // Appends the views of the kernel's table. A state that the optimizer lacks is the other one.
  void append(std::vector<gpu::BufferView>& views, const ParameterSlot& slot) const {
    const auto view = [&](const TensorList& list, const TensorList& otherwise, size_t item, size_t numel) {
      views.push_back(gpu::view_of((list.empty() ? otherwise : list)[slot.parameter], item, item * numel));
    };
    const auto blocks = ceil_div<uint64_t>(slot.numel, OPTIM_BLOCK);
    view(first, first, 1, slot.numel);
    view(second, first, 1, slot.numel);
    view(first_scales, first_scales, sizeof(float), blocks);
    view(second_scales, first_scales, sizeof(float), blocks);
  }

 private:
  static void check_list(const char* name, const TensorList& list, const ParameterSlot& slot, ScalarType dtype,
                         int64_t numel, const Tensor& param) {
    if (list.empty()) return;
    const Tensor tensor = list.tensor(slot.parameter);
    check_same_device("update_8bit_", name, tensor, param);
    check(tensor.scalar_type() == dtype && tensor.numel() == numel && is_dense(tensor),
          "metalcore::update_8bit_: ", name, " must be ", dtype_name(dtype), ", dense, with ", numel, " elements, not ",
          dtype_name(tensor.scalar_type()), " with ", tensor.numel());
  }
};

EightBitParams parameters(const std::string& algorithm, double lr, double beta1, double beta2, double eps,
                          double weight_decay, double grad_scale, int64_t step) {
  const bool adam = algorithm == "adam";
  const double n = static_cast<double>(step);
  const bool begins = algorithm == "momentum" && step == 1;
  return {.grid = {},
          .beta1 = begins ? 0.0f : static_cast<float>(beta1),
          .beta2 = static_cast<float>(beta2),
          .one_minus_beta1 = static_cast<float>(1.0 - beta1),
          .one_minus_beta2 = static_cast<float>(1.0 - beta2),
          .step_size = static_cast<float>(adam ? lr / (1.0 - std::pow(beta1, n)) : lr),
          .correction = static_cast<float>(adam ? 1.0 / std::sqrt(1.0 - std::pow(beta2, n)) : 1.0),
          .eps = static_cast<float>(eps),
          .decay = static_cast<float>(1.0 - lr * weight_decay),
          .weight_decay = static_cast<float>(weight_decay),
          .grad_scale = static_cast<float>(grad_scale)};
}

void check_code(const char* name, const Tensor& code, const Tensor& param) {
  check_float32("update_8bit_", name, code);
  check_same_device("update_8bit_", name, code, param);
  check(code.numel() == 256 && code.is_contiguous(), "metalcore::update_8bit_: ", name, " must have 256 elements");
}

void update_8bit_(const TensorList& params, const TensorList& grads, const TensorList& states1,
                  const TensorList& states2, const TensorList& absmax1, const TensorList& absmax2,
                  const MaybeTensor& code1, const MaybeTensor& code2, const std::string& algorithm, double lr,
                  double beta1, double beta2, double eps, double weight_decay, double grad_scale, int64_t step) {
  if (params.empty()) return;
  const char* const op = "update_8bit_";
  const bool adam = algorithm == "adam";
  check(adam || algorithm == "lion" || algorithm == "momentum", "metalcore::", op,
        ": algorithm must be \"adam\", \"lion\" or \"momentum\", not \"", algorithm, "\"");
  ParameterArrays arrays(op, {{.name = "params", .tensors = params, .written = true},
                              {.name = "grads", .tensors = grads, .written = false}});
  const Tensor& param = arrays.first();
  const size_t count = params.size();
  check(states1.size() == count && absmax1.size() == count && states2.size() == (adam ? count : 0) &&
            absmax2.size() == states2.size(),
        "metalcore::", op, ": each parameter has one state1 and absmax1, and for Adam one state2 and absmax2");
  check(code1.has_value() && code2.has_value() == adam, "metalcore::", op,
        ": code1 is needed, and code2 for Adam alone");
  check_code("code1", *code1, param);
  if (adam) check_code("code2", *code2, param);
  const States states{states1, states2, absmax1, absmax2};
  for (const ParameterSlot& slot : arrays.slots()) states.check_slot(slot, param);
  EightBitParams p = parameters(algorithm, lr, beta1, beta2, eps, weight_decay, grad_scale, step);
  gpu::note_plan(op, "multi_tensor", [&] {
    return std::to_string(arrays.slots().size()) + " parameters that are not empty, at most " +
           std::to_string(at_most(4)) + " in a dispatch, of blocks of " + std::to_string(OPTIM_BLOCK) + " elements";
  });
  gpu::note_host_step("update_8bit_ counts its steps on the host");

  const size_t slots = arrays.slots().size();
  const size_t at_once = arrays.overlap() ? 1 : slots;
  for (size_t first = 0; first < slots; first += at_once) {
    std::vector<GatheredParameter> gathered = arrays.gather(first, at_once);
    OptimPlan plan(arrays, first, at_once, UINT64_MAX, 4);
    gpu::record(param, [&](gpu::Recording& recording) {
      for (const OptimDispatch& dispatch : plan.dispatches) {
        std::vector<gpu::BufferView> views;
        for (size_t i = 0; i < dispatch.count; ++i) {
          states.append(views, arrays.slots()[dispatch.first + i]);
          for (size_t k = views.size() - 4; k < views.size(); ++k)
            if ((reinterpret_cast<uintptr_t>(views[k].storage) + views[k].offset) % 8 != 0)
              plan.tensors[dispatch.first - first + i].as_vectors = 0;
        }
        p.grid = dispatch.grid;
        dispatch.begin(recording, kernel_name((algorithm + "_8bit").c_str(), param.scalar_type()), arrays.arrays());
        recording.pointers(2, views.data(), views.size()).bytes(3, p);
        recording.buffer(4, *code1).buffer(5, adam ? *code2 : *code1);
        dispatch.end(recording);
      }
    });
    for (GatheredParameter& parameter : gathered) parameter.write_back();
  }
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "update_8bit_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states1, Tensor(c!)[] states2, "
      "Tensor(d!)[] absmax1, Tensor(e!)[] absmax2, Tensor? code1, Tensor? code2, str algorithm, *, float lr, "
      "float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) -> ()");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::update_8bit_>("update_8bit_"); }
