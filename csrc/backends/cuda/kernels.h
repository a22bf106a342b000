// Kernels as they are launched. On first use a kernel is compiled for its bindings and loaded on its GPU; it is kept as
// long as the process lives.
#pragma once

#include "block.h"
#include "device.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace metalcore::cuda {

// A kernel on one GPU.
struct Loaded {
  Function function;
  uint32_t max_threads;         // per threadgroup
  uint32_t static_memory;       // bytes of shared memory that threadgroup variables take
  uint32_t max_dynamic_memory;  // bytes of shared memory that threadgroup arguments may take
  uint32_t registers;
  uint32_t local_memory;
};

struct NamedKernel;

// A kernel with one layout of its parameter block.
struct Variant {
  NamedKernel& kernel;
  const Layout layout;
  Variant* const next;
  std::atomic<const Loaded*> on[kMaximumDevices] = {};  // by Device::index; null where it is not loaded
  std::vector<std::pair<int, Kernel>> compiled;         // by Device::arch; load() locks it
};

struct NamedKernel {
  uint32_t program;  // as in compiler.h
  std::string name;
  std::string source;  // as in compiler.h; set when the first variant is loaded
  std::atomic<Variant*> variants = nullptr;

  Variant& variant(const Layout& layout);
  // "kernel 'x' of softmax.metal", so that errors can tell kernels apart; "kernel 'x'" where the source has no file.
  std::string description() const { return "kernel '" + name + "'" + (source.empty() ? "" : " of " + source); }
};

NamedKernel& find_kernel(uint32_t program, std::string_view name);

// Loads the variants that are not yet loaded on the device, with one call of the compiler at most. The device's context
// must be current, and the GIL must not be held. Throws what compile() throws, or std::runtime_error.
void load(const Device& device, const std::vector<Variant*>& variants);

}  // namespace metalcore::cuda
