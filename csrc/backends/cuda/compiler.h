// The compiler of kernels is a Python function, which translates, compiles with NVRTC and caches on disk. libmetalcore
// has one of its own in its place (csrc/c_api/cuda/compiler.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct _object;  // PyObject

namespace metalcore::cuda {

struct Request {
  uint32_t program;  // 0 for the built-in kernels, or a number that Python has given
  std::string kernel;
  std::string signature;
};

struct Compiled {
  std::string code;    // a cubin, or PTX
  std::string entry;   // the kernel's name in it
  std::string source;  // the file of a built-in kernel below kernels/; "" for others
};

// Sets compiler(arch, [(program, kernel, signature), …]) -> [(code, entry, source), …], or no compiler (None). Needs
// the GIL.
void set_compiler(_object* compiler);

// Calls the compiler. The calling thread must hold no lock that a thread with the GIL may wait for. Throws
// python::Raised for a Python exception.
std::vector<Compiled> compile(int arch, const std::vector<Request>& requests);

}  // namespace metalcore::cuda
