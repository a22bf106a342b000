// The aten operators of the simulated device.
#pragma once

#include <torch/library.h>

namespace metalcore::simulated_device {

// Operators that must know the device: allocation, copies between devices, views, resizing.
void register_native_operators();
// Every other aten operator that has a CPU kernel: that kernel, on the same memory. Operators of other libraries are
// left alone, so that one without an MPS kernel raises NotImplementedError as it does on a Mac.
void register_fallbacks();

// Registers kernels for aten operators under a key. Never destroyed: registrations last as long as the process.
torch::Library& open_aten(c10::DispatchKey key);

}  // namespace metalcore::simulated_device
