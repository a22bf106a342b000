// The aten operators of the simulated device.
#pragma once

#include <torch/library.h>

namespace metalcore::simulated_device {

// Registers the operators that must know the device: allocation, copies between devices, views, resizing.
void register_native_operators();
// Registers, for each other aten operator that has a CPU kernel, this kernel on the same memory. Operators of other
// libraries are left alone, so that one without an MPS kernel raises NotImplementedError as it does on a Mac.
void register_fallbacks();

// Returns a library that registers kernels for aten operators under a key. It is never destroyed, since a registration
// lasts as long as its library.
torch::Library& open_aten(c10::DispatchKey key);

}  // namespace metalcore::simulated_device
