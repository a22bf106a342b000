// A GPU as this backend uses it: in its primary context, the one that PyTorch uses too.
#pragma once

#include "driver.h"

#include <cstdint>

namespace metalcore::cuda {

constexpr int kMaximumDevices = 64;

struct Device {
  int index;               // PyTorch's, of the devices that CUDA_VISIBLE_DEVICES leaves
  int arch;                // 90 for compute capability 9.0
  uint32_t shared_memory;  // bytes that a threadgroup may have at most
  Context context;
};

// Made, with its context, when first asked for. Throws std::runtime_error.
const Device& device(int index);

// Makes a device's context the calling thread's while it lives.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// PyTorch's current stream of that device for the calling thread; the default stream where PyTorch has no CUDA.
Stream current_stream(const Device& device);

}  // namespace metalcore::cuda
