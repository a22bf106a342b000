// Kernels with their parameter blocks and grids, which launch() launches in order. It first loads every kernel, so that
// an error launches nothing, and compiles all missing kernels together.
#pragma once

#include "kernels.h"

#include "../../gpu/limits.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace metalcore::cuda {

class Launches {
 public:
  // These bind arguments for the dispatches until the next kernel. The callers have checked the values.
  void kernel(NamedKernel& kernel);
  void buffer(uint32_t index, const void* address);
  void* bytes(uint32_t index, size_t size);  // the caller fills it before any other call
  void threadgroup_memory(uint32_t index, uint32_t bytes);

  void dispatch(gpu::Size threads, gpu::Size threadgroup, uint32_t together = 1);

  // Launches the dispatches in order on PyTorch's current stream of the device.
  void launch(const Device& device);
  // The two parts of it: what may fail, and what is done again where dispatches [first, end) are launched again.
  void prepare(const Device& device);
  void submit(const Device& device, size_t first, size_t end);

  // Forgets everything, but keeps the memory for the next recording.
  void clear();

  std::string_view name() const { return kernel_ ? std::string_view(kernel_->name) : std::string_view(); }

 private:
  struct Dispatch {
    Variant* variant;
    size_t block;  // its first byte in blocks_
    gpu::Size threadgroups, threadgroup;
    uint32_t shared_memory;
    uint32_t together;  // threadgroups of a cluster, in y
  };
  void load_missing(const Device& device);
  void launch(const Device& device, const Dispatch& dispatch, Stream stream);

  // The bindings. bytes_ says where the bytes are in staged_.
  NamedKernel* kernel_ = nullptr;
  Layout layout_;
  std::array<const void*, gpu::kMaximumBuffers> addresses_;
  std::array<uint32_t, gpu::kMaximumBuffers> lengths_;
  struct Staged {
    size_t begin, size;
  };
  std::array<Staged, gpu::kMaximumBuffers> bytes_;
  std::vector<std::byte> staged_;

  std::vector<Dispatch> dispatches_;
  std::vector<std::byte> blocks_;
};

}  // namespace metalcore::cuda
