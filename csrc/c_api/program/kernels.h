// The kernels that a program's file names.
#pragma once

#include "json.h"

#include <string>
#include <string_view>

namespace metalcore::c_api {

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
