// A GPU as this backend uses it, in the GPU's primary context, which PyTorch uses too.
#pragma once

#include "driver.h"

#include <cstdint>

namespace metalcore::cuda {

constexpr int kMaximumDevices = 64;

struct Device {
  int index;               // PyTorch's index among the devices that CUDA_VISIBLE_DEVICES admits
  int arch;                // 90 for compute capability 9.0
  uint32_t shared_memory;  // the most bytes that a threadgroup may have
  bool may_overlap;        // whether a kernel may begin while those before it run (see launches.cpp)
  Context context;
};

// Makes the device and its context on the first call. Throws std::runtime_error.
const Device& device(int index);

// The multiprocessors of the first GPU, or 0 as long as nobody in this process has initialized the driver. It does not
// do that itself: a process that only asks for plans may fork, and its children could not use the driver then.
uint32_t multiprocessors();

// While it lives, the device's context is the calling thread's.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// Returns PyTorch's current stream of the device for the calling thread; the default stream where PyTorch has no CUDA.
// In libmetalcore it is the stream of the context that runs.
Stream current_stream(const Device& device);

}  // namespace metalcore::cuda
