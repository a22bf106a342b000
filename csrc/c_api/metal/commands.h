// A Metal context's command buffers, and autorelease pools for what uses Metal's objects.
#pragma once

#import "../../backends/mps/encoder.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <exception>

namespace metalcore::c_api {

// Calls `body` in an autorelease pool of its own, since a C program's threads have none. What `body` throws is thrown
// behind the pool's end, because exceptions of C++ do not close a pool.
template <typename Body>
void in_pool(const Body& body) {
  std::exception_ptr failure;
  @autoreleasepool {
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

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
