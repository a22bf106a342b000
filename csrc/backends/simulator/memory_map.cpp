#include "memory_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace metalcore::simulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGap = 16 << 20;  // reserved, not backed by memory

size_t align(size_t size) { return (size + kPage - 1) / kPage * kPage; }

}  // namespace

MemoryMap::MemoryMap(const Launch& launch) : of_buffer_(kMaximumBuffers), of_table_(kMaximumBuffers) {
  add_views(launch);
  place();
  relocate(launch);
}

MemoryMap::~MemoryMap() {
  if (memory_) munmap(memory_, memory_size_);
}

void MemoryMap::add_views(const Launch& launch) {
  const msl_abi::Kernel& kernel = *launch.kernel.kernel;
  const auto add = [&](void* address, size_t size, bool writable, std::string name) {
    views_.push_back(std::make_unique<View>(View{static_cast<char*>(address), size, writable, std::move(name)}));
    return views_.back().get();
  };
  for (uint32_t a = 0; a < kernel.argument_count; ++a) {
    const msl_abi::Argument& argument = kernel.arguments[a];
    if (argument.kind != msl_abi::kBuffer || of_buffer_[argument.index]) continue;
    const Binding& binding = launch.buffers[argument.index];
    const std::string name =
        "buffer '" + std::string(argument.name) + "' (index " + std::to_string(argument.index) + ")";
    of_buffer_[argument.index] = add(binding.address, binding.size, argument.writable, name);
    if (binding.embedded)
      for (const Embedded& memory : *binding.embedded)
        of_table_[argument.index].push_back(
            add(memory.begin, memory.size, true,
                "the memory at byte " + std::to_string(memory.offset) + " of " + name));
    if (binding.kind != Binding::kPointers) continue;
    for (size_t i = 0; i < binding.size / sizeof(void*); ++i) {
      void* address = static_cast<void**>(binding.address)[i];
      const std::string pointer = "pointer " + std::to_string(i) + " of " + name;
      of_table_[argument.index].push_back(address ? add(address, binding.spans[i], true, pointer) : nullptr);
    }
  }
}

// Merges views that overlap into blocks and gives each block its place.
void MemoryMap::place() {
  std::vector<View*> sorted;
  for (const auto& view : views_) sorted.push_back(view.get());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const View* a, const View* b) { return a->original < b->original; });
  for (View* view : sorted) {
    if (!blocks_.empty() && view->size && view->original < blocks_.back().original + blocks_.back().size) {
      Block& block = blocks_.back();
      block.size = std::max<size_t>(block.size, static_cast<size_t>(view->original - block.original) + view->size);
      block.writable |= view->writable;
      block.views.push_back(view);
    } else {
      blocks_.push_back({view->original, view->size, nullptr, view->writable, {view}});
    }
  }
  memory_size_ = kGap;
  for (const Block& block : blocks_) memory_size_ += align(block.size + kPage) + kGap;
  void* memory = mmap(nullptr, memory_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  char* at = memory_ + kGap;
  for (Block& block : blocks_) {
    const size_t backed = align(block.size + kPage);
    if (mprotect(at, backed, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    block.copy = at + reinterpret_cast<uintptr_t>(block.original) % kPage;  // as aligned as the original
    if (block.size) std::memcpy(block.copy, block.original, block.size);
    for (const View* view : block.views) const_cast<View*>(view)->copy = block.copy + (view->original - block.original);
    at += backed + kGap;
  }
}

void MemoryMap::relocate(const Launch& launch) {
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) {
    if (!of_buffer_[i]) continue;
    buffers_[i] = of_buffer_[i]->copy;
    if (const auto* embedded = launch.buffers[i].embedded)
      for (size_t k = 0; k < embedded->size(); ++k) {
        const Embedded& memory = (*embedded)[k];
        char* address;
        std::memcpy(&address, of_buffer_[i]->copy + memory.offset, sizeof address);
        address = of_table_[i][k]->copy + (address - memory.begin);
        std::memcpy(of_buffer_[i]->copy + memory.offset, &address, sizeof address);
      }
    if (launch.buffers[i].kind != Binding::kPointers) continue;
    for (size_t k = 0; k < of_table_[i].size(); ++k)
      static_cast<char**>(buffers_[i])[k] = of_table_[i][k] ? of_table_[i][k]->copy : nullptr;
  }
}

void MemoryMap::copy_back() const {
  for (const Block& block : blocks_)
    for (const View* view : block.views)
      if (view->writable && view->size) std::memcpy(view->original, view->copy, view->size);
}

const Block* MemoryMap::find(const char* address) const {
  auto after = std::upper_bound(blocks_.begin(), blocks_.end(), address,
                                [](const char* a, const Block& block) { return a < block.copy; });
  if (after == blocks_.begin()) return nullptr;
  const Block& block = *--after;
  return block.contains(address) ? &block : nullptr;
}

const View* MemoryMap::nearest(const char* address) const {
  const View* best = nullptr;
  uintptr_t best_distance = ~uintptr_t{0};
  for (const auto& view : views_) {
    const auto at = reinterpret_cast<uintptr_t>(address), begin = reinterpret_cast<uintptr_t>(view->copy),
               end = begin + view->size;
    const uintptr_t distance = at < begin ? begin - at : at >= end ? at - end : 0;
    if (distance < best_distance) best = view.get(), best_distance = distance;
  }
  return best;
}

}  // namespace metalcore::simulator
