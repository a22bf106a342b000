#include "memory_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <utility>

namespace metalcore::simulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGap = 16 << 20;  // reserved, not backed by memory

size_t align(size_t size) { return (size + kPage - 1) / kPage * kPage; }

}  // namespace

MemoryMap::MemoryMap(const Launch& launch) : buffer_views_(kMaximumBuffers), pointer_views_(kMaximumBuffers) {
  add_views(launch);
  add_reachable();
  place();
  relocate(launch);
}

MemoryMap::~MemoryMap() {
  finish();
  if (memory_) munmap(memory_, memory_size_);
}

View* MemoryMap::add(void* address, size_t size, bool writable, std::string name, uint32_t element) {
  views_.push_back(std::make_unique<View>(View{static_cast<char*>(address), size, writable, std::move(name), element}));
  return views_.back().get();
}

void MemoryMap::add_views(const Launch& launch) {
  const msl_abi::Kernel& kernel = *launch.kernel.kernel;
  for (uint32_t a = 0; a < kernel.argument_count; ++a) {
    const msl_abi::Argument& argument = kernel.arguments[a];
    if (argument.kind != msl_abi::kBuffer || buffer_views_[argument.index]) continue;
    const Binding& binding = launch.buffers[argument.index];
    const std::string name =
        "buffer '" + std::string(argument.name) + "' (index " + std::to_string(argument.index) + ")";
    buffer_views_[argument.index] = add(binding.address, binding.size, argument.writable, name, argument.element_size);
    buffer_views_[argument.index]->bytes = binding.kind != Binding::kBuffer;
    if (binding.embedded)
      for (const Embedded& memory : *binding.embedded)
        add(memory.begin, memory.size, true, "the memory at byte " + std::to_string(memory.offset) + " of " + name)
            ->fixed = true;
    if (binding.kind != Binding::kPointers) continue;
    buffer_views_[argument.index]->table = true;
    for (size_t i = 0; i < binding.size / sizeof(void*); ++i) {
      void* address = static_cast<void**>(binding.address)[i];
      const std::string pointer = "pointer " + std::to_string(i) + " of " + name;
      pointer_views_[argument.index].push_back(address ? add(address, binding.spans[i], true, pointer) : nullptr);
    }
  }
  // The shapes of tensors are bound beside them, and are no arguments.
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) {
    const Binding& binding = launch.buffers[i];
    if (buffer_views_[i] || !binding.address || binding.kind == Binding::kBuffer) continue;
    buffer_views_[i] = add(binding.address, binding.size, false, "buffer " + std::to_string(i), 1);
    buffer_views_[i]->bytes = true;
  }
}

// Adds the device memory that words among the bytes of a view lead to, if they are addresses, and so on from there.
void MemoryMap::add_reachable() {
  const DeviceFunctions& known = device_functions();
  if (!known.find_allocation) return;
  uintptr_t low, high;
  known.range_of_allocations(&low, &high);
  std::set<uintptr_t> found;
  for (size_t i = 0; i < views_.size(); ++i) {
    const View view = *views_[i];
    if (view.size == 0 || view.table) continue;
    const auto end = reinterpret_cast<uintptr_t>(view.original) + view.size;
    for (uintptr_t at = (reinterpret_cast<uintptr_t>(view.original) + 7) & ~uintptr_t{7}; at + 8 <= end; at += 8) {
      const uintptr_t word = *reinterpret_cast<const uintptr_t*>(at);
      if (word < low || word >= high) continue;
      uintptr_t begin;
      const size_t size = known.find_allocation(word, &begin);
      if (!size || !found.insert(begin).second) continue;
      const std::string place = std::to_string(at - reinterpret_cast<uintptr_t>(view.original));
      add(reinterpret_cast<void*>(begin), size, true, "the memory at byte " + place + " of " + view.name)->fixed = true;
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
      block.fixed |= view->fixed;
      block.views.push_back(view);
    } else {
      blocks_.push_back({view->original, view->size, nullptr, view->writable, view->fixed, view->bytes, {view}});
    }
  }
  memory_size_ = kGap;
  for (const Block& block : blocks_)
    if (!block.fixed) memory_size_ += align(block.size + kPage) + kGap;
  void* memory = mmap(nullptr, memory_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  char* at = memory_ + kGap;
  for (Block& block : blocks_) {
    if (block.fixed) {
      block.copy = block.original;
      block.saved.reset(new char[block.size]);
      std::memcpy(block.saved.get(), block.original, block.size);
    } else {
      const size_t backed = align(block.size + kPage);
      if (mprotect(at, backed, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
      block.copy = at + (block.bytes ? 0 : reinterpret_cast<uintptr_t>(block.original) % kPage);
      if (block.size) std::memcpy(block.copy, block.original, block.size);
      at += backed + kGap;
    }
    for (const View* view : block.views) const_cast<View*>(view)->copy = block.copy + (view->original - block.original);
  }
  for (Block& block : blocks_) by_copy_.push_back(&block);
  std::sort(by_copy_.begin(), by_copy_.end(), [](const Block* a, const Block* b) { return a->copy < b->copy; });
}

void MemoryMap::relocate(const Launch& launch) {
  for (uint32_t i = 0; i < kMaximumBuffers; ++i) {
    if (!buffer_views_[i]) continue;
    buffers_[i] = buffer_views_[i]->copy;
    if (launch.buffers[i].kind != Binding::kPointers) continue;
    for (size_t k = 0; k < pointer_views_[i].size(); ++k)
      static_cast<char**>(buffers_[i])[k] = pointer_views_[i][k] ? pointer_views_[i][k]->copy : nullptr;
  }
}

void MemoryMap::finish() {
  if (std::exchange(finished_, true)) return;
  for (Block& block : blocks_)
    if (block.fixed) std::swap_ranges(block.original, block.original + block.size, block.saved.get());
}

void MemoryMap::copy_back() const {
  for (const Block& block : blocks_)
    for (const View* view : block.views)
      if (view->writable && view->size)
        std::memcpy(view->original, block.result() + (view->original - block.original), view->size);
}

const Block* MemoryMap::find(const char* address) const {
  auto after = std::upper_bound(by_copy_.begin(), by_copy_.end(), address,
                                [](const char* a, const Block* block) { return a < block->copy; });
  if (after == by_copy_.begin()) return nullptr;
  const Block& block = **--after;
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
  return best_distance < kGap / 2 ? best : nullptr;
}

}  // namespace metalcore::simulator
