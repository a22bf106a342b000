#include "launches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace metalcore::cuda {
namespace {

// CUDA's limits of a launch.
constexpr uint32_t kMaximumGroupZ = 64;
constexpr uint32_t kMaximumGroups[3] = {0x7fffffff, 0xffff, 0xffff};

constexpr size_t kKept = 1024 * 1024;  // bytes of memory that a thread keeps for its next launches

std::string text(gpu::Size size) {
  return "(" + std::to_string(size.x) + ", " + std::to_string(size.y) + ", " + std::to_string(size.z) + ")";
}

// Of a fault in a kernel CUDA tells at one of the calls after it.
bool may_be_another_kernels(Status status) { return status >= 700 && status < 720 && status != kOutOfResources; }

[[noreturn]] void fail_to_launch(const Variant& variant, gpu::Size groups, gpu::Size group, Status status) {
  const std::string launch =
      "kernel '" + variant.kernel.name + "' on " + text(groups) + " threadgroups of " + text(group) + " threads";
  throw std::runtime_error("metalcore: launching " + launch + " failed: " + error_text(status) +
                           (may_be_another_kernels(status)
                                ? "; unless CUDA_LAUNCH_BLOCKING=1 was set, a kernel before it may be the one at fault"
                                : ""));
}

void check_group(const Variant& variant, gpu::Size group, const Loaded& loaded) {
  if (uint64_t{group.x} * group.y * group.z > loaded.max_threads)
    gpu::refuse(variant.kernel.name, "a threadgroup of " + text(group) + " threads; on this GPU it may have up to " +
                                         std::to_string(loaded.max_threads));
}

void check_memory(const Variant& variant, uint32_t bytes, const Loaded& loaded) {
  if (bytes > loaded.max_dynamic_memory)
    gpu::refuse(variant.kernel.name, std::to_string(bytes) +
                                         " bytes of threadgroup memory for its arguments; this GPU has " +
                                         std::to_string(loaded.max_dynamic_memory) + " for them");
}

// The CUDA block of a threadgroup. One that is too deep lies in a row; its threads find their places by their index, as
// they do wherever a threadgroup has another shape than its block (see Place in metalcore/msl/include/cuda/entry.h).
gpu::Size block_of(gpu::Size group) {
  return group.z > kMaximumGroupZ ? gpu::Size{group.x * group.y * group.z, 1, 1} : group;
}

}  // namespace

void Launches::kernel(NamedKernel& kernel) {
  kernel_ = &kernel;
  layout_ = {};
  staged_.clear();
}

void Launches::buffer(uint32_t index, const void* address) {
  layout_.bytes &= ~(1u << index);
  layout_.capacity[index] = 0;
  layout_.buffers |= 1u << index;
  addresses_[index] = address;
}

void* Launches::bytes(uint32_t index, size_t size) {
  layout_.buffers &= ~(1u << index);
  layout_.bytes |= 1u << index;
  layout_.capacity[index] = capacity_code(size);
  bytes_[index] = {staged_.size(), size};
  staged_.resize(staged_.size() + aligned(size));
  return staged_.data() + bytes_[index].begin;
}

void Launches::threadgroup_memory(uint32_t index, uint32_t bytes) {
  layout_.threadgroups |= 1u << index;
  lengths_[index] = bytes;
}

