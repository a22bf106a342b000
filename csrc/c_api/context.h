// A context of the C interface: a device, its stream, its memory, and where its kernels lie.
#pragma once

#include <metalcore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace metalcore::gpu {
class Prepared;
class Recording;
}  // namespace metalcore::gpu

namespace metalcore::c_api {

// Returns the folder of the kernels' libraries: METALCORE_LIBRARY_DIR, or else the folder that libmetalcore lies in.
const std::string& kernels_folder();

// Throws Error where the folder has no kernels. It looks once.
void require_kernels();

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

// A context's scratch memory. It grows while calls need more than any before, and is reused from then on.
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

struct metalcore_context {
  metalcore_context(int32_t device_type, int32_t index, void* stream, std::unique_ptr<metalcore::c_api::Memory> memory)
      : device_type(device_type), index(index), memory(std::move(memory)), arena(*this->memory), stream(stream) {}

  const int32_t device_type;  // PyTorch's number: csrc/gpu/backend.h finds the backend by it
  const int32_t index;
  const std::unique_ptr<metalcore::c_api::Memory> memory;
  metalcore::c_api::Arena arena;
  std::atomic<bool> busy = false;
  void* const stream;  // a CUstream; nullptr on other devices
};

namespace metalcore::c_api {

// A kind of device that this library has contexts for. The file that makes them registers it at namespace scope:
//   const ContextKind kind(METALCORE_CPU, make_context);
// The function throws Error.
struct ContextKind {
  using Make = std::unique_ptr<metalcore_context> (*)(int index, void* stream);
  ContextKind(metalcore_device device, Make make);
};

// The context of this thread's running call. Ops allocate scratch memory in it (tensor.cpp).
metalcore_context& running();

// Takes the thread's context for one call. Throws Error where another thread has a call in it.
class Running {
 public:
  Running();
  ~Running();
  Running(const Running&) = delete;
  metalcore_context& context() const { return context_; }

 private:
  metalcore_context& context_;
};

}  // namespace metalcore::c_api
