// The work in a stream's command buffer, by the estimate of gpu/cost.h.
#pragma once

#include "../../gpu/cost.h"

namespace at::mps {
class MPSStream;
}

namespace metalcore::mps {

// It counts metalcore's own dispatches since metalcore last had the stream commit. PyTorch's commits are not seen, so
// that some commits come early: each costs microseconds, for 200 ms of work.
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

// That of a stream. It is used on the stream's queue alone.
CommandBuffer& command_buffer(const at::mps::MPSStream* stream);

}  // namespace metalcore::mps