void Launches::dispatch(gpu::Size threads, gpu::Size group) {
  if (threads.empty()) return;
  if (group.empty()) gpu::refuse(name(), "a threadgroup of no threads");
  const auto count = [](uint32_t of, uint32_t by) { return of / by + (of % by != 0); };
  const gpu::Size groups = {count(threads.x, group.x), count(threads.y, group.y), count(threads.z, group.z)};
  const size_t size = block_size(layout_), begin = blocks_.size();
  if (size > kMaximumBlock) gpu::refuse(name(), std::to_string(size) + " bytes of arguments; NVIDIA GPUs take 32764");

  blocks_.resize(begin + size);  // zeroed
  std::byte* const block = blocks_.data() + begin;
  const Grid grid = {
      {threads.x, threads.y, threads.z}, {group.x, group.y, group.z}, {groups.x, groups.y, groups.z}, {}};
  std::memcpy(block, &grid, sizeof grid);
  size_t at = sizeof grid;
  const auto append = [&](uint64_t value) {
    std::memcpy(block + at, &value, sizeof value);
    at += sizeof value;
  };
  uint64_t shared_memory = 0;
  for_each_bit(layout_.buffers, [&](uint32_t i) { append(reinterpret_cast<uintptr_t>(addresses_[i])); });
  for_each_bit(layout_.threadgroups, [&](uint32_t i) {
    append(shared_memory);
    shared_memory += aligned(lengths_[i]);
  });
  at = aligned(at);
  for_each_bit(layout_.bytes, [&](uint32_t i) {
    if (bytes_[i].size) std::memcpy(block + at, staged_.data() + bytes_[i].begin, bytes_[i].size);
    at += capacity_of(layout_.capacity[i]);
  });
  // More than any GPU has is too much however much more it is.
  const uint64_t most = std::numeric_limits<uint32_t>::max();
  dispatches_.push_back(
      {&kernel_->variant(layout_), begin, groups, group, static_cast<uint32_t>(std::min(shared_memory, most))});
}

void Launches::launch(const Device& device) {
  if (dispatches_.empty()) return;
  const CurrentContext context(device);
  load_missing(device);
  for (const Dispatch& dispatch : dispatches_) {
    const Loaded& loaded = *dispatch.variant->on[device.index].load(std::memory_order_relaxed);
    check_group(*dispatch.variant, dispatch.group, loaded);
    check_memory(*dispatch.variant, dispatch.shared_memory, loaded);
  }
  const Stream stream = current_stream(device);
  for (const Dispatch& dispatch : dispatches_) launch(device, dispatch, stream);
}

void Launches::load_missing(const Device& device) {
  std::vector<Variant*> missing;
  for (const Dispatch& dispatch : dispatches_)
    if (!dispatch.variant->on[device.index].load(std::memory_order_acquire) &&
        std::find(missing.begin(), missing.end(), dispatch.variant) == missing.end())
      missing.push_back(dispatch.variant);
  if (!missing.empty()) load(device, missing);
}

// In slabs, where there are more threadgroups in one direction than a launch can have.
void Launches::launch(const Device& device, const Dispatch& dispatch, Stream stream) {
  const Function function = dispatch.variant->on[device.index].load(std::memory_order_relaxed)->function;
  std::byte* const block = blocks_.data() + dispatch.block;
  void* parameters[] = {block};
  const auto [width, height, depth] = dispatch.groups;
  const gpu::Size shape = block_of(dispatch.group);
  const auto [step_x, step_y, step_z] = kMaximumGroups;
  const auto slab = [](uint32_t count, uint64_t first, uint32_t step) {
    return static_cast<uint32_t>(std::min<uint64_t>(count - first, step));
  };
  for (uint64_t z = 0; z < depth; z += step_z)
    for (uint64_t y = 0; y < height; y += step_y)
      for (uint64_t x = 0; x < width; x += step_x) {
        const uint32_t first[3] = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
        std::memcpy(block + offsetof(Grid, first_threadgroup), first, sizeof first);
        const Status status =
            driver().launch(function, slab(width, x, step_x), slab(height, y, step_y), slab(depth, z, step_z), shape.x,
                            shape.y, shape.z, dispatch.shared_memory, stream, parameters, nullptr);
        if (status != kSuccess) fail_to_launch(*dispatch.variant, dispatch.groups, dispatch.group, status);
      }
}

void Launches::clear() {
  kernel_ = nullptr;
  dispatches_.clear();
  blocks_.clear();
  staged_.clear();
  if (blocks_.capacity() > kKept) blocks_.shrink_to_fit();
}

}  // namespace metalcore::cuda
