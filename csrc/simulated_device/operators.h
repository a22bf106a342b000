// The aten operators of the simulated device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

namespace metalcore::simulated_device {

// Registers the operators that must know the device: allocation, copies between devices, views, resizing.
void register_native_operators();

// The operators for which PyTorch has something on a Mac besides composite kernels, by names like aten::add.out.
struct MacOperators {
  std::unordered_set<std::string> kernels;  // with an MPS kernel
  std::unordered_set<std::string> on_cpu;   // that a Mac always runs on the CPU, with a warning
};
// Registers, for each other aten operator that has a CPU kernel, this kernel on the same memory. Operators of other
// libraries are left alone, so that one without an MPS kernel raises NotImplementedError as it does on a Mac. Where
// `mac` is given (strict mode), only its operators have kernels, and all others without a composite kernel are refused
// as a Mac refuses them. Each call takes back what the one before registered.
void register_fallbacks(const MacOperators* mac);

// Returns a library that registers kernels for aten operators under a key. It is never destroyed, since a registration
// lasts as long as its library.
torch::Library& open_aten(c10::DispatchKey key);

// The tensors of one operator call as its CPU kernel sees them: the same memory on another device.
class CpuView {
 public:
  // Returns a CPU tensor on the memory of a device tensor. All tensors on one storage share one CPU storage, so that
  // the kernel sees which of them overlap. Tensors of other devices are returned as they are.
  at::Tensor to_cpu(const at::Tensor& tensor);

  // Returns the device tensor for a tensor that the CPU kernel returned: the argument itself where the kernel returned
  // its argument, a view where it returned a view, or else a new tensor that adopts the memory.
  at::Tensor to_device(const at::Tensor& result);

  // Carries over the changes that the kernel made to its arguments besides their elements: new sizes, grown storages.
  void write_back();

  bool has_device_tensors() const { return !tensors_.empty(); }
  // Operators take CPU scalars beside device tensors. With few exceptions they take no other CPU tensors.
  bool has_host_arrays() const { return has_host_arrays_; }

 private:
  struct StoragePair {
    c10::StorageImpl* device;
    c10::intrusive_ptr<c10::StorageImpl> cpu;
  };
  struct TensorPair {
    at::Tensor device, cpu;
  };
  c10::SmallVector<StoragePair, 8> storages_;
  c10::SmallVector<TensorPair, 8> tensors_;
  c10::SmallVector<c10::TensorImpl*, 4> host_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::intrusive_ptr<c10::StorageImpl>>, 4> adopted_;
  bool has_host_arrays_ = false;
};

// Refuses float64 as PyTorch does on a Mac, since MPS has none; returns any other dtype.
at::ScalarType check_dtype(at::ScalarType dtype);

}  // namespace metalcore::simulated_device
