// One dispatch as asked for, and its way to the executor.
#pragma once

#include "library.h"

#include "../../gpu/limits.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace metalcore::simulator {

using gpu::kMaximumBuffers;

// An address among an argument's bytes, and the memory of the device that it lies in.
struct Embedded {
  size_t offset;  // of the address, in the argument
  char* begin;
  size_t size;
};

class Watch;

struct Binding {
  enum Kind : uint8_t { kNone, kBuffer, kBytes, kPointers };
  Kind kind = kNone;
  void* address = nullptr;  // of the first byte; may be null where size is 0
  size_t size = 0;
  const size_t* spans = nullptr;  // kPointers: bytes that may be used behind each of the size / 8 addresses
  // What checking mode allows besides, where allocations() does not know.
  const std::vector<Embedded>* embedded = nullptr;
};

// The device's memory, for checking mode: what an address that a kernel finds in its arguments may lead to.
struct Allocations {
  // The allocation that holds an address; 0 where there is none.
  size_t (*find)(uintptr_t address, uintptr_t* begin);
  // Between these are all of them.
  void (*range)(uintptr_t* low, uintptr_t* high);
};
void set_allocations(const Allocations& allocations);
const Allocations& allocations();  // null functions where nobody has set them

struct Launch {
  KernelReference kernel;
  std::array<Binding, kMaximumBuffers> buffers;
  std::array<uint32_t, kMaximumBuffers> threadgroup_lengths = {};
  msl_abi::Uint3 threads = {};
  msl_abi::Uint3 group = {};
};

// Runs the launch to its end; in checking mode where its library was compiled for it. Throws std::invalid_argument for
// a launch that Metal would refuse, Fault for a kernel that went wrong: one that is checked, or that the CPU stopped.
void execute(const Launch& launch);

// Checking mode of this process; METALCORE_CHECK=1 switches it on from the start.
struct Checking {
  bool on;
  uint32_t seed;            // of the order in which threads run
  bool misaligned = false;  // allows accesses that are not aligned
};
Checking checking();
void set_checking(Checking checking);

// What a dispatch tells its kernel, made from a launch.
struct Grid {
  msl_abi::Dispatch dispatch;
  uint64_t groups;      // threadgroups in all
  uint32_t group_size;  // threads of a full one
};
Grid make_grid(const Launch& launch, void* const* buffers);

// The executor of checking mode.
void execute_checked(const Launch& launch, Watch& watch);

}  // namespace metalcore::simulator
