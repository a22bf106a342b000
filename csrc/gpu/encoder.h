// What an op sees of a GPU: name a kernel, bind its arguments, dispatch it. Each backend implements Encoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>

// Not PyTorch's headers: they cannot be included along with Metal's (both define StringHandle).
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
namespace torch::stable {
class Tensor;
}

namespace metalcore::gpu {

using torch::stable::Tensor;

struct Size {
  uint32_t x = 1, y = 1, z = 1;
  bool empty() const { return x == 0 || y == 0 || z == 0; }
};

// Where a tensor's elements lie: its storage, the first element's offset and the bytes its elements span from there.
// On Metal `storage` is the id<MTLBuffer>; elsewhere it is the address of the storage.
struct BufferView {
  void* storage;
  size_t offset;
  size_t span;
};
BufferView view_of(const Tensor& tensor);
// The same for a tensor of which the sizes of an element and of the span are known.
BufferView view_of(AtenTensorHandle tensor, size_t element_size, size_t span);

class Encoder {
 public:
  virtual ~Encoder() = default;

  // Selects a built-in kernel by its host_name; arguments bound before are forgotten.
  virtual Encoder& kernel(std::string_view name) = 0;
  virtual Encoder& buffer(uint32_t index, const BufferView& view) = 0;
  // Copies `size` <= 4096 bytes; the caller's memory may go away at once.
  virtual Encoder& bytes(uint32_t index, const void* data, size_t size) = 0;
  // Binds a table of device addresses, one per view (nullptr where a view's storage is null), at most 512 of them: for
  // kernels over more tensors than there are buffer slots. The kernel reads it as `constant` structs of device pointers
  // and may read and write each view's span. On Metal these are the buffers' gpuAddress (Metal 3) set as bytes, each
  // buffer made resident on this encoder by useResource.
  virtual Encoder& pointers(uint32_t index, const BufferView* views, size_t count) = 0;
  virtual Encoder& threadgroup_memory(uint32_t index, size_t bytes) = 0;
  // A dispatch of no threads is skipped. Dispatches of one encoder run in order, each seeing the writes of the last.
  virtual void dispatch_threads(Size threads, Size threads_per_threadgroup) = 0;
  virtual void dispatch_threadgroups(Size threadgroups, Size threads_per_threadgroup) = 0;

  Encoder& buffer(uint32_t index, const Tensor& tensor) { return buffer(index, view_of(tensor)); }

  template <typename T>
  Encoder& bytes(uint32_t index, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>);
    return bytes(index, &value, sizeof(T));
  }
};

// Calls `body` once with an encoder on the current stream of the tensor's device. Outputs and scratch are allocated
// before: on MPS an allocation or a PyTorch op inside the body would end the encoder under us.
void encode(const Tensor& on, const std::function<void(Encoder&)>& body);

}  // namespace metalcore::gpu
