#include "buffer.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

namespace metalcore::gpu {

// The stable ABI does not give the storage's data_ptr(), so this subtracts the offset from the tensor's. On Metal the
// "address" of a storage is an object, and a tensor's data_ptr() is the object's address plus the offset in bytes.
BufferView view_of(AtenTensorHandle tensor, size_t element_size, size_t span) {
  void* data = nullptr;
  int64_t first_element = 0;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_storage_offset(tensor, &first_element) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("metalcore: a tensor has no memory");
  const size_t offset = static_cast<size_t>(first_element) * element_size;
  return {static_cast<char*>(data) - offset, offset, span, tensor};
}

BufferView view_of(const Tensor& tensor) {
  const size_t item = tensor.element_size();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  size_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {nullptr, 0, 0, tensor.get()};  // data_ptr() is null with any offset
    last += static_cast<size_t>(sizes[i] - 1) * static_cast<size_t>(strides[i]);
  }
  return view_of(tensor.get(), item, (last + 1) * item);
}

int32_t device_type_of(const Tensor& tensor) {
  int32_t type = -1;
  aoti_torch_get_device_type(tensor.get(), &type);
  return type;
}

}  // namespace metalcore::gpu
