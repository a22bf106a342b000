// A list of tensors, for ops that take many of them: an argument `const TensorList&` of a boxed function.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace metalcore {

// Owns the handles that PyTorch gives it. A std::vector<Tensor> would allocate a reference count for each tensor. Where
// a kernel needs only a tensor's address, that would cost as much as all other work on the tensor.
class TensorList {
 public:
  explicit TensorList(StableListHandle list);
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  ~TensorList();

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }

  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }  // the list keeps the reference
  torch::stable::Tensor tensor(size_t i) const;

 private:
  std::vector<AtenTensorHandle> handles_;
};

// Device and dtype as PyTorch numbers them. Comparing these is cheap.
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

// What an operator in Python gets (python_operator.h).
StableIValue on_stack(const TensorList& list);

}  // namespace metalcore

template <>
struct torch::stable::detail::ToImpl<metalcore::TensorList> {
  static metalcore::TensorList call(StableIValue value, uint64_t, bool) {
    return metalcore::TensorList(to<StableListHandle>(value));
  }
};
