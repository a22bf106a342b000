// The memory that a checked kernel may touch. Its buffers are copied to places far from each other, so that an access
// past the end of one never lands in another, however the tensors lie. When the kernel has ended well, what it wrote is
// copied back.
//
// Memory stays in its place where addresses among the bytes of a buffer lead to it: such bytes may be an address or a
// number, so they cannot be changed. Such memory is the tensors that a table holds, and whatever shares their memory. A
// run restores its content.
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
  bool fixed = false;    // it stays in its place
  bool bytes = false;    // it is no buffer, and is aligned for every type
  bool table = false;    // its elements are addresses of other views
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
  std::unique_ptr<char[]> saved = nullptr;  // of a fixed block: the bytes before the run, then those that the run left

  const char* result() const { return fixed ? saved.get() : copy; }

  bool contains(const char* address) const { return address >= copy && address < copy + size; }
};

class MemoryMap {
 public:
  explicit MemoryMap(const Launch& launch);
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;

  void* const* buffers() const { return buffers_; }
  // Must be called after the run: restores the blocks that stayed in their places.
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
  std::vector<Block> blocks_;                      // by ascending address of the original
  std::vector<Block*> by_copy_;                    // by ascending address of the copy
  std::vector<View*> buffer_views_;                // by buffer index
  std::vector<std::vector<View*>> pointer_views_;  // by buffer index: the views that a table's addresses lead to
  void* buffers_[kMaximumBuffers] = {};
  char* memory_ = nullptr;
  size_t memory_size_ = 0;
  bool finished_ = false;
};

}  // namespace metalcore::simulator
