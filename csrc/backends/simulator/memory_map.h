// What a checked kernel may touch. Its buffers are copied to places far from each other, so that an access past the end
// of one never lands in another, however the tensors lie; what the kernel wrote is copied back when it has ended well.
//
// Only what addresses among the bytes of a buffer lead to stays where it is, since such an address may as well be a
// number: the tensors that a table holds, and whatever shares their memory. A run leaves it as it was before.
#pragma once

#include "launch.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace metalcore::simulator {

// One argument's bytes.
struct View {
  char* original;
  size_t size;
  bool writable;
  std::string name;      // "buffer 'x' (index 0)"
  uint32_t element = 1;  // its size in bytes
  bool fixed = false;    // it stays where it is
  bool bytes = false;    // not a buffer: as aligned as any type needs
  bool table = false;    // of addresses that are views themselves
  char* copy = nullptr;  // where the kernel finds it
};

// Views that overlap share their memory.
struct Block {
  char* original;
  size_t size;
  char* copy;
  bool writable;  // some view is
  bool fixed, bytes;
  std::vector<const View*> views;
  std::unique_ptr<char[]> other = nullptr;  // of a fixed one: what was there before the run, then what the run left

  const char* result() const { return fixed ? other.get() : copy; }

  bool contains(const char* address) const { return address >= copy && address < copy + size; }
};

class MemoryMap {
 public:
  explicit MemoryMap(const Launch& launch);
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;

  void* const* buffers() const { return buffers_; }
  // The run is over.
  void finish();
  void copy_back() const;

  const std::vector<Block>& blocks() const { return blocks_; }
  // The block that holds this address, or nullptr.
  const Block* find(const char* address) const;
  // The view that an address is in or next to; nullptr where it is far from all.
  const View* nearest(const char* address) const;

 private:
  View* add(void* address, size_t size, bool writable, std::string name, uint32_t element = 1);
  void add_views(const Launch& launch);
  void add_reachable();
  void place();
  void relocate(const Launch& launch);

  std::vector<std::unique_ptr<View>> views_;
  std::vector<Block> blocks_;    // by ascending address of the original
  std::vector<Block*> by_copy_;  // by ascending address of the copy
  std::vector<View*> of_buffer_;
  std::vector<std::vector<View*>> of_table_;  // views behind the pointers of a table or in bytes, by buffer index
  void* buffers_[kMaximumBuffers] = {};
  char* memory_ = nullptr;
  size_t memory_size_ = 0;
  bool finished_ = false;
};

}  // namespace metalcore::simulator
