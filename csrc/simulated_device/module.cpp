#include <c10/core/Allocator.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "allocator.h"
#include "autograd.h"
#include "cpu_view.h"
#include "hooks.h"
#include "operators.h"

namespace metalcore::simulated_device {
namespace {

void install() {
  c10::SetAllocator(c10::kMPS, device_allocator(), /*priority=*/100);
  install_guard();
  install_hooks();
  register_native_operators();
  register_fallbacks();
}

// A fault that the CPU executor found in a kernel arrives here through PyTorch, which keeps only its message.
void translate_kernel_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::runtime_error& error) {
    constexpr std::string_view prefix = "metalcore.simulator.KernelError: ";
    const std::string_view message = error.what();
    if (message.substr(0, prefix.size()) != prefix) throw;
    const auto errors = pybind11::module_::import("metalcore.simulator.errors");
    const auto fault = errors.attr("KernelError")(std::string(message.substr(prefix.size())));
    PyErr_SetObject(errors.attr("KernelError").ptr(), fault.ptr());
  }
}

}  // namespace
}  // namespace metalcore::simulated_device

PYBIND11_MODULE(_device, module) {
  namespace device = metalcore::simulated_device;
  module.def("install", &device::install);
  module.def("hide_cuda_without_gpu", &device::hide_cuda_without_gpu);
  module.def("autograd_started_without_device", &device::autograd_started_without_device);
  module.def("drain_autograd", &device::drain_autograd, pybind11::call_guard<pybind11::gil_scoped_release>());
  // A CPU tensor on the memory of a device tensor.
  module.def("host_alias", [](const at::Tensor& tensor) { return device::CpuView().to_cpu(tensor); });
  pybind11::register_exception_translator(&device::translate_kernel_error);
}
