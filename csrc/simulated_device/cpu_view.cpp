#include "cpu_view.h"

#include <c10/core/CPUAllocator.h>

#include "allocator.h"
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

}  // namespace metalcore::simulated_device
