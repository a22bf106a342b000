#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <caffe2/core/common.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_set>

#include "allocator.h"
#include "hooks.h"
#include "operators.h"
#include "queue.h"

namespace metalcore::simulated_device {
namespace {

using c10::intrusive_ptr;
using c10::StorageImpl;

// Returns a tensor with the metadata of `source` on `storage`. Its key set is the source's, except the keys of tensor
// subclasses: these would send the kernel back to Python.
at::Tensor make_alias(const at::Tensor& source, intrusive_ptr<StorageImpl> storage, c10::BackendComponent from,
                      c10::BackendComponent to) {
  constexpr c10::DispatchKeySet python({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  const auto* impl = source.unsafeGetTensorImpl();
  const auto keys = (impl->key_set() - python).remove_backend(from) | c10::DispatchKeySet(to);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(std::move(storage)), keys,
                                                        source.dtype());
  auto* copy = alias.unsafeGetTensorImpl();
  copy->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) copy->set_wrapped_number(true);
  return alias;
}

intrusive_ptr<StorageImpl> borrow(StorageImpl* device) {
  void* address = device->nbytes() ? device->mutable_data() : nullptr;
  c10::raw::intrusive_ptr::incref(device);
  const auto release = [](void* context) { c10::raw::intrusive_ptr::decref(static_cast<StorageImpl*>(context)); };
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), device->nbytes(),
                                          c10::DataPtr(address, device, release, c10::Device(c10::kCPU)),
                                          c10::GetCPUAllocator(), /*resizable=*/true);
}

}  // namespace

at::ScalarType check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please "
                   "use float32 instead.");
  return dtype;
}

at::Tensor CpuView::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_mps()) {
    host_.push_back(tensor.unsafeGetTensorImpl());
    has_host_arrays_ |= tensor.is_cpu() && tensor.dim() > 0;
    return tensor;
  }
  for (const auto& known : tensors_) {
    if (known.device.is_same(tensor)) return known.cpu;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && tensor.has_storage(),
                              "The simulated MPS device has strided tensors only, got ", tensor.layout());
  finish_queue(/*all=*/false);
  auto* device = tensor.storage().unsafeGetStorageImpl();
  intrusive_ptr<StorageImpl> cpu;
  for (const auto& known : storages_) {
    if (known.device == device) cpu = known.cpu;
  }
  if (!cpu) {
    cpu = borrow(device);
    storages_.push_back({device, cpu});
  }
  auto alias = make_alias(tensor, std::move(cpu), c10::BackendComponent::MPSBit, c10::BackendComponent::CPUBit);
  tensors_.push_back({tensor, alias});
  return alias;
}

at::Tensor CpuView::to_device(const at::Tensor& result) {
  if (!result.defined()) return result;
  for (const auto& known : tensors_) {
    if (known.cpu.is_same(result)) return known.device;
  }
  for (const auto* host : host_) {
    if (host == result.unsafeGetTensorImpl()) return result;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided && result.has_storage(),
                              "The simulated MPS device has strided tensors only, not ", result.layout());
  check_dtype(result.scalar_type());
  auto* cpu = result.storage().unsafeGetStorageImpl();
  intrusive_ptr<StorageImpl> device;
  for (const auto& known : storages_) {
    if (known.cpu.get() == cpu) device = intrusive_ptr<StorageImpl>::reclaim_copy(known.device);
  }
  for (const auto& known : adopted_) {
    if (known.first == cpu) device = known.second;
  }
  if (!device) {
    device = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), cpu->nbytes(), adopt(cpu),
                                              device_allocator(), /*resizable=*/true);
    adopted_.emplace_back(cpu, device);
  }
  return make_alias(result, std::move(device), c10::BackendComponent::CPUBit, c10::BackendComponent::MPSBit);
}

void CpuView::write_back() {
  for (const auto& [device, cpu] : storages_) {
    if (cpu->data() == device->data() && cpu->nbytes() == device->nbytes()) continue;
    if (cpu->data() != device->data()) device->set_data_ptr_noswap(adopt(cpu.get()));
    device->set_nbytes(cpu->nbytes());
  }
  for (const auto& [device, cpu] : tensors_) {
    auto* to = device.unsafeGetTensorImpl();
    const auto* from = cpu.unsafeGetTensorImpl();
    if (to->sizes() == from->sizes() && to->strides() == from->strides() &&
        to->storage_offset() == from->storage_offset()) {
      continue;
    }
    to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  }
}

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

// The next two are what PyTorch on a Mac does with operators that have no kernel there, in its words.
void warn_and_run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_WARN_ONCE("The operator '", op.schema().operator_name(),
                  "' is not currently supported on the MPS backend and will fall back to run on the CPU. This may have "
                  "performance implications.");
  run_on_cpu(op, stack);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The operator '", op.schema().operator_name(),
      "' is not currently implemented for the MPS device. If you want this op to be considered for addition please "
      "comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted in missing op "
      "as well as commit hash ",
      caffe2::GetBuildOptions().at("COMMIT_SHA"),
      ". As a temporary fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a "
      "fallback for this op. WARNING: this will be slower than running natively on MPS.");
}

bool falls_back() {
  const char* text = std::getenv("PYTORCH_ENABLE_MPS_FALLBACK");
  return text && std::atoi(text) != 0;
}

}  // namespace

torch::Library& open_aten(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

void register_fallbacks(const MacOperators* mac) {
  using torch::CppFunction, torch::Library;
  static std::unique_ptr<Library> aten, others;
  aten.reset();
  others.reset();
  auto& dispatcher = c10::Dispatcher::singleton();
  aten = std::make_unique<Library>(Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  const auto add = [&](const c10::OperatorName& name, CppFunction kernel) {
    const auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::MPS)) return;
    aten->impl(c10::toString(name).c_str(), std::move(kernel));
  };
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.name.rfind("aten::", 0) != 0 || (mac && !mac->kernels.count(c10::toString(name)))) continue;
    add(name, CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  // These composite operators choose MPS kernels by the device of their arguments.
  for (const auto& name : std::array<c10::OperatorName, 5>{{{"aten::convolution", ""},
                                                            {"aten::convolution_backward", ""},
                                                            {"aten::ldexp", "Tensor"},
                                                            {"aten::ldexp", "out"},
                                                            {"aten::ldexp_", ""}}}) {
    add(name, CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  if (!mac) return;
  for (const auto& name : mac->on_cpu)
    add(torch::jit::parseName(name), CppFunction::makeFromBoxedFunction<&warn_and_run_on_cpu>());
  others = std::make_unique<Library>(Library::IMPL, "_", c10::DispatchKey::MPS, __FILE__, __LINE__);
  others->fallback(falls_back() ? CppFunction::makeFromBoxedFunction<&warn_and_run_on_cpu>()
                                : CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace metalcore::simulated_device
