// Work on its way to the device. The executor has none: a kernel has run when its call returns. Whoever records kernels
// and runs them later (tests/metal_runtime) says here how PyTorch's own ops and its memory take account of that.
#pragma once

#include <cstddef>

namespace metalcore::simulated_device {

struct Queue {
  // Runs what is waiting: before PyTorch itself uses the device's memory, on the stream of this thread; or on `all`
  // streams, where PyTorch waits for the device.
  void (*finish)(bool all);
  void (*allocated)(void* address, size_t bytes);
  // Whether memory that PyTorch gives back is still needed; if so, the queue calls release(block) later.
  bool (*freed)(void* address, void (*release)(void*), void* block);
};

inline const Queue* queue = nullptr;

inline void finish_queue(bool all) {
  if (queue) queue->finish(all);
}

}  // namespace metalcore::simulated_device
