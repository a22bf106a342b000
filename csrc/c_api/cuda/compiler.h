// The compiler of kernels for NVIDIA GPUs without Python.
#pragma once

#include "../../backends/cuda/kernels.h"
#include "../program/json.h"

#include <string>

namespace metalcore::c_api {

constexpr const char* kEntry = "metalcore_0";

// Makes CUDA C++ of one kernel, as metalcore/msl/language/cuda_source.py does for the Python package:
// the translated program (lib/cuda/<family>.cu) with an entry for the kernel, bound as the layout says. `described` is
// the kernel's part of lib/cuda/<family>.json. Throws std::runtime_error where an argument is bound to nothing.
std::string cuda_source(const std::string& program, const std::string& kernel, const Json& described,
                        const cuda::Layout& layout);

// Throws Error where the programs, their headers or NVRTC are missing.
void require_compiler();

}  // namespace metalcore::c_api
