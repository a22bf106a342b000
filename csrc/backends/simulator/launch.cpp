#include "launch.h"

#include "counted.h"
#include "pool.h"
#include "library.h"
#include "scratch.h"
#include "modes.h"
#include "fault.h"
#include "threadgroup.h"
#include "trap.h"
#include "watch.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace metalcore::simulator {
namespace {

using msl_abi::Uint3;

[[noreturn]] void refuse(const Launch& launch, const std::string& reason) {
  throw std::invalid_argument("metalcore: " + describe(launch.kernel) + ": " + reason);
}

void execute_normal(const Launch& launch) {
  void* buffers[kMaximumBuffers];
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) buffers[i] = launch.buffers[i].address;
  const Grid grid = make_grid(launch, buffers);
  const msl_abi::Kernel& kernel = *launch.kernel.kernel;
  const bool fibers = kernel.flags & msl_abi::kSynchronizes;
  // Pieces are small enough to spread evenly. A piece of plain loops has at least two thousand threads.
  uint64_t piece = std::max<uint64_t>(1, grid.groups / (uint64_t{num_threads()} * 32));
  if (!fibers) piece = std::max<uint64_t>(piece, 2048 / grid.group_size);
  const bool wide = fibers && grid.groups * grid.group_size >= 1024;
  const auto task = [&](Claim& claim) {
    catch_traps();
    Scratch scratch;
    scratch->begin(launch.kernel, grid.dispatch);
    for (uint64_t begin, end; claim(begin, end);) scratch->run(begin, end, fibers);
  };
  parallel(grid.groups, piece, wide, std::cref(task));  // a function object would allocate memory for a copy
}

// The bits are the seed, then whether misaligned accesses are allowed, then whether checking is on.
std::atomic<uint64_t>& checking_state() {
  static std::atomic<uint64_t> state = switched_on("METALCORE_CHECK") ? 1 : 0;
  return state;
}

DeviceFunctions functions_of_device = {};

}  // namespace

void set_device_functions(const DeviceFunctions& functions) { functions_of_device = functions; }
const DeviceFunctions& device_functions() { return functions_of_device; }

void validate(const Launch& launch) {
  const msl_abi::Kernel& kernel = *launch.kernel.kernel;
  const uint64_t group = uint64_t{launch.group.x} * launch.group.y * launch.group.z;
  const uint32_t limit =
      kernel.max_total_threads ? std::min(kernel.max_total_threads, kMaximumThreads) : kMaximumThreads;
  if (group == 0 || std::max({launch.group.x, launch.group.y, launch.group.z}) > limit || group > limit)
    refuse(launch,
           "a threadgroup of " + text(launch.group) + " threads; it must have from 1 to " + std::to_string(limit));
  uint64_t memory = 0;
  for (uint32_t i = 0; i < kernel.argument_count; ++i) {
    const msl_abi::Argument& argument = kernel.arguments[i];
    const auto which = [&] {
      return "'" + std::string(argument.name) + "' at index " + std::to_string(argument.index);
    };
    if (argument.index >= kMaximumBuffers) refuse(launch, "argument " + which() + ": indices go up to 30");
    if (argument.kind == msl_abi::kThreadgroup) {
      const uint32_t length = launch.threadgroup_lengths[argument.index];
      if (!length)
        refuse(launch, "threadgroup argument " + which() + " has no length set (see threadgroup_memory of a call)");
      memory += (length + 15) / 16 * 16;
      continue;
    }
    const Binding& binding = launch.buffers[argument.index];
    if (binding.kind == Binding::kNone) refuse(launch, "buffer " + which() + " is not bound");
    if (binding.kind == Binding::kBytes && argument.writable)
      refuse(launch, "buffer " + which() + " is written, but bound to bytes");
    if (argument.by_reference && binding.size < argument.element_size)
      refuse(launch, "buffer " + which() + " holds " + std::to_string(binding.size) + " bytes; the kernel reads " +
                         std::to_string(argument.element_size));
  }
  if (memory > kMaximumThreadgroupMemory)
    refuse(launch, std::to_string(memory) + " bytes of threadgroup memory; Metal allows 32768");
}

Grid make_grid(const Launch& launch, void* const* buffers) {
  const Uint3 threads = launch.threads, group = launch.group;
  const auto divide_up = [](uint32_t count, uint32_t size) { return count / size + (count % size != 0); };
  const Uint3 groups = {divide_up(threads.x, group.x), divide_up(threads.y, group.y), divide_up(threads.z, group.z)};
  return {{buffers, launch.threadgroup_lengths.data(), threads, group, groups},
          uint64_t{groups.x} * groups.y * groups.z,
          group.x * group.y * group.z};
}

Checking checking() {
  const uint64_t state = checking_state().load(std::memory_order_relaxed);
  return {(state & 1) != 0, static_cast<uint32_t>(state >> 2), (state & 2) != 0};
}

void set_checking(Checking checking) {
  checking_state().store(uint64_t{checking.seed} << 2 | (checking.misaligned ? 2 : 0) | (checking.on ? 1 : 0),
                         std::memory_order_relaxed);
}

void execute(const Launch& launch) {
  if (launch.kernel.library->counting()) return void(execute_counted(launch));
  if (!launch.threads.x || !launch.threads.y || !launch.threads.z) return;
  validate(launch);
  Watch watch;
  if (launch.kernel.library->checking())
    execute_checked(launch, watch);
  else
    execute_normal(launch);
}

}  // namespace metalcore::simulator
