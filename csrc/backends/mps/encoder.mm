#include "encoder.h"

#import "pipelines.h"
#import "stream.h"

#include "../../gpu/limits.h"

#import <Foundation/Foundation.h>

#include <array>
#include <exception>
#include <string>

namespace metalcore::mps {
namespace {

id<MTLBuffer> buffer_of(const gpu::BufferView& view) { return static_cast<id<MTLBuffer>>(view.storage); }

MTLSize metal_size(gpu::Size size) { return MTLSizeMake(size.x, size.y, size.z); }

class MetalEncoder final : public gpu::Encoder {
 public:
  explicit MetalEncoder(id<MTLComputeCommandEncoder> encoder) : encoder_(encoder) {}

  Encoder& kernel(std::string_view name) override {
    pipeline_ = &pipeline(encoder_.device, name);
    name_ = name;
    threadgroup_lengths_.fill(0);
    [encoder_ setComputePipelineState:pipeline_->state];
    return *this;
  }

  Encoder& buffer(uint32_t index, const gpu::BufferView& view) override {
    gpu::check_index(name_, index);
    if (id<MTLBuffer> buffer = buffer_of(view)) {
      [encoder_ setBuffer:buffer offset:view.offset atIndex:index];
    } else {  // a tensor without elements has no memory, but Metal wants each of a kernel's buffers bound
      const uint64_t nothing = 0;
      [encoder_ setBytes:&nothing length:sizeof(nothing) atIndex:index];
    }
    return *this;
  }

  Encoder& bytes(uint32_t index, const void* data, size_t size) override {
    gpu::check_index(name_, index);
    gpu::check_bytes(name_, index, size);
    [encoder_ setBytes:data length:size atIndex:index];
    return *this;
  }

  Encoder& pointers(uint32_t index, const gpu::BufferView* views, size_t count) override {
    gpu::check_index(name_, index);
    gpu::check_pointers(name_, index, count);
    std::array<uint64_t, gpu::kMaximumPointers> addresses;
    for (size_t i = 0; i < count; ++i) {
      id<MTLBuffer> buffer = buffer_of(views[i]);
      addresses[i] = buffer ? buffer.gpuAddress + views[i].offset : 0;
      // The driver cannot see which buffers a kernel reaches by address.
      if (buffer) [encoder_ useResource:buffer usage:MTLResourceUsageRead | MTLResourceUsageWrite];
    }
    [encoder_ setBytes:addresses.data() length:count * sizeof(uint64_t) atIndex:index];
    return *this;
  }

  Encoder& threadgroup_memory(uint32_t index, size_t bytes) override {
    gpu::check_index(name_, index);
    threadgroup_lengths_[index] = (bytes + 15) / 16 * 16;
    [encoder_ setThreadgroupMemoryLength:threadgroup_lengths_[index] atIndex:index];
    return *this;
  }

  void dispatch_threads(gpu::Size threads, gpu::Size group) override {
    if (check_dispatch(threads, group))
      [encoder_ dispatchThreads:metal_size(threads) threadsPerThreadgroup:metal_size(group)];
  }

  void dispatch_threadgroups(gpu::Size groups, gpu::Size group) override {
    if (check_dispatch(groups, group))
      [encoder_ dispatchThreadgroups:metal_size(groups) threadsPerThreadgroup:metal_size(group)];
  }

 private:
  // Whether there is anything to do. Metal itself would end the process for what is refused here, or do nothing at all.
  bool check_dispatch(gpu::Size grid, gpu::Size group) const {
    gpu::check_named(name_);
    if (grid.empty()) return false;
    const uint64_t threads = uint64_t{group.x} * group.y * group.z;
    if (threads == 0 || threads > pipeline_->max_threads)
      gpu::refuse(name_, "a threadgroup of " + std::to_string(threads) + " threads; it must have from 1 to " +
                             std::to_string(pipeline_->max_threads));
    size_t memory = pipeline_->static_memory;
    for (size_t length : threadgroup_lengths_) memory += length;
    if (const size_t most = encoder_.device.maxThreadgroupMemoryLength; memory > most)
      gpu::refuse(name_, std::to_string(memory) + " bytes of threadgroup memory; this GPU has " + std::to_string(most));
    return true;
  }

  const id<MTLComputeCommandEncoder> encoder_;
  const Pipeline* pipeline_ = nullptr;
  std::string name_;
  std::array<size_t, gpu::kMaximumBuffers> threadgroup_lengths_ = {};
};

struct Work {
  at::mps::MPSStream* stream;
  const std::function<void(gpu::Encoder&)>& body;
  std::exception_ptr error;  // libdispatch cannot be unwound
};

void run(void* context) {
  Work& work = *static_cast<Work*>(context);
  @autoreleasepool {
    try {
      MetalEncoder encoder(work.stream->commandEncoder());
      work.body(encoder);
    } catch (...) {
      work.error = std::current_exception();
    }
  }
}

}  // namespace

void encode(const std::function<void(gpu::Encoder&)>& body) {
  // Both are this thread's, so they are asked for here and not on the queue.
  Work work{at::mps::getCurrentMPSStream(), body, nullptr};
  dispatch_sync_f(torch::mps::get_dispatch_queue(), &work, run);
  if (work.error) std::rethrow_exception(work.error);
}

const std::string& gpu_family() {
  static const std::string family = [] {
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    for (int generation = 20; device && generation > 0; --generation)
      if ([device supportsFamily:static_cast<MTLGPUFamily>(MTLGPUFamilyApple1 + generation - 1)])
        return "apple" + std::to_string(generation);
    return std::string();
  }();
  return family;
}

}  // namespace metalcore::mps
