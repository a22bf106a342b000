// A list of tensors that an op is given, for ops that take many: an argument `const TensorList&` of a boxed function.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace metalcore {

// Owns the tensors' handles as they come. A std::vector<Tensor> allocates a reference count for each of them, which
// costs as much as everything else that is done with a tensor which a kernel just needs the address of.
class TensorList {
 public:
  explicit TensorList(StableListHandle list);
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  ~TensorList();

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }

  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }  // the list's: not to be kept
  torch::stable::Tensor tensor(size_t i) const;

 private:
  std::vector<AtenTensorHandle> handles_;
};

// Device and dtype as PyTorch numbers them: to compare tensors by.
struct TensorKind {
  int32_t device_type = -1, device_index = -1, dtype = -1;
  bool operator==(const TensorKind&) const = default;
};

inline TensorKind kind_of(AtenTensorHandle tensor) {
  TensorKind kind;
  aoti_torch_get_device_type(tensor, &kind.device_type);
  aoti_torch_get_device_index(tensor, &kind.device_index);
  aoti_torch_get_dtype(tensor, &kind.dtype);
  return kind;
}

inline int64_t numel_of(AtenTensorHandle tensor) {
  int64_t numel = -1;
  aoti_torch_get_numel(tensor, &numel);
  return numel;
}

}  // namespace metalcore

template <>
struct torch::stable::detail::ToImpl<metalcore::TensorList> {
  static metalcore::TensorList call(StableIValue value, uint64_t, bool) {
    return metalcore::TensorList(to<StableListHandle>(value));
  }
};
