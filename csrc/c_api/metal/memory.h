// Memory of a Metal context. Kernels reach MTLBuffers alone, so that an array of the caller's which lies in none is
// copied: to scratch memory when a kernel's arguments are first recorded with it, and back at the end of the call.
#pragma once

#include "../context.h"
#include "commands.h"

#import <Metal/Metal.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace metalcore::c_api {

// One of the process's MTLBuffers for C, which all lie in memory that the CPU and the GPU share.
struct Buffer {
  id<MTLBuffer> object = nil;
  uintptr_t begin = 0;
};

// The memory of a new buffer. Throws std::bad_alloc.
void* new_buffer(id<MTLDevice> device, size_t bytes);
// Releases the buffer whose memory begins here; false where none does.
bool free_buffer(void* memory);
// The buffer in whose memory the address lies; nil where it lies in none. A buffer serves all contexts.
Buffer find_buffer(const void* address);

class MetalMemory final : public Memory {
 public:
  MetalMemory() { arrays_.reserve(16); }

  Commands& commands() { return commands_; }

  void* allocate(size_t bytes) override;
  void free(void* memory) noexcept override;
  void fill(void* memory, unsigned char number, size_t count) override;
  void fill(void* memory, float number, size_t count) override;
  void write(void* memory, const void* data, size_t bytes) override;
  void wait() override { commands_.commit(); }
  size_t largest() const override { return commands_.device().maxBufferLength; }

  void use_array(void* data, size_t bytes, Access access) override;
  Place place_of(void* data) override;
  void complete() override;
  void end_call() noexcept override;

 private:
  struct Array {
    void* data;
    size_t bytes;
    bool read, written;
    void* copy;
  };
  // The memory that kernels use for what lies at this address.
  char* reached(void* data);

  Commands commands_;
  std::vector<Array> arrays_;  // of the running call
};

}  // namespace metalcore::c_api
