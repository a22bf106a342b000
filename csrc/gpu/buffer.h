// The place of a tensor's elements in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

// These declarations replace PyTorch's headers, which conflict with Metal's: both define StringHandle.
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
namespace torch::stable {
class Tensor;
}

namespace metalcore::gpu {

using torch::stable::Tensor;

// A storage, the first element's offset and the bytes that the elements span from there. On Metal `storage` is the
// id<MTLBuffer>; elsewhere it is the address of the storage. It is null for tensors without elements or without memory,
// and where an optional tensor is not there.
struct BufferView {
  void* storage = nullptr;
  size_t offset = 0;
  size_t span = 0;
  AtenTensorHandle tensor = nullptr;  // not owned: a reader that keeps the view needs its own reference
};
BufferView view_of(const Tensor& tensor);
// The view of an optional tensor. (Tensor is incomplete here.)
template <typename T>
BufferView view_of(const std::optional<T>& tensor) {
  return tensor ? view_of(*tensor) : BufferView{};
}
// The view of a tensor of which the caller knows the sizes of an element and of the span, in bytes.
BufferView view_of(AtenTensorHandle tensor, size_t element_size, size_t span);

// The type of a tensor's device, by PyTorch's number.
int32_t device_type_of(const Tensor& tensor);

}  // namespace metalcore::gpu
