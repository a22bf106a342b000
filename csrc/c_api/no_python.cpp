// Takes the place of csrc/backends/simulator/python_signals.cpp: a C program has no signal handlers of Python's.
#include "../backends/simulator/python_signals.h"

namespace metalcore::simulator {

void run_python_handlers() {}
void listen_to_interrupts(bool) {}
uint32_t interrupts() { return 0; }
bool interrupts_raise() { return false; }

}  // namespace metalcore::simulator
