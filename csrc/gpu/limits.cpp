#include "limits.h"

#include <limits>
#include <stdexcept>

namespace metalcore::gpu {

void refuse(std::string_view kernel, const std::string& reason) {
  const std::string prefix = kernel.empty() ? "" : "kernel '" + std::string(kernel) + "': ";
  throw std::invalid_argument("metalcore: " + prefix + reason);
}

void check_named(std::string_view kernel) {
  if (kernel.empty()) refuse(kernel, "a dispatch before a kernel was named");
}

void check_index(std::string_view kernel, uint32_t index) {
  check_named(kernel);
  if (index >= kMaximumBuffers) refuse(kernel, "index " + std::to_string(index) + "; arguments have indices up to 30");
}

void check_bytes(std::string_view kernel, uint32_t index, size_t size) {
  if (size > kMaximumBytes)
    refuse(kernel, "bytes at index " + std::to_string(index) + " are " + std::to_string(size) + "; Metal allows 4096");
}

void check_pointers(std::string_view kernel, uint32_t index, size_t count) {
  if (count > kMaximumPointers)
    refuse(kernel,
           "a table of " + std::to_string(count) + " pointers at index " + std::to_string(index) + "; at most 512 fit");
}

Size threads_of(std::string_view kernel, Size threadgroups, Size threadgroup) {
  const auto side = [&](uint32_t count, uint32_t size) {
    const uint64_t threads = uint64_t{count} * size;
    if (threads > std::numeric_limits<uint32_t>::max())
      refuse(kernel, "a grid of " + std::to_string(threads) + " threads along one side; positions have 32 bits");
    return static_cast<uint32_t>(threads);
  };
  check_named(kernel);
  if (threadgroups.empty()) return {0, 0, 0};
  if (threadgroup.empty()) refuse(kernel, "a threadgroup of no threads");
  return {side(threadgroups.x, threadgroup.x), side(threadgroups.y, threadgroup.y),
          side(threadgroups.z, threadgroup.z)};
}

}  // namespace metalcore::gpu
