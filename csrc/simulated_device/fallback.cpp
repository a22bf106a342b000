#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <string>
#include <string_view>
#include <unordered_set>

#include "cpu_view.h"
#include "generator.h"
#include "operators.h"

namespace metalcore::simulated_device {
namespace {

// These operators take arrays of indices or of counters from the CPU beside tensors of the device.
bool accepts_host_arrays(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "aten::index",      "aten::_unsafe_index",    "aten::index_put",    "aten::_unsafe_index_put",
      "aten::index_put_", "aten::_index_put_impl_", "aten::_fused_adam_", "aten::_fused_adamw_",
      "aten::_fused_sgd_"};
  return names.count(name) || name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::_amp_", 0) == 0;
}

bool is_optional_generator(const c10::Argument& argument) {
  const auto* type = argument.real_type()->castRaw<c10::OptionalType>();
  return type && type->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

void to_cpu(c10::IValue& value, const c10::Argument& argument, CpuView& view) {
  if (value.isTensor()) {
    value = view.to_cpu(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = view.to_cpu(tensor);
    value = std::move(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional(view.to_cpu(*tensor)) : std::nullopt);
    }
    value = std::move(tensors);
  } else if (value.isDevice()) {
    if (value.toDevice().is_mps()) value = c10::Device(c10::kCPU);
  } else if (value.isGenerator()) {
    const auto generator = value.toGenerator();
    value = cpu_generator(generator.defined() ? generator : default_generator());
  } else if (value.isNone() && is_optional_generator(argument)) {
    value = cpu_generator(default_generator());
  }
}

void to_device(c10::IValue& value, CpuView& view) {
  if (value.isTensor()) {
    value = view.to_device(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = view.to_device(tensor);
    value = std::move(tensors);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  CpuView view;
  for (size_t i = 0, first = stack->size() - arguments.size(); i < arguments.size(); ++i) {
    to_cpu((*stack)[first + i], arguments[i], view);
  }
  if (C10_UNLIKELY(view.has_host_arrays() && view.has_device_tensors()) && !accepts_host_arrays(schema.name())) {
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu! (",
                op.operator_name(), ")");
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  view.write_back();
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) to_device((*stack)[i], view);
}

}  // namespace

torch::Library& open_aten(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

void register_fallbacks() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& library = open_aten(c10::DispatchKey::MPS);
  const auto add = [&](const c10::OperatorName& name) {
    const auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::MPS)) return;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  };
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.name.rfind("aten::", 0) == 0) add(name);
  }
  // These composite operators choose MPS kernels by the device of their arguments.
  for (const auto& name : std::array<c10::OperatorName, 5>{{{"aten::convolution", ""},
                                                            {"aten::convolution_backward", ""},
                                                            {"aten::ldexp", "Tensor"},
                                                            {"aten::ldexp", "out"},
                                                            {"aten::ldexp_", ""}}}) {
    add(name);
  }
}

}  // namespace metalcore::simulated_device
