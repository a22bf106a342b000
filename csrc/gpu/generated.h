// Kernels that Python makes while a process runs (metalcore/_core/generated_kernels.py). Recordings name them as they
// name the built-in ones. A name is made of the source's digest, so it never means another kernel.
#pragma once

#include <string>
#include <string_view>

namespace metalcore::gpu {

void add_generated(std::string_view kernel, std::string_view source);

// The MSL of a generated kernel, or nullptr.
const std::string* generated_source(std::string_view kernel);

}  // namespace metalcore::gpu
