#include "launches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace metalcore::cuda {
namespace {

// CUDA's limits of a launch.
constexpr uint32_t kMaximumBlockZ = 64;
constexpr uint32_t kMaximumBlocks[3] = {0x7fffffff, 0xffff, 0xffff};

constexpr size_t kReusedBytes = 1024 * 1024;  // bytes whose memory the next launches reuse

std::string text(gpu::Size size) {
  return "(" + std::to_string(size.x) + ", " + std::to_string(size.y) + ", " + std::to_string(size.z) + ")";
}

// CUDA reports a fault in a kernel at one of the calls after its launch.
bool may_be_from_another_kernel(Status status) { return status >= 700 && status < 720 && status != kOutOfResources; }

[[noreturn]] void fail_to_launch(const Variant& variant, gpu::Size threadgroups, gpu::Size threadgroup, Status status) {
  const std::string launch = "kernel '" + variant.kernel.name + "' on " + text(threadgroups) + " threadgroups of " +
                             text(threadgroup) + " threads";
  throw std::runtime_error("metalcore: launching " + launch + " failed: " + error_text(status) +
                           (may_be_from_another_kernel(status)
                                ? "; unless CUDA_LAUNCH_BLOCKING=1 was set, a kernel before it may be the one at fault"
                                : ""));
}

void check_threadgroup(const Variant& variant, gpu::Size threadgroup, const Loaded& loaded) {
  if (uint64_t{threadgroup.x} * threadgroup.y * threadgroup.z > loaded.max_threads)
    gpu::refuse(variant.kernel.name, "a threadgroup of " + text(threadgroup) +
                                         " threads; on this GPU it may have up to " +
                                         std::to_string(loaded.max_threads));
}

void check_memory(const Variant& variant, uint32_t bytes, const Loaded& loaded) {
  if (bytes > loaded.max_dynamic_memory)
    gpu::refuse(variant.kernel.name, std::to_string(bytes) +
                                         " bytes of threadgroup memory for its arguments; this GPU has " +
                                         std::to_string(loaded.max_dynamic_memory) + " for them");
}

// The CUDA block of a threadgroup. A threadgroup that is too deep becomes one row of threads. Its threads compute their
// positions from their index, as always when the shapes differ (see Place in metalcore/msl/include/cuda/entry.h).
gpu::Size block_of(gpu::Size threadgroup) {
  if (threadgroup.z <= kMaximumBlockZ) return threadgroup;
  return {threadgroup.x * threadgroup.y * threadgroup.z, 1, 1};
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

void Launches::dispatch(gpu::Size threads, gpu::Size threadgroup, uint32_t together) {
  if (threads.empty()) return;
  if (threadgroup.empty()) gpu::refuse(name(), "a threadgroup of no threads");
  const auto count = [](uint32_t total, uint32_t each) { return total / each + (total % each != 0); };
  const gpu::Size threadgroups = {count(threads.x, threadgroup.x), count(threads.y, threadgroup.y),
                                  count(threads.z, threadgroup.z)};
  const size_t size = block_size(layout_), begin = blocks_.size();
  if (size > kMaximumBlock) gpu::refuse(name(), std::to_string(size) + " bytes of arguments; NVIDIA GPUs take 32764");

  blocks_.resize(begin + size);  // zeroed
  std::byte* const block = blocks_.data() + begin;
  const Grid grid = {{threads.x, threads.y, threads.z},
                     {threadgroup.x, threadgroup.y, threadgroup.z},
                     {threadgroups.x, threadgroups.y, threadgroups.z},
                     {}};
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
  // No GPU has so much memory, so the capped number fails as well.
  const uint64_t most = std::numeric_limits<uint32_t>::max();
  dispatches_.push_back({&kernel_->variant(layout_), begin, threadgroups, threadgroup,
                         static_cast<uint32_t>(std::min(shared_memory, most)), together});
}

void Launches::launch(const Device& device) {
  if (dispatches_.empty()) return;
  prepare(device);
  submit(device, 0, dispatches_.size());
}

void Launches::prepare(const Device& device) {
  const CurrentContext context(device);
  load_missing(device);
  for (const Dispatch& dispatch : dispatches_) {
    const Loaded& loaded = *dispatch.variant->on[device.index].load(std::memory_order_relaxed);
    check_threadgroup(*dispatch.variant, dispatch.threadgroup, loaded);
    check_memory(*dispatch.variant, dispatch.shared_memory, loaded);
    if (dispatch.together > device.most_together)
      gpu::refuse(dispatch.variant->kernel.name, std::to_string(dispatch.together) +
                                                     " threadgroups that run together; this GPU has " +
                                                     std::to_string(device.most_together) + " of them");
  }
}

void Launches::submit(const Device& device, size_t first, size_t end) {
  const CurrentContext context(device);
  const Stream stream = current_stream(device);
  for (size_t i = first; i < end; ++i) launch(device, dispatches_[i], stream);
}

void Launches::load_missing(const Device& device) {
  std::vector<Variant*> missing;
  for (const Dispatch& dispatch : dispatches_)
    if (!dispatch.variant->on[device.index].load(std::memory_order_acquire) &&
        std::find(missing.begin(), missing.end(), dispatch.variant) == missing.end())
      missing.push_back(dispatch.variant);
  if (!missing.empty()) load(device, missing);
}

// It launches slabs if there are more threadgroups in one direction than a launch can have.
//
// Where the device can, a kernel is launched while those before it in the stream run, so that its launch costs no time
// between them. Every kernel waits for their results before it reads or writes memory (msl::follow() in
// metalcore/msl/include/cuda/entry.h), so the order of all reads and writes stays that of the stream.
void Launches::launch(const Device& device, const Dispatch& dispatch, Stream stream) {
  const Loaded& loaded = *dispatch.variant->on[device.index].load(std::memory_order_relaxed);
  std::byte* const block = blocks_.data() + dispatch.block;
  void* parameters[] = {block};
  const auto [width, height, depth] = dispatch.threadgroups;
  const gpu::Size shape = block_of(dispatch.threadgroup);
  LaunchAttribute attributes[2];
  uint32_t attribute_count = 0;
  if (dispatch.together > 1) attributes[attribute_count++] = {kClusterDimension, 1, {dispatch.together, 1}};
  if (device.may_overlap) attributes[attribute_count++] = {kProgrammaticStreamSerialization, 1, {}};
  const uint32_t step_x = kMaximumBlocks[0], step_z = kMaximumBlocks[2];
  const uint32_t step_y = kMaximumBlocks[1] / dispatch.together * dispatch.together;
  const auto slab = [](uint32_t count, uint64_t first, uint32_t step) {
    return static_cast<uint32_t>(std::min<uint64_t>(count - first, step));
  };
  for (uint64_t z = 0; z < depth; z += step_z)
    for (uint64_t y = 0; y < height; y += step_y)
      for (uint64_t x = 0; x < width; x += step_x) {
        const uint32_t first[3] = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
        std::memcpy(block + offsetof(Grid, first_threadgroup), first, sizeof first);
        const LaunchConfig config = {
            {slab(width, x, step_x), slab(height, y, step_y), slab(depth, z, step_z)},
            {shape.x, shape.y, shape.z},
            dispatch.shared_memory + loaded.pipeline_memory,
            stream,
            attributes,
            attribute_count,
        };
        const Status status = driver().launch(&config, loaded.function, parameters, nullptr);
        if (status != kSuccess) fail_to_launch(*dispatch.variant, dispatch.threadgroups, dispatch.threadgroup, status);
      }
}

void Launches::clear() {
  kernel_ = nullptr;
  dispatches_.clear();
  blocks_.clear();
  staged_.clear();
  if (blocks_.capacity() > kReusedBytes) blocks_.shrink_to_fit();
}

}  // namespace metalcore::cuda
