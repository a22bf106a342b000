// The built-in kernels as Metal pipelines, made when a kernel is first used and kept.
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

// From any thread. Throws std::runtime_error: an unknown kernel, or Metal's own message where it refuses one.
const Pipeline& pipeline(id<MTLDevice> device, std::string_view kernel);

std::vector<std::string> kernel_names();

}  // namespace metalcore::mps
