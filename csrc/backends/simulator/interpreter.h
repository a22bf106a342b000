// What the simulator asks of Python: to run the handlers of signals during long dispatches, which Python does only
// where its main thread asks for it, and to compile kernels. libmetalcore answers without Python
// (csrc/c_api/cpu/no_python.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

struct _object;  // PyObject

namespace metalcore::simulator {

// Runs the handlers that are due. Python's main thread calls it, with or without the GIL. Throws Interrupted where a
// handler raises.
void run_python_handlers();

// Begins or ends to listen to SIGINT before Python does. It serves dispatches on other threads than the main one, which
// may be waiting for them in C++. Only one thread calls this.
void listen_to_interrupts(bool on);
// How often SIGINT has come while it was listened to.
uint32_t interrupts();
// Whether SIGINT raises KeyboardInterrupt on the main thread: Python's own handler is in place, or Python is ending.
bool interrupts_raise();
// Makes the end of Python known here: threads without the GIL cannot ask for it. Needs the GIL; one call is enough.
void note_end_of_python();

// Python functions translate and compile kernels, and keep the libraries on disk: generated kernels, and in a checkout
// the built-in ones that the build has left out.

// Sets compiler(kernel, family, checking, flushing) -> path of a library that has the kernel, or no compiler (None).
// The family is None for a generated kernel. Needs the GIL.
void set_compiler(_object* compiler);

// Calls the compiler; a generated kernel has no family (""). The calling thread must hold no lock that a thread with
// the GIL may wait for. Throws python::Raised for a Python exception.
std::string compile_kernel(std::string_view kernel, const std::string& family, bool checking, bool flushing);

// Sets and calls the compiler of libraries that count: compiler(kernel, family) -> path.
void set_counting_compiler(_object* compiler);
std::string compile_counting(std::string_view kernel, const std::string& family);

}  // namespace metalcore::simulator
