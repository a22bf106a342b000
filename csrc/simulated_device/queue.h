// Work on its way to the device. The executor has no such work: a kernel has run when its call returns. A runtime that
// records kernels and runs them later (tests/metal_runtime) sets a queue, so that PyTorch's own ops and its memory take
// account of the recorded work.
#pragma once

#include <cstddef>

namespace metalcore::simulated_device {

struct Queue {
  // Runs the waiting work of this thread's stream before PyTorch itself uses the device's memory, or of `all` streams
  // where PyTorch waits for the device.
  void (*finish)(bool all);
  void (*allocated)(void* address, size_t bytes);
  // Returns whether memory that PyTorch gives back is still needed; if so, the queue calls release(block) later.
  bool (*freed)(void* address, void (*release)(void*), void* block);
};

inline const Queue* queue = nullptr;

inline void finish_queue(bool all) {
  if (queue) queue->finish(all);
}

}  // namespace metalcore::simulated_device
