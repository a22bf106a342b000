// A Metal context's command buffers.
#pragma once

#import "../../backends/mps/device.h"
#import "../../backends/mps/encoder.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

namespace metalcore::c_api {

using mps::in_pool;

// The command buffers of a context, on a queue of its own.
class Commands final : public mps::OpenCommands {
 public:
  // Throws Error where there is no GPU.
  Commands();
  ~Commands() override;
  Commands(const Commands&) = delete;

  id<MTLDevice> device() const { return device_; }
  // A command buffer is opened where none is.
  id<MTLComputeCommandEncoder> encoder() override;
  mps::CommandBuffer& work() override { return work_; }
  // Has the GPU run what is encoded, if anything is, and waits. Throws std::runtime_error with Metal's message where it
  // failed. A wait costs microseconds, and there is one for each 200 ms of work or each call.
  void commit() override;
  // Forgets what is encoded.
  void drop() noexcept;

 private:
  void end_encoder() noexcept;

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  id<MTLCommandBuffer> buffer_ = nil;
  id<MTLComputeCommandEncoder> encoder_ = nil;
  mps::CommandBuffer work_;  // in the open command buffer
};

}  // namespace metalcore::c_api
