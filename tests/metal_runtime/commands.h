// The content of a command buffer: dispatches, recorded with everything that they need, until they run.
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
  std::vector<RuntimeBuffer*> buffers;  // in flight until it has run
};

// One encoder of Metal's, from the time it is opened until it is ended. On PyTorch's streams blocks on the queue share
// it.
struct Encoding {
  Encoding(std::vector<Command>& commands, bool concurrent = false, bool captured = false)
      : commands(commands), concurrent(concurrent), captured(captured) {}
  virtual ~Encoding() = default;

  // Throws Misuse where this thread may not use it now.
  virtual void require_usable() const = 0;
  // Counts a dispatch, before it is recorded, and its part of what a command buffer may hold.
  virtual void count(const std::string& kernel) = 0;
  // A dispatch that is recorded uses the buffers.
  virtual void use(const std::vector<RuntimeBuffer*>& buffers, const std::string& what) = 0;
  virtual void end() = 0;

  std::vector<Command>& commands;
  const bool concurrent, captured;
  bool ended = false;
  bool barrier = true;  // no dispatch has come since the last one
};

// The work of a command buffer, by the backend's own estimates.
class Work {
 public:
  // Adds the dispatch that the backend estimated last. Throws Misuse where that is too much.
  void add(const std::string& kernel);

 private:
  double seconds_ = 0;
};

// Multiplies what dispatches take: a slower GPU.
void set_slowness(double factor);

// The encoder object that a block gets of an encoding. It is valid in that block only, and begins with nothing bound.
id<MTLComputeCommandEncoder> encoder_for_block(std::shared_ptr<Encoding> encoding);
void block_is_over(id<MTLComputeCommandEncoder> encoder);

}  // namespace metalcore::metal_runtime
