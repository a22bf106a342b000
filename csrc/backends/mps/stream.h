// The backend uses four exported functions of PyTorch. They are declared here because PyTorch's headers cannot be
// included together with Metal's (both define StringHandle). tools/mac_check compares them with each PyTorch's symbols.
#pragma once

#include <dispatch/dispatch.h>

#import <Metal/Metal.h>

namespace at::mps {

enum class SyncType {
  NONE,
  COMMIT,
};

class MPSStream {
 public:
  // Opens an encoder if none is open. Any PyTorch op may close the encoder, so it is fetched on the stream's queue,
  // used there and not kept.
  id<MTLComputeCommandEncoder> commandEncoder();

  id<MTLDevice> device() const;

  // With COMMIT it ends the encoder and commits the command buffer, without a wait. It is called on the queue.
  void synchronize(SyncType type);
};

// Returns the calling thread's stream.
MPSStream* getCurrentMPSStream();

}  // namespace at::mps

namespace torch::mps {

// Returns the queue on which that stream is encoded. (PyTorch before 2.15 has only the default stream, and returns its
// queue.)
dispatch_queue_t get_dispatch_queue();

}  // namespace torch::mps
