// On Metal a storage's "address" is its id<MTLBuffer>. The linker sends calls of gpu::view_of here (--wrap).
#include "../../csrc/gpu/encoder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

namespace metalcore::metal_runtime {
void* buffer_of(void* address, size_t length);
}

using metalcore::gpu::BufferView;
using torch::stable::Tensor;

extern "C" BufferView __real__ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE(const Tensor& tensor);

extern "C" BufferView __wrap__ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE(const Tensor& tensor) {
  BufferView view = __real__ZN9metalcore3gpu7view_ofERKN5torch6stable6TensorE(tensor);
  int64_t length = 0;
  aoti_torch_get_storage_size(tensor.get(), &length);
  if (view.storage) view.storage = metalcore::metal_runtime::buffer_of(view.storage, static_cast<size_t>(length));
  return view;
}
