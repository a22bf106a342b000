// The content of a stream: dispatches, recorded with everything that they need, until the stream commits them.
#pragma once

#import "runtime.h"

#include "../../csrc/backends/simulator/launch.h"

#include <memory>
#include <vector>

namespace metalcore::metal_runtime {

using Bytes = std::vector<char>;

struct Command {
  simulator::Launch launch;
  bool after_barrier = true;  // of a concurrent encoder: it waits for the commands before
  std::vector<std::shared_ptr<Bytes>> bytes;
  std::vector<std::unique_ptr<std::vector<simulator::Embedded>>> embedded;
  std::vector<RuntimeBuffer*> buffers;  // in flight on the stream
};

// One encoder of Metal's, from the time PyTorch opens it until PyTorch ends it. Blocks on the queue share it.
struct Encoding {
  int stream;
  std::vector<Command>& commands;
  bool concurrent, captured;
  bool ended = false;
  bool barrier = true;  // no dispatch has come since the last one
};

// Counts a dispatch, before it is recorded, and its part of what a command buffer may hold.
void dispatched(int stream, const std::string& kernel);

// The encoder object that a block gets of an encoding. It is valid in that block only, and begins with nothing bound.
id<MTLComputeCommandEncoder> encoder_for_block(std::shared_ptr<Encoding> encoding);
void block_is_over(id<MTLComputeCommandEncoder> encoder);

}  // namespace metalcore::metal_runtime
