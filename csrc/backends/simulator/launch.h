// One dispatch as the caller asked for it, and its way to the executor.
#pragma once

#include "../../gpu/backend.h"
#include "../../gpu/limits.h"
#include "library.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace metalcore::simulator {

using gpu::kMaximumBuffers;

// An address among an argument's bytes, and the device memory that holds this address.
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
  // More memory that checking mode allows, where the device does not know it.
  const std::vector<Embedded>* embedded = nullptr;
};

// What the simulated device does for the executor. The functions are null where there is no such device.
struct DeviceFunctions {
  // Returns the size of the allocation that holds an address, and sets its beginning; 0 where there is none. Checking
  // mode asks, because a kernel may find addresses in its arguments.
  size_t (*find_allocation)(uintptr_t address, uintptr_t* begin);
  // Sets the addresses between which all allocations lie.
  void (*range_of_allocations)(uintptr_t* low, uintptr_t* high);
  // Throws a Fault or an Interrupted as an exception of PyTorch's that holds the Python exception. PyTorch's functions
  // would otherwise pass on no more than the text.
  void (*rethrow)(const std::exception_ptr& exception);
};
void set_device_functions(const DeviceFunctions& functions);
const DeviceFunctions& device_functions();

struct Launch {
  KernelReference kernel;
  std::array<Binding, kMaximumBuffers> buffers;
  std::array<uint32_t, kMaximumBuffers> threadgroup_lengths = {};
  msl_abi::Uint3 threads = {};
  msl_abi::Uint3 group = {};
};

// Throws std::invalid_argument for a launch that Metal would refuse.
void validate(const Launch& launch);

// Runs the launch to its end, in checking mode where its library was compiled for it. Throws std::invalid_argument for
// a launch that Metal would refuse, and Fault for a kernel that went wrong: checking mode or the CPU found it out.
void execute(const Launch& launch);

// Checking mode of this process; METALCORE_CHECK=1 switches it on from the start.
struct Checking {
  bool on;
  uint32_t seed;            // of the order in which threads run
  bool misaligned = false;  // allows accesses that are not aligned
};
Checking checking();
void set_checking(Checking checking);

// The grid of a launch, as its kernel is told of it.
struct Grid {
  msl_abi::Dispatch dispatch;
  uint64_t groups;      // threadgroups in all
  uint32_t group_size;  // threads of a full threadgroup
};
Grid make_grid(const Launch& launch, void* const* buffers);

// The executor of checking mode.
void execute_checked(const Launch& launch, Watch& watch);

// Prepares the recording of a program that was read from a file. Checks every dispatch as far as its arguments tell.
// One that is not trusted runs in checking mode, where no access leaves what is bound. Throws std::invalid_argument, or
// std::runtime_error where a kernel is missing.
std::unique_ptr<gpu::Prepared> prepare_program(const gpu::Recording& recording, bool trusted);

}  // namespace metalcore::simulator
