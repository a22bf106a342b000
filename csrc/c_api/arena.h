// Memory of a device, and a context's scratch memory there. That grows while calls need more than any before, and is
// reused from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace metalcore::gpu {
class Prepared;
class Recording;
}  // namespace metalcore::gpu

namespace metalcore::c_api {

// What a call does with an array of the caller's.
enum class Access : uint8_t { kRead, kWritten, kUpdated };  // an updated one is read and written

// Where kernels find memory: a storage, which is an MTLBuffer on Metal, and the bytes before the memory there.
struct Place {
  void* storage;
  size_t offset;
};

// Memory of one kind of device.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;  // at a multiple of 256; throws std::bad_alloc
  virtual void free(void* memory) noexcept = 0;
  // These write `count` numbers, in the order of the device's work.
  virtual void fill(void* memory, unsigned char number, size_t count) = 0;
  virtual void fill(void* memory, float number, size_t count) = 0;
  // Copies bytes of the host's to memory that no kernel uses yet. They are there when it returns.
  virtual void write(void* memory, const void* data, size_t bytes) = 0;
  // What submits a program's recording. Kernels of one that is not trusted must not leave what is bound to them, if the
  // device can watch over that.
  virtual std::unique_ptr<gpu::Prepared> prepare(const gpu::Recording& recording, int32_t device_type, int32_t index,
                                                 bool trusted);
  virtual void wait() {}  // until the device's work is done
  virtual bool on_host() const { return true; }
  virtual size_t largest() const { return SIZE_MAX; }  // the most bytes that allocate() takes

  // The rest is for devices whose kernels reach nothing except what allocate() gave.
  // Names an array of the running call.
  virtual void use_array(void*, size_t, Access) {}
  virtual Place place_of(void* data) { return {data, 0}; }
  // The call's results come to its arrays.
  virtual void complete() {}
  // Forgets the call's arrays, and work that is not complete.
  virtual void end_call() noexcept {}
};

class Arena {
 public:
  explicit Arena(Memory& memory) : memory_(memory) {}
  ~Arena();
  Arena(const Arena&) = delete;

  // Memory until the next reset(), at a multiple of 256. It is not null.
  void* take(size_t bytes);
  // All that was taken is free again. Where it lay in several blocks, one block replaces them, if the device has such
  // large ones.
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
