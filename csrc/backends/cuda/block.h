// The parameter block of a kernel is the one argument of its CUDA entry; the kernel's translation lays it out in the
// same way (metalcore/msl/include/cuda/entry.h). The grid comes first. Then come the addresses of the bound buffers and
// the offsets of the threadgroup arguments in dynamic shared memory, eight bytes each, both by ascending index. Then
// come the bytes that are bound in place of buffers, by ascending index, each at a multiple of 16.
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

constexpr size_t kMaximumBlock = 32764;  // the most bytes that a launch can pass
constexpr size_t kAlignment = 16;

// The kind of binding at each index. Bytes have a capacity rather than a size, so that bindings of many sizes share few
// kernels: multiples of 16 up to 256, then powers of two.
struct Layout {
  uint32_t buffers = 0, threadgroups = 0, bytes = 0;  // masks of indices
  uint8_t capacity[gpu::kMaximumBuffers + 1] = {};    // codes, 0 where no bytes are bound

  bool operator==(const Layout&) const = default;
};

uint8_t capacity_code(size_t size);  // the code of the smallest capacity for this many bytes
size_t capacity_of(uint8_t code);

// The size of the block in bytes. A capacity of zero (see parse_layout) adds none.
size_t block_size(const Layout& layout);

// Returns the layout as the compiler takes it: "b0,b1,t0,i2:48" for buffers at 0 and 1, a threadgroup argument at 0 and
// 48 bytes at 2.
std::string signature(const Layout& layout);
// Returns the layout for a signature. "i2:0" means as many bytes as the kernel's argument has; such a layout cannot be
// launched. Throws std::invalid_argument.
Layout parse_layout(std::string_view signature);

// Calls visit(i) for the set bits of a mask, ascending.
template <typename Visit>
void for_each_bit(uint32_t mask, Visit visit) {
  for (; mask; mask &= mask - 1) visit(static_cast<uint32_t>(__builtin_ctz(mask)));
}

constexpr size_t aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace metalcore::cuda
