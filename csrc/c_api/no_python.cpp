// Takes the place of csrc/backends/simulator/python_signals.cpp and compiler.cpp: a C program has no signal handlers of
// Python's, and no kernels that Python generates.
#include "../backends/simulator/compiler.h"
#include "../backends/simulator/python_signals.h"

#include <stdexcept>

namespace metalcore::simulator {

void run_python_handlers() {}
void listen_to_interrupts(bool) {}
uint32_t interrupts() { return 0; }
bool interrupts_raise() { return false; }

std::string compile_generated(std::string_view kernel, bool) {
  throw std::logic_error("metalcore: kernel '" + std::string(kernel) + "' has no compiler in a C program");
}

}  // namespace metalcore::simulator
