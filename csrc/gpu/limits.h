// What Metal's API allows an encoder to bind and dispatch. Metal checks that itself; other backends' encoders do here.
// They throw std::invalid_argument, with the name of the kernel (empty where none was named yet).
#pragma once

#include "encoder.h"

#include <string>

namespace metalcore::gpu {

constexpr uint32_t kMaximumBuffers = 31;
constexpr size_t kMaximumBytes = 4096;
constexpr size_t kMaximumPointers = 512;

[[noreturn]] void refuse(std::string_view kernel, const std::string& reason);

void check_named(std::string_view kernel);
void check_index(std::string_view kernel, uint32_t index);
void check_bytes(std::string_view kernel, uint32_t index, size_t size);
void check_pointers(std::string_view kernel, uint32_t index, size_t count);

// The threads of so many threadgroups; {0, 0, 0} where there are none.
Size threads_of(std::string_view kernel, Size threadgroups, Size threads_per_threadgroup);

}  // namespace metalcore::gpu
