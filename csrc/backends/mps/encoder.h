// Encodes recordings on Metal's compute encoders, whoever opens and commits the command buffers.
#pragma once

#import "command_buffer.h"
#import "pipelines.h"

#include "../../gpu/recording.h"

#import <Metal/Metal.h>

#include <cstddef>
#include <vector>

namespace metalcore::mps {

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
