#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/where.h>

#include <limits>

#include "allocator.h"
#include "operators.h"

namespace metalcore::simulated_device {
namespace {

using at::Tensor;
using std::optional;

constexpr c10::DispatchKeySet kMpsKeys(c10::DispatchKey::MPS);

Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> memory_format) {
  const auto checked = check_dtype(c10::dtype_or_default(dtype));
  return Tensor(at::detail::empty_generic(size, device_allocator(), kMpsKeys, checked, memory_format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
  const auto checked = check_dtype(c10::dtype_or_default(dtype));
  return Tensor(at::detail::empty_strided_generic(size, stride, device_allocator(), kMpsKeys, checked));
}

// Copies between any two devices: unlike the fallback, it takes one tensor from the CPU.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  CpuView view;
  Tensor to = view.to_cpu(self);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), to, view.to_cpu(source), non_blocking);
  return self;
}

Tensor& set_(Tensor& self) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             device_allocator()->allocate(0), device_allocator(),
                                                             /*resizable=*/true));
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

// Refuses what PyTorch's own implementation refuses, in its words.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask) {
  TORCH_CHECK(query.dtype() == key.dtype() && query.dtype() == value.dtype(),
              "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
              " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.device() == key.device() && query.device() == value.device(),
              "Expected query, key, and value to have the same device type, but got query.device: ", query.device(),
              " key.device: ", key.device(), " and value.device: ", value.device(), " instead.");
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(),
              " key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  if (!mask || !mask->defined()) return;
  const auto dtype = mask->dtype();
  TORCH_CHECK(dtype == at::kBool || dtype == at::kFloat || dtype == query.dtype(),
              "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: ", dtype,
              " and  query.dtype: ", query.dtype(), " instead.");
}

// PyTorch's own implementation asks a table of kernels by device, and a build without MPS has no row for it. It would
// choose this composite operator, and a Mac uses it too.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const optional<Tensor>& mask, double dropout, bool causal, optional<double> scale,
                                    bool enable_gqa) {
  if (!query.device().is_mps()) {  // torch.vmap's wrappers have a device, and no key of one
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, enable_gqa);
  }
  check_attention(query, key, value, mask);
  optional<Tensor> bias = mask;
  if (bias && bias->defined() && bias->scalar_type() == at::kBool) {
    const auto options = query.options().device(bias->device());
    bias = at::where(*bias, at::scalar_tensor(0.0, options),
                     at::scalar_tensor(-std::numeric_limits<double>::infinity(), options));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, std::nullopt,
                                                            scale, enable_gqa));
}

class IgnoreWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void register_native_operators() {
  using Source = Tensor& (*)(Tensor&, at::Storage);
  auto& mps = open_aten(c10::DispatchKey::MPS);
  mps.impl("empty.memory_format", TORCH_FN(empty));
  mps.impl("empty_strided", TORCH_FN(empty_strided));
  mps.impl("copy_", TORCH_FN(copy_));
  mps.impl("set_", TORCH_FN(set_));
  // These operators change only a tensor's metadata and are the same for every device.
  mps.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  mps.impl("view", TORCH_FN(at::native::view));
  mps.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  mps.impl("unfold", TORCH_FN(at::native::unfold));
  mps.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  mps.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  mps.impl("resize_", TORCH_FN(at::native::resize_));
  mps.impl("set_.source_Storage", TORCH_FN(static_cast<Source>(&at::native::set_)));
  mps.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  mps.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));

  // This replaces PyTorch's kernels on purpose, so the warnings about it are not wanted. torch.vmap takes the second.
  IgnoreWarnings ignore;
  const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::FuncTorchVmapMode})
    open_aten(key).impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention));
}

}  // namespace metalcore::simulated_device
