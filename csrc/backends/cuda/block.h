// The parameter block of a kernel: the one argument of its CUDA entry, which its translation lays out in the same way
// (metalcore/msl/include/cuda/entry.h). First the grid; then the addresses of the bound buffers and the offsets of the
// threadgroup arguments in dynamic shared memory, eight bytes each, both by ascending index; then, each at a multiple
// of 16, the bytes that are bound in place of buffers, by ascending index.
#pragma once

#include "../../gpu/limits.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace metalcore::cuda {

struct Grid {
  uint32_t threads_per_grid[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t first_threadgroup[3];  // of this launch
};
static_assert(sizeof(Grid) == 48);

constexpr size_t kMaximumBlock = 32764;  // what a launch can pass
constexpr size_t kAlignment = 16;

// What is bound at which index. Bytes have a capacity rather than a size, so that bindings of many sizes share few
// kernels: multiples of 16 up to 256, powers of two from there on.
struct Layout {
  uint32_t buffers = 0, threadgroups = 0, bytes = 0;  // masks of indices
  uint8_t capacity[gpu::kMaximumBuffers + 1] = {};    // codes, 0 where no bytes are bound

  bool operator==(const Layout&) const = default;
};

uint8_t capacity_code(size_t size);  // of the smallest capacity that holds so many bytes
size_t capacity_of(uint8_t code);

// The bytes of the block. A capacity of zero (see parse_layout) counts as none.
size_t block_size(const Layout& layout);

// The layout as the compiler takes it: "b0,b1,t0,i2:48" for buffers at 0 and 1, a threadgroup argument at 0 and 48
// bytes at 2.
std::string signature(const Layout& layout);
// The inverse. "i2:0" stands for as many bytes as the kernel's argument has; such a layout cannot be launched. Throws
// std::invalid_argument.
Layout parse_layout(std::string_view signature);

// Calls visit(i) for the set bits of a mask, ascending.
template <typename Visit>
void for_each_bit(uint32_t mask, Visit visit) {
  for (; mask; mask &= mask - 1) visit(static_cast<uint32_t>(__builtin_ctz(mask)));
}

constexpr size_t aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace metalcore::cuda
