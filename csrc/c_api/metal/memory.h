// Memory of a Metal context. Kernels reach MTLBuffers alone, so that an array of the caller's which lies in none is
// copied: to scratch memory when a kernel's arguments are first recorded with it, and back at the end of the call.
#pragma once

#include "../arena.h"
#include "commands.h"

#include <vector>

namespace metalcore::c_api {

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
