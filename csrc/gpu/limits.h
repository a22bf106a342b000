// Metal's limits on arguments and dispatches, which hold for every backend. Metal itself ends the process for some of
// what these checks refuse. They throw std::invalid_argument with the kernel's name, which is empty before one is
// named.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace metalcore::gpu {

// The size of a grid or of a threadgroup.
struct Size {
  uint32_t x = 1, y = 1, z = 1;
  bool empty() const { return x == 0 || y == 0 || z == 0; }
};

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;                 // per threadgroup
constexpr uint32_t kMaxThreadgroupMemory = 32 * 1024;  // bytes

constexpr uint32_t kMaximumBuffers = 31;
constexpr size_t kMaximumBytes = 4096;
constexpr size_t kMaximumPointers = 512;

[[noreturn]] void refuse(std::string_view kernel, const std::string& reason);

void check_named(std::string_view kernel);
void check_index(std::string_view kernel, uint32_t index);
void check_bytes(std::string_view kernel, uint32_t index, size_t size);
void check_pointers(std::string_view kernel, uint32_t index, size_t count);

// The threads of `threadgroups`, or {0, 0, 0} if these are none.
Size threads_of(std::string_view kernel, Size threadgroups, Size threads_per_threadgroup);

}  // namespace metalcore::gpu
