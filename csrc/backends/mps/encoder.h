// Encodes recordings on Metal's compute encoders, whoever opens and commits the command buffers.
#pragma once

#include "../../gpu/cost.h"
#include "../../gpu/recording.h"
#import "pipelines.h"

#import <Metal/Metal.h>

#include <cstddef>
#include <vector>

namespace at::mps {
class MPSStream;
}

namespace metalcore::mps {

// The work in a command buffer, by the estimate of gpu/cost.h. It counts metalcore's own dispatches since metalcore
// last had the stream commit. PyTorch's commits are not seen, so that some commits come early: each costs microseconds,
// for 200 ms of work.
class CommandBuffer {
 public:
  // Whether the stream must commit before a dispatch of this length, which it then counts. A dispatch that is longer
  // than all that a command buffer may hold gets one of its own.
  bool must_end_before(double seconds) {
    const bool end = seconds_ > 0 && seconds_ + seconds > gpu::kMostSeconds;
    seconds_ = end ? seconds : seconds_ + seconds;
    return end;
  }

 private:
  double seconds_ = 0;
};

// The work in a stream's command buffer. It is used on the stream's queue alone.
CommandBuffer& command_buffer(const at::mps::MPSStream* stream);

// The command buffer that is open.
class OpenCommands {
 public:
  virtual ~OpenCommands() = default;
  virtual id<MTLComputeCommandEncoder> encoder() = 0;
  // Ends the command buffer. The next encoder is that of a new one.
  virtual void commit() = 0;
  virtual CommandBuffer& work() = 0;
};

// The pipelines of the dispatches from `first` on. All are made and checked before one is encoded, and off the queue: a
// compiler may take seconds.
std::vector<const Pipeline*> made_pipelines(const gpu::Recording& recording, size_t first, id<MTLDevice> device);

// Encodes dispatches [first, end), whose pipelines these are. It commits where a command buffer would become too long.
void encode(OpenCommands& commands, const gpu::Recording& recording, size_t first, size_t end,
            const Pipeline* const* pipelines);

}  // namespace metalcore::mps
