// What the backend uses of PyTorch: three exported functions, declared here as PyTorch's headers cannot be included
// along with Metal's (both define StringHandle). tools/mac_check compares them with the symbols of each PyTorch.
#pragma once

#include <dispatch/dispatch.h>

#import <Metal/Metal.h>

namespace at::mps {

class MPSStream {
 public:
  // Opens an encoder if none is open. Any PyTorch op may close it, so it is fetched on the stream's queue, used there,
  // and not kept.
  id<MTLComputeCommandEncoder> commandEncoder();
};

// The calling thread's stream.
MPSStream* getCurrentMPSStream();

}  // namespace at::mps

namespace torch::mps {

// The queue on which that stream is encoded. (Before PyTorch 2.15, which made streams public, the default stream's: the
// only one there is.)
dispatch_queue_t get_dispatch_queue();

}  // namespace torch::mps
