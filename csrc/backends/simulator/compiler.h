// Generated kernels are translated and compiled by a Python function, which keeps the libraries on disk.
#pragma once

#include <string>
#include <string_view>

struct _object;  // PyObject

namespace metalcore::simulator {

// Sets compiler(kernel, checking) -> path of a library that has the kernel, or no compiler (None). Needs the GIL.
void set_compiler(_object* compiler);

// Calls the compiler. The calling thread must hold no lock that a thread with the GIL may wait for. Throws
// python::Raised for a Python exception.
std::string compile_generated(std::string_view kernel, bool checking);

}  // namespace metalcore::simulator
