// The kernels that a program's file names: built-in ones, and generated ones with their sources. Code that runs on the
// host is never made of these: GPUs' compilers take a source, and the CPU runs what the Python package has compiled on
// this machine before.
#pragma once

#include "json.h"

#include <string>
#include <string_view>

namespace metalcore::c_api {

// What NVRTC compiles a generated kernel from: the text and what is known of the kernel, which live as long as the
// process. nullptr where there is no such kernel.
struct CudaText {
  std::string program;
  Json kernel;
};
const CudaText* generated_cuda(std::string_view kernel);

class Kernels {
 public:
  // Makes the file's generated kernels known. Throws std::runtime_error where a built-in one has another source than
  // the file means, or where a generated one cannot be taken.
  Kernels(const Json& builtin, const Json& generated, std::string_view device_type);

  // Throws std::runtime_error unless the file has described the kernel.
  void require(const std::string& kernel) const;

 private:
  const Json &builtin_, &generated_;
};

}  // namespace metalcore::c_api
