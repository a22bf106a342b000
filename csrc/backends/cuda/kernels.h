// Kernels as they are launched. On first use a kernel is compiled for its bindings and loaded on its GPU; it is kept as
// long as the process lives.
#pragma once

#include "../../gpu/limits.h"
#include "driver.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace metalcore::cuda {

// The beginning of a kernel's parameter block, which is the one argument of its CUDA entry. The kernel's translation
// lays the block out in the same way (metalcore/msl/include/cuda/entry.h). The grid comes first. Then come the
// addresses of the bound buffers and the offsets of the threadgroup arguments in dynamic shared memory, eight bytes
// each, both by ascending index. Then come the bytes that are bound in place of buffers, by ascending index, each at a
// multiple of 16.
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

struct Request {
  uint32_t program;  // 0 for the built-in kernels, or a number that Python has given
  std::string kernel;
  std::string signature;
};

struct Compiled {
  std::string code;    // a cubin, or PTX
  std::string entry;   // the kernel's name in it
  std::string source;  // the file of a built-in kernel below kernels/; "" for others
};

// Calls the compiler, a Python function that translates, compiles with NVRTC and caches on disk. libmetalcore has one
// of its own in its place (csrc/c_api/cuda/compiler.cpp). The calling thread must hold no lock that a thread with the
// GIL may wait for. Throws python::Raised for a Python exception.
std::vector<Compiled> compile(int arch, const std::vector<Request>& requests);

// A kernel on one GPU.
struct Loaded {
  Function function;
  uint32_t max_threads;         // per threadgroup
  uint32_t static_memory;       // bytes of shared memory that threadgroup variables take
  uint32_t max_dynamic_memory;  // bytes of shared memory that threadgroup arguments may take
  uint32_t pipeline_memory;     // bytes of dynamic shared memory that the kernel wants besides
  uint32_t registers;
  uint32_t local_memory;
};

struct NamedKernel;

// A kernel with one layout of its parameter block.
struct Variant {
  NamedKernel& kernel;
  const Layout layout;
  Variant* const next;
  std::atomic<const Loaded*> on[kMaximumDevices] = {};  // by Device::index; null where it is not loaded
  struct Code {
    int arch;  // Device::arch
    Kernel kernel;
    uint32_t pipeline_memory;
  };
  std::vector<Code> compiled;  // load() locks it
};

struct NamedKernel {
  uint32_t program;  // as in Request
  std::string name;
  std::string source;  // as in Compiled; set when the first variant is loaded
  std::atomic<Variant*> variants = nullptr;

  Variant& variant(const Layout& layout);
  // "kernel 'x' of softmax.metal", so that errors can tell kernels apart; "kernel 'x'" where the source has no file.
  std::string description() const { return "kernel '" + name + "'" + (source.empty() ? "" : " of " + source); }
};

NamedKernel& find_kernel(uint32_t program, std::string_view name);

// Loads the variants that are not yet loaded on the device, with one call of the compiler at most. The device's context
// must be current, and the GIL must not be held. Throws what compile() throws, or std::runtime_error.
void load(const Device& device, const std::vector<Variant*>& variants);

}  // namespace metalcore::cuda
