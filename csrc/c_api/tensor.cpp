// Defines what without_torch/ declares.
#include "context.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using metalcore::c_api::Place;
using metalcore::c_api::running;
using torch::stable::Tensor;

const Tensor& tensor_of(AtenTensorHandle handle) { return *reinterpret_cast<const Tensor*>(handle); }

// As PyTorch has it: on Metal a storage's "address" is an object, to which a tensor's data_ptr() adds its offset.
Place place_of(const Tensor& tensor) {
  return tensor.data_ptr() ? running().memory->place_of(tensor.data_ptr()) : Place{nullptr, 0};
}

[[noreturn]] void refuse(const char* what) {
  throw std::logic_error(std::string("metalcore: the C interface was to make ") + what);
}

}  // namespace

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data) {
  const Place place = place_of(tensor_of(tensor));
  *data = static_cast<char*>(place.storage) + place.offset;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* offset) {
  *offset = static_cast<int64_t>(place_of(tensor_of(tensor)).offset / tensor_of(tensor).element_size());
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  *type = tensor_of(tensor).device_type();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_layout(AtenTensorHandle, int32_t* layout) {
  *layout = aoti_torch_layout_strided();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* same) {
  *same = tensor;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* made) {
  thread_local std::optional<Tensor> last;
  const Tensor::Sizes shape(sizes, static_cast<size_t>(dims));
  last.emplace(nullptr, shape, Tensor::Sizes(strides, static_cast<size_t>(dims)),
               static_cast<Tensor::ScalarType>(dtype), device_type, device_index);
  size_t bytes = last->element_size();
  for (const int64_t size : shape)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes)) throw std::bad_alloc();
  last.emplace(running().arena.take(bytes), shape, Tensor::Sizes(strides, static_cast<size_t>(dims)),
               static_cast<Tensor::ScalarType>(dtype), device_type, device_index);
  *made = last->get();
  return AOTI_TORCH_SUCCESS;
}

namespace torch::stable {

Tensor zero_(const Tensor& tensor) {
  if (!tensor.is_contiguous()) refuse("a fill with gaps");
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  running().memory->fill(tensor.data_ptr(), static_cast<unsigned char>(0), bytes);
  return tensor;
}

Tensor fill_(const Tensor& tensor, double value) {
  if (!tensor.is_contiguous()) refuse("a fill with gaps");
  if (tensor.scalar_type() != Tensor::ScalarType::Float) refuse("a fill of another type");
  running().memory->fill(tensor.data_ptr(), static_cast<float>(value), static_cast<size_t>(tensor.numel()));
  return tensor;
}

Tensor transpose(const Tensor& tensor, int64_t a, int64_t b) {
  std::array<int64_t, Tensor::kMostDims> sizes{}, strides{};
  const auto dims = static_cast<size_t>(tensor.dim());
  for (size_t d = 0; d < dims; ++d) sizes[d] = tensor.sizes()[d], strides[d] = tensor.strides()[d];
  const auto first = static_cast<size_t>(a < 0 ? a + tensor.dim() : a);
  const auto second = static_cast<size_t>(b < 0 ? b + tensor.dim() : b);
  std::swap(sizes.at(first), sizes.at(second)), std::swap(strides.at(first), strides.at(second));
  return Tensor(tensor.data_ptr(), {sizes.data(), dims}, {strides.data(), dims}, tensor.scalar_type(),
                tensor.device_type(), tensor.get_device_index());
}

Tensor contiguous(const Tensor&) { refuse("a contiguous copy"); }
Tensor clone(const Tensor&) { refuse("a copy"); }
Tensor empty_like(const Tensor&) { refuse("a tensor like another"); }
Tensor to(const Tensor&, Tensor::ScalarType) { refuse("a conversion"); }

}  // namespace torch::stable
