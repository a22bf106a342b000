// Where a tensor's elements lie.
#pragma once

#include <cstddef>

// Not PyTorch's headers: they cannot be included along with Metal's (both define StringHandle).
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
namespace torch::stable {
class Tensor;
}

namespace metalcore::gpu {

using torch::stable::Tensor;

// A storage, the first element's offset and the bytes that the elements span from there. On Metal `storage` is the
// id<MTLBuffer>; elsewhere it is the address of the storage. It is null for tensors without elements or without memory.
struct BufferView {
  void* storage = nullptr;
  size_t offset = 0;
  size_t span = 0;
  AtenTensorHandle tensor = nullptr;  // the caller's: whoever keeps the view holds a reference of its own
};
BufferView view_of(const Tensor& tensor);
// The view of a tensor whose sizes of an element and of the span are known.
BufferView view_of(AtenTensorHandle tensor, size_t element_size, size_t span);

}  // namespace metalcore::gpu
