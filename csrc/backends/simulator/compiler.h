// Python functions translate and compile kernels, and keep the libraries on disk: generated kernels, and in a checkout
// the built-in ones that the build has left out.
#pragma once

#include <string>
#include <string_view>

struct _object;  // PyObject

namespace metalcore::simulator {

// Sets compiler(kernel, family, checking, flushing) -> path of a library that has the kernel, or no compiler (None).
// The family is None for a generated kernel. Needs the GIL.
void set_compiler(_object* compiler);

// Calls the compiler; a generated kernel has no family (""). The calling thread must hold no lock that a thread with
// the GIL may wait for. Throws python::Raised for a Python exception.
std::string compile_kernel(std::string_view kernel, const std::string& family, bool checking, bool flushing);

}  // namespace metalcore::simulator
