// On Metal a storage's "address" is its id<MTLBuffer>. The linker sends calls of gpu::view_of here (--wrap).
#include "../../csrc/gpu/buffer.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

namespace metalcore::metal_runtime {
void* buffer_of(void* address, size_t length);
}

using metalcore::gpu::BufferView;
using torch::stable::Tensor;

namespace {

BufferView in_its_buffer(BufferView view, AtenTensorHandle tensor) {
  int64_t length = 0;
  aoti_torch_get_storage_size(tensor, &length);
  if (view.storage) view.storage = metalcore::metal_runtime::buffer_of(view.storage, static_cast<size_t>(length));
  return view;
}

}  // namespace

// Calls from one object file to another: that of the second from the first, in buffer.cpp, is not sent here.
#define OF_TENSOR(prefix) prefix##_ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE
#define OF_HANDLE(prefix) prefix##_ZN9metalcore3gpu7view_ofEP16AtenTensorOpaquemm

extern "C" {

BufferView OF_TENSOR(__real_)(const Tensor& tensor);
BufferView OF_TENSOR(__wrap_)(const Tensor& tensor) { return in_its_buffer(OF_TENSOR(__real_)(tensor), tensor.get()); }

BufferView OF_HANDLE(__real_)(AtenTensorHandle tensor, size_t element_size, size_t span);
BufferView OF_HANDLE(__wrap_)(AtenTensorHandle tensor, size_t element_size, size_t span) {
  return in_its_buffer(OF_HANDLE(__real_)(tensor, element_size, span), tensor);
}
}
