// NVIDIA's gpu::Backend. It launches a recording on PyTorch's current stream of the device.
#include "../../gpu/backend.h"
#include "../../gpu/per_thread.h"

#include "launches.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace metalcore::cuda {
namespace {

char* address_of(const gpu::BufferView& view) {
  return view.storage ? static_cast<char*>(view.storage) + view.offset : nullptr;
}

void bind(Launches& launches, const gpu::Recording& recording, const gpu::Argument& argument) {
  switch (argument.kind) {
    case gpu::Argument::kBuffer: launches.buffer(argument.index, address_of(*recording.views(argument))); break;
    case gpu::Argument::kBytes:
      std::memcpy(launches.bytes(argument.index, argument.count), recording.bytes(argument), argument.count);
      break;
    case gpu::Argument::kPointers: {
      auto* addresses = static_cast<char**>(launches.bytes(argument.index, argument.count * sizeof(char*)));
      for (uint32_t i = 0; i < argument.count; ++i) addresses[i] = address_of(recording.views(argument)[i]);
      break;
    }
    case gpu::Argument::kThreadgroup: launches.threadgroup_memory(argument.index, argument.count); break;
  }
}

void add(Launches& launches, const gpu::Recording& recording, const gpu::Dispatch& dispatch, NamedKernel& kernel) {
  launches.kernel(kernel);
  for (const gpu::Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument)
    bind(launches, recording, *argument);
  launches.dispatch(recording.threads(dispatch), dispatch.threadgroup, dispatch.together);
}

class PreparedRecording final : public gpu::Prepared {
 public:
  PreparedRecording(const Device& device, const gpu::Recording& recording) : device_(device), recording_(recording) {
    for (const gpu::Dispatch& dispatch : recording.dispatches())
      kernels_.push_back(&find_kernel(0, recording.name(dispatch)));
    pack();
    launches_.prepare(device);
  }

  void submit(size_t first, size_t end) override { launches_.submit(device_, first, end); }

  // The kernels stay: the addresses in their parameter blocks are others.
  void rebound() override {
    launches_.clear();
    pack();
  }

 private:
  void pack() {
    for (size_t i = 0; i < kernels_.size(); ++i) add(launches_, recording_, recording_.dispatches()[i], *kernels_[i]);
  }

  const Device& device_;
  const gpu::Recording& recording_;
  std::vector<NamedKernel*> kernels_;
  Launches launches_;
};

class CudaBackend final : public gpu::Backend {
 public:
  std::string_view device_type() const override { return "cuda"; }

  // Plans were tuned only on these NVIDIA GPUs, and others use the same numbers.
  std::string_view family() override { return "hopper"; }
  uint32_t cores() override { return multiprocessors(); }
  // Their kernels have a fast way from compute capability 8.0 on, and for what threads hold on Hopper.
  bool multiplies_tensors() override { return major() == 0 || major() >= 8; }
  bool multiplies_held_tensors() override { return major() == 0 || major() == 9; }
  uint32_t most_together(int device_index) override {
    return device_index < 0 ? kMostTogether : device(device_index).most_together;
  }

  void submit(int device_index, const gpu::Recording& recording, size_t first) override {
    const Device& current = device(device_index);
    gpu::Spare<Launches> launches;
    for (size_t i = first; i < recording.dispatches().size(); ++i) {
      const gpu::Dispatch& dispatch = recording.dispatches()[i];
      add(*launches, recording, dispatch, find_kernel(0, recording.name(dispatch)));
    }
    (*launches).launch(current);
  }

  std::unique_ptr<gpu::Prepared> prepare(int device_index, const gpu::Recording& recording) override {
    return std::make_unique<PreparedRecording>(device(device_index), recording);
  }

 private:
  static uint32_t major() {
    static std::atomic<uint32_t> found = 0;
    if (found == 0) found = capability_major();
    return found;
  }
};

CudaBackend backend;
const gpu::BackendRegistration registered(backend);

}  // namespace
}  // namespace metalcore::cuda
