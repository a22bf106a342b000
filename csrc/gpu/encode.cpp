#include "encoder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#ifdef METALCORE_MPS
#include "../backends/mps/encoder.h"
#endif
#ifdef METALCORE_SIMULATOR
#include "../backends/simulator/encoder.h"
#endif

namespace metalcore::gpu {

// Not data_ptr() of the storage, which the stable ABI does not give: on Metal the "address" of a storage is an object,
// and data_ptr() is that object's address plus the offset in bytes; null, whatever the offset, where there is no element.
BufferView view_of(const Tensor& tensor) {
  const size_t item = tensor.element_size();
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * item;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  size_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {nullptr, 0, 0};
    last += static_cast<size_t>(sizes[i] - 1) * static_cast<size_t>(strides[i]);
  }
  return {static_cast<char*>(tensor.data_ptr()) - offset, offset, (last + 1) * item};
}

void encode(const Tensor& on, const std::function<void(Encoder&)>& body) {
  int32_t device_type = -1;
  aoti_torch_get_device_type(on.get(), &device_type);
#ifdef METALCORE_MPS
  if (device_type == aoti_torch_device_type_mps()) return mps::encode(body);
#endif
#ifdef METALCORE_SIMULATOR
  if (device_type == aoti_torch_device_type_mps()) return simulator::encode(body);
#endif
  throw std::runtime_error("metalcore: this build has no backend for the tensor's device (type " +
                           std::to_string(device_type) + ")");
}

}  // namespace metalcore::gpu
