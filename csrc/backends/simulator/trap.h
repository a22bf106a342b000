// Signals of the CPU in kernel code: a division by zero, an access to memory that is not there, a stack that ran over.
// The dispatch ends with a Fault, and the process goes on.
#pragma once

#include "fault.h"
#include "host/kernel_abi.h"

namespace metalcore::simulator {

// What a signal handler notes down.
struct Trap {
  enum Kind : uint8_t { kNone, kDivision, kMemory, kStack };
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

}  // namespace metalcore::simulator
