// PyTorch's current stream of a GPU.
#include "device.h"

#include <dlfcn.h>

#include <stdexcept>

namespace metalcore::cuda {
namespace {

// libtorch_cuda.so is looked up, not linked: this PyTorch may be a build without CUDA.
using StreamGetter = int32_t (*)(int32_t device, void** stream);
StreamGetter find_stream_getter() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch ? reinterpret_cast<StreamGetter>(dlsym(torch, "aoti_torch_get_current_cuda_stream")) : nullptr;
}

}  // namespace

Stream current_stream(const Device& device) {
  static const StreamGetter getter = find_stream_getter();
  void* stream = nullptr;
  if (getter && getter(device.index, &stream) != 0)
    throw std::runtime_error("metalcore: PyTorch did not tell its current CUDA stream");
  return static_cast<Stream>(stream);
}

}  // namespace metalcore::cuda
