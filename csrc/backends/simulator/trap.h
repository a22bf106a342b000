// Signals in kernel code. Those of the CPU (a division by zero, an access to memory that is not there, a stack that ran
// over, an instruction that stops the program) end the dispatch with a Fault, and the process goes on; one that the
// watchman sends (watch.h) pauses the kernel.
#pragma once

#include "fault.h"
#include "host/kernel_abi.h"

#include <signal.h>

namespace metalcore::simulator {

// By default it does nothing, and so does one that comes too late.
constexpr int kPause = SIGURG;

// What a signal handler notes down.
struct Trap {
  enum Kind : uint8_t { kNone, kDivision, kMemory, kStack, kStop, kTimeout, kInterrupt };
  Kind kind = kNone;
  const char* pc = nullptr;
  msl_abi::Thread thread = {};
  bool thread_known = false;  // else it is the first thread of a row, one of which it was
};

// Makes signals that kernels on the calling thread raise end their dispatch. Those of other code go where they went
// before. Costs next to nothing after a thread's first call.
void catch_traps();

// Finds the line, where the library has debug information. Not for signal handlers.
Fault fault_of(const Trap& trap, const msl_abi::Kernel& kernel);
// Whether the dispatch did nothing wrong except that it lasted.
bool is_impatience(const Fault& fault);

}  // namespace metalcore::simulator
