// The GPU, where no stream of PyTorch's tells it, and autorelease pools for what uses Metal's objects.
#pragma once

#import <Metal/Metal.h>

#include <cstdint>
#include <exception>
#include <string>

namespace metalcore::mps {

// The first device of the system, which PyTorch takes too; where the system lists none, as virtual machines and
// processes without a display may, its default device; nil where that is missing as well. The caller owns the object.
// (The default device alone would not do: it needs CoreGraphics, which a process of ssh, tmux, launchd or a CI job may
// not have.)
id<MTLDevice> copy_device() NS_RETURNS_RETAINED;

// The GPU's cores, by IOKit's registry; 0 where it has none.
uint32_t gpu_cores();

// "apple9" and the like: the newest of Apple's GPU families that the GPU belongs to; "" while none is found.
const std::string& gpu_family();

// Calls `body` in an autorelease pool of its own, since threads of C programs have none. What `body` throws is thrown
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

}  // namespace metalcore::mps
