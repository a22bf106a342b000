// Takes the place of csrc/backends/simulator/python_signals.cpp and compiler.cpp: a C program has no signal handlers of
// Python's, and nothing generates kernels in it.
#include "../../backends/simulator/compiler.h"
#include "../../backends/simulator/python_signals.h"

#include <stdexcept>

namespace metalcore::simulator {

void run_python_handlers() {}
void listen_to_interrupts(bool) {}
uint32_t interrupts() { return 0; }
bool interrupts_raise() { return false; }

std::string compile_generated(std::string_view kernel, bool) {
  throw std::logic_error("metalcore: kernel '" + std::string(kernel) + "' was generated, and needs Python");
}

}  // namespace metalcore::simulator
