#include "backend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <stdexcept>
#include <string>

namespace metalcore::gpu {

namespace {

struct DeviceType {
  std::string_view name;
  int32_t number;
};
const std::array<DeviceType, 3>& device_types() {
  static const std::array<DeviceType, 3> types = {{{"mps", aoti_torch_device_type_mps()},
                                                   {"cuda", aoti_torch_device_type_cuda()},
                                                   {"cpu", aoti_torch_device_type_cpu()}}};
  return types;
}

// The index is PyTorch's number of the device type.
std::array<Backend*, 64>& backends() {
  static std::array<Backend*, 64> registered = {};
  return registered;
}

}  // namespace

BackendRegistration::BackendRegistration(Backend& backend) {
  for (const auto& [name, number] : device_types())
    if (name == backend.device_type()) {
      backends().at(number) = &backend;
      return;
    }
  throw std::logic_error("metalcore: no device type is called " + std::string(backend.device_type()));
}

Backend* find_backend(int32_t device_type) {
  return static_cast<uint32_t>(device_type) < backends().size() ? backends()[device_type] : nullptr;
}

Backend* find_backend(std::string_view device_type) {
  for (const auto& [name, number] : device_types())
    if (name == device_type) return find_backend(number);
  return nullptr;
}

}  // namespace metalcore::gpu
