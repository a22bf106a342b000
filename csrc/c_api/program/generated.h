// Generated kernels of programs' files. Code that runs on the host is never made of them: GPUs' compilers take the
// source, and the CPU runs those that the Python package has compiled on this machine before.
#pragma once

#include "json.h"

#include <string>
#include <string_view>

namespace metalcore::c_api {

// Makes a kernel known, by its description in a file. Throws std::runtime_error where a kernel of the name has another
// source already.
void add_generated(const std::string& kernel, const Json& described, std::string_view device_type);

// What NVRTC compiles a generated kernel from: the text and what is known of the kernel, which live as long as the
// process. nullptr where there is no such kernel.
struct CudaText {
  std::string program;
  Json kernel;
};
const CudaText* generated_cuda(std::string_view kernel);

}  // namespace metalcore::c_api
