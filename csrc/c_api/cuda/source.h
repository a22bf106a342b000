// CUDA C++ of one built-in kernel, as metalcore/msl/language/cuda_source.py makes it for the Python package.
#pragma once

#include "../program/json.h"

#include "../../backends/cuda/block.h"

#include <string>

namespace metalcore::c_api {

constexpr const char* kEntry = "metalcore_0";

// The translated program (lib/cuda/<family>.cu) with an entry for the kernel, bound as the layout says. `described` is
// the kernel's part of lib/cuda/<family>.json. Throws std::runtime_error where an argument is bound to nothing.
std::string cuda_source(const std::string& program, const std::string& kernel, const Json& described,
                        const cuda::Layout& layout);

}  // namespace metalcore::c_api
