// What a checked kernel may touch. Its buffers are copied to places far from each other, so that an access past the end
// of one never lands in another, however the tensors lie; what the kernel wrote is copied back when it has ended well.
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
  std::string name;    // "buffer 'x' (index 0)"
  char* copy = nullptr;
};

// Views that overlap share their memory.
struct Block {
  char* original;
  size_t size;
  char* copy;
  bool writable;       // some view is
  std::vector<const View*> views;

  bool contains(const char* address) const { return address >= copy && address < copy + size; }
};

class MemoryMap {
 public:
  explicit MemoryMap(const Launch& launch);
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;

  void* const* buffers() const { return buffers_; }
  void copy_back() const;

  const std::vector<Block>& blocks() const { return blocks_; }
  // The block that holds this address, or nullptr.
  const Block* find(const char* address) const;
  // The view nearest to an address that no view holds; nullptr where there are no views.
  const View* nearest(const char* address) const;

 private:
  void add_views(const Launch& launch);
  void place();
  void relocate(const Launch& launch);

  std::vector<std::unique_ptr<View>> views_;
  std::vector<Block> blocks_;  // by ascending address of the copy
  std::vector<View*> of_buffer_;
  std::vector<std::vector<View*>> of_table_;  // views behind the pointers of a table or in bytes, by buffer index
  void* buffers_[kMaximumBuffers] = {};
  char* memory_ = nullptr;
  size_t memory_size_ = 0;
};

}  // namespace metalcore::simulator
