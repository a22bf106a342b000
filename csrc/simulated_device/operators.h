// The aten operators of the simulated device.
#pragma once

#include <torch/library.h>

#include <string>
#include <unordered_set>

namespace metalcore::simulated_device {

// Registers the operators that must know the device: allocation, copies between devices, views, resizing.
void register_native_operators();

// The operators for which PyTorch has something on a Mac besides composite kernels, by names like aten::add.out.
struct MacOperators {
  std::unordered_set<std::string> kernels;  // with an MPS kernel
  std::unordered_set<std::string> on_cpu;   // that a Mac always runs on the CPU, with a warning
};
// Registers, for each other aten operator that has a CPU kernel, this kernel on the same memory. Operators of other
// libraries are left alone, so that one without an MPS kernel raises NotImplementedError as it does on a Mac. Where
// `mac` is given (strict mode), only its operators have kernels, and all others without a composite kernel are refused
// as a Mac refuses them. Each call takes back what the one before registered.
void register_fallbacks(const MacOperators* mac);

// Returns a library that registers kernels for aten operators under a key. It is never destroyed, since a registration
// lasts as long as its library.
torch::Library& open_aten(c10::DispatchKey key);

}  // namespace metalcore::simulated_device
