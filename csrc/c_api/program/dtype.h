// The dtypes of tensors in files.
#pragma once

#include <metalcore.h>

#include <cstddef>
#include <string_view>

namespace metalcore::c_api {

struct Dtype {
  metalcore_dtype number;
  const char* name;  // PyTorch's
  const char* code;  // safetensors'
  size_t size;       // of an element, in bytes
  bool is_float;
};

// nullptr where no program may have such a dtype.
const Dtype* dtype_named(std::string_view name);
const Dtype* dtype_of_code(std::string_view code);

// Converts `count` numbers between two floating-point dtypes, to the nearest one, and to the even one of two.
void convert(const void* from, const Dtype& from_dtype, void* to, const Dtype& to_dtype, size_t count);

}  // namespace metalcore::c_api
