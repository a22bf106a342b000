#include "arena.h"

#include "../gpu/backend.h"

#include <algorithm>
#include <cstdint>
#include <new>

namespace metalcore::c_api {
namespace {

constexpr size_t kAlignment = 256, kLeast = 64 * 1024;

}  // namespace

std::unique_ptr<gpu::Prepared> Memory::prepare(const gpu::Recording& recording, int32_t device_type, int32_t index,
                                               bool) {
  return gpu::find_backend(device_type)->prepare(index, recording);
}

Arena::~Arena() {
  for (const Block& block : blocks_) memory_.free(block.memory);
}

void* Arena::take(size_t bytes) {
  if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
  bytes = std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  const auto fits = [bytes](const Block& block) { return block.size - block.used >= bytes; };
  auto block = std::find_if(blocks_.begin(), blocks_.end(), fits);
  if (block == blocks_.end()) {
    blocks_.reserve(blocks_.size() + 1);
    const size_t size = std::max(bytes, kLeast);
    blocks_.push_back({memory_.allocate(size), size, 0});
    block = blocks_.end() - 1;
  }
  void* const taken = static_cast<char*>(block->memory) + block->used;
  block->used += bytes;
  return taken;
}

void Arena::reset() {
  size_t size = 0;
  for (const Block& block : blocks_) size += block.size;
  if (blocks_.size() > 1 && size <= memory_.largest()) {
    memory_.wait();  // kernels may still use what is freed here
    for (const Block& block : blocks_) memory_.free(block.memory);
    blocks_.clear();
    blocks_.push_back({memory_.allocate(size), size, 0});
  }
  for (Block& block : blocks_) block.used = 0;
}

}  // namespace metalcore::c_api
