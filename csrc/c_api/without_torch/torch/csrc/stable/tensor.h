// Takes the place of PyTorch's header of this path in libmetalcore. A tensor is a plain value that describes memory
// which the caller of a C function, or the call's context, owns: it allocates nothing and frees nothing.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace torch::stable {

namespace detail {

constexpr StableIValue from(torch::headeronly::ScalarType type) { return static_cast<StableIValue>(type); }
template <typename T>
constexpr T to(StableIValue value) {
  return static_cast<T>(value);
}

}  // namespace detail

class Tensor {
 public:
  using ScalarType = torch::headeronly::ScalarType;
  using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
  static constexpr size_t kMostDims = 8;

  Tensor(void* data, Sizes sizes, Sizes strides, ScalarType type, int32_t device_type, int32_t device_index)
      : data_(data), type_(type), device_type_(device_type), device_index_(device_index), dims_(sizes.size()) {
    for (size_t d = 0; d < dims_; ++d) {
      sizes_[d] = sizes[d];
      strides_[d] = strides[d];
    }
  }
  explicit Tensor(AtenTensorHandle handle) : Tensor(*reinterpret_cast<const Tensor*>(handle)) {}

  AtenTensorHandle get() const { return reinterpret_cast<AtenTensorHandle>(const_cast<Tensor*>(this)); }
  void* data_ptr() const { return data_; }
  ScalarType scalar_type() const { return type_; }
  int32_t device_type() const { return device_type_; }
  int32_t get_device_index() const { return device_index_; }
  size_t element_size() const {
    switch (type_) {
      case ScalarType::Bool:
      case ScalarType::Byte: return 1;
      case ScalarType::Half:
      case ScalarType::BFloat16: return 2;
      case ScalarType::Long: return 8;
      default: return 4;  // Float, Int
    }
  }

  bool defined() const { return true; }  // what was left out is an empty optional here
  int64_t dim() const { return static_cast<int64_t>(dims_); }
  Sizes sizes() const { return {sizes_.data(), dims_}; }
  Sizes strides() const { return {strides_.data(), dims_}; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim() : d]; }
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim() : d]; }
  int64_t numel() const {
    int64_t count = 1;
    for (size_t d = 0; d < dims_; ++d) count *= sizes_[d];
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (size_t d = dims_; d-- > 0;) {
      if (sizes_[d] == 0) return true;
      if (sizes_[d] != 1 && strides_[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }

 private:
  void* data_;
  ScalarType type_;
  int32_t device_type_, device_index_;
  size_t dims_;
  std::array<int64_t, kMostDims> sizes_{}, strides_{};
};

}  // namespace torch::stable
