// Kernels with their parameter blocks and grids, to be launched one after the other. Nothing is launched before all of
// it is there and every kernel is loaded, so that an error launches nothing; and all kernels that are missing are
// compiled together.
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
  // Bindings for the dispatches to come, until the next kernel. What they are called with was checked.
  void kernel(NamedKernel& kernel);
  void buffer(uint32_t index, const void* address);
  void* bytes(uint32_t index, size_t size);  // for the caller to fill, before any other call
  void threadgroup_memory(uint32_t index, uint32_t bytes);

  void dispatch(gpu::Size threads, gpu::Size group);

  // Launches the dispatches in order on PyTorch's current stream of the device.
  void launch(const Device& device);

  // Forgets everything; keeps the memory for the next recording.
  void clear();

  std::string_view name() const { return kernel_ ? std::string_view(kernel_->name) : std::string_view(); }

 private:
  struct Dispatch {
    Variant* variant;
    size_t block;  // where it begins in blocks_
    gpu::Size groups, group;
    uint32_t shared_memory;
  };
  void load_missing(const Device& device);
  void launch(const Device& device, const Dispatch& dispatch, Stream stream);

  // The bindings; of `bytes` where they lie in staged_.
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
