#import "commands.h"

#include "../error.h"
#include "commands.h"

#import "../../backends/mps/device.h"

#import <Foundation/Foundation.h>

#include <stdexcept>
#include <string>

namespace metalcore::c_api {

Commands::Commands() {
  in_pool([&] {
    device_ = mps::copy_device();
    queue_ = [device_ newCommandQueue];
  });
  if (queue_) return;
  const bool found = device_ != nil;
  [device_ release];
  throw Error(METALCORE_NO_DEVICE, found ? "Metal gives no command queue" : "this machine has no Metal device");
}

Commands::~Commands() {
  drop();
  [queue_ release];
  [device_ release];
}

id<MTLComputeCommandEncoder> Commands::encoder() {
  if (encoder_) return encoder_;
  in_pool([&] {
    buffer_ = [[queue_ commandBuffer] retain];
    encoder_ = [[buffer_ computeCommandEncoder] retain];
  });
  if (!encoder_) throw std::runtime_error("metalcore: Metal gives no command buffer");
  return encoder_;
}

void Commands::commit() {
  if (!encoder_) return;
  end_encoder();
  std::string failure;
  in_pool([&] {
    [buffer_ commit];
    [buffer_ waitUntilCompleted];
    if (buffer_.status == MTLCommandBufferStatusCompleted) return;
    const char* const reason = buffer_.error.localizedDescription.UTF8String;
    failure = reason ? reason : "no reason given";
  });
  drop();
  if (!failure.empty()) throw std::runtime_error("metalcore: Metal: a command buffer failed: " + failure);
}

void Commands::drop() noexcept {
  end_encoder();
  [buffer_ release];
  buffer_ = nil;
  work_ = {};
}

void Commands::end_encoder() noexcept {
  [encoder_ endEncoding];
  [encoder_ release];
  encoder_ = nil;
}

}  // namespace metalcore::c_api
