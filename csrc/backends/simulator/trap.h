// Signals in kernel code. A signal of the CPU (a division by zero, an access to memory that is not there, a stack that
// ran over, an instruction that stops the program) ends the dispatch with a Fault, and the process goes on. A signal of
// the watchman (watch.h) pauses the kernel.
#pragma once

#include "fault.h"
#include "host/kernel_abi.h"
#include "library.h"

#include <signal.h>

namespace metalcore::simulator {

// By default this signal does nothing, so one that comes too late does no harm.
constexpr int kPause = SIGURG;

// The notes of a signal handler.
struct Trap {
  enum Kind : uint8_t { kNone, kDivision, kMemory, kStack, kStop, kTimeout, kInterrupt };
  Kind kind = kNone;
  const char* pc = nullptr;
  msl_abi::Thread thread = {};
  bool thread_known = false;  // otherwise `thread` is the first of a row, and a thread of that row it was
};

// Makes signals that kernels on the calling thread raise end their dispatch. Signals of other code go where they went
// before. It costs next to nothing after a thread's first call.
void catch_traps();

// Finds the line, where the library has debug information. Signal handlers must not call it.
Fault fault_of(const Trap& trap, const KernelReference& kernel);
// Whether the dispatch did nothing wrong except that it lasted.
bool is_impatience(const Fault& fault);

}  // namespace metalcore::simulator
