#import "half_subnormals.h"

#import <Foundation/Foundation.h>

#include <cstdint>

namespace metalcore::mps {

bool keeps_half_subnormals(id<MTLDevice> device, id<MTLComputePipelineState> kernel) {
  id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
  id<MTLBuffer> smallest = [[device newBufferWithLength:sizeof(uint32_t)
                                                options:MTLResourceStorageModeShared] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!smallest || !encoder) return true;
  auto* const number = static_cast<uint32_t*>([smallest contents]);
  *number = 1;
  [encoder setComputePipelineState:kernel];
  [encoder setBuffer:smallest offset:0 atIndex:0];
  [encoder dispatchThreads:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  [commands waitUntilCompleted];
  return commands.status != MTLCommandBufferStatusCompleted || *number != 0;
}

}  // namespace metalcore::mps
