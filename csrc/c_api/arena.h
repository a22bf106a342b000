// The scratch memory of a context. It grows while calls need more than any before, and is reused from then on.
#pragma once

#include <cstddef>
#include <vector>

namespace metalcore::c_api {

// Memory of one kind of device.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;  // at a multiple of 256; throws std::bad_alloc
  virtual void free(void* memory) noexcept = 0;
  // These write `count` numbers, in the order of the device's work.
  virtual void fill(void* memory, unsigned char number, size_t count) = 0;
  virtual void fill(void* memory, float number, size_t count) = 0;
  virtual void wait() {}  // until the device's work is done
  virtual bool on_host() const { return true; }
};

class Arena {
 public:
  explicit Arena(Memory& memory) : memory_(memory) {}
  ~Arena();
  Arena(const Arena&) = delete;

  // Memory until the next reset(), at a multiple of 256. It is not null.
  void* take(size_t bytes);
  // All that was taken is free again. Where it lay in several blocks, one block that is large enough replaces them.
  void reset();

 private:
  struct Block {
    void* memory;
    size_t size, used;
  };
  Memory& memory_;
  std::vector<Block> blocks_;
};

}  // namespace metalcore::c_api
