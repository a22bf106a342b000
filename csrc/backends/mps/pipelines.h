// The built-in kernels as Metal pipelines. A pipeline is made on the first use of its kernel and kept.
#pragma once

#import <Metal/Metal.h>

#include <string>
#include <string_view>
#include <vector>

namespace metalcore::mps {

struct Pipeline {
  id<MTLComputePipelineState> state;
  NSUInteger max_threads;    // per threadgroup
  NSUInteger static_memory;  // of a threadgroup, in bytes
};

// Any thread may call this. Throws std::runtime_error for an unknown kernel, and with Metal's own message for a kernel
// that Metal refuses.
const Pipeline& pipeline(id<MTLDevice> device, std::string_view kernel);

std::vector<std::string> kernel_names();

}  // namespace metalcore::mps
