#include <c10/core/Allocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "fault.h"
#include "hooks.h"
#include "operators.h"
#include "queue.h"

namespace metalcore::simulated_device {
namespace {

void install() {
  c10::SetAllocator(c10::kMPS, device_allocator(), /*priority=*/100);
  install_guard();
  install_hooks();
  hide_cuda();
  register_native_operators();
}

// Sets Python's error indicator for what the CPU executor throws.
void translate_exception(std::exception_ptr exception) {
  const auto triple = [](msl_abi::Uint3 value) { return pybind11::make_tuple(value.x, value.y, value.z); };
  try {
    std::rethrow_exception(exception);
  } catch (const simulator::Fault& fault) {
    const auto error =
        pybind11::module_::import("metalcore.simulator.errors")
            .attr("from_fault")(fault.message(), fault.kind, fault.kernel, fault.file, fault.line,
                                triple(fault.thread.position_in_grid), triple(fault.thread.position_in_threadgroup),
                                triple(fault.thread.threadgroup_position));
    PyErr_SetObject(pybind11::type::of(error).ptr(), error.ptr());
  } catch (const simulator::Interrupted& interrupted) {
    interrupted.restore();
  }
}

void rethrow(const std::exception_ptr& exception) {
  const pybind11::gil_scoped_acquire gil;
  try {
    translate_exception(exception);
  } catch (...) {  // it is another exception, which the caller throws
    return;
  }
  python_error error;
  error.persist();
  throw error;
}

}  // namespace
}  // namespace metalcore::simulated_device

PYBIND11_MODULE(_device, module) {
  namespace device = metalcore::simulated_device;
  module.def("install", &device::install);
  module.def("be_lenient", [] { device::register_fallbacks(nullptr); });
  module.def("be_strict", [](std::unordered_set<std::string> kernels, std::unordered_set<std::string> on_cpu) {
    const device::MacOperators mac{std::move(kernels), std::move(on_cpu)};
    device::register_fallbacks(&mac);
  });
  module.def("autograd_started_without_device", &device::autograd_started_without_device);
  module.def("drain_autograd", &device::drain_autograd, pybind11::call_guard<pybind11::gil_scoped_release>());
  // The addresses of the functions that the executor calls: launch.h's DeviceFunctions.
  module.def("functions", [] {
    return pybind11::make_tuple(reinterpret_cast<uintptr_t>(&device::find_allocation),
                                reinterpret_cast<uintptr_t>(&device::range_of_allocations),
                                reinterpret_cast<uintptr_t>(&device::rethrow));
  });
  // Returns a CPU tensor on the memory of a device tensor.
  module.def("host_alias", [](const at::Tensor& tensor) { return device::CpuView().to_cpu(tensor); });
  module.def("set_queue", [](uintptr_t address) { device::queue = reinterpret_cast<const device::Queue*>(address); });
  pybind11::register_exception_translator(&device::translate_exception);
}
