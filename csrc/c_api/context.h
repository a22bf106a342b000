// A context of the C interface: a device, its stream, and scratch memory.
#pragma once

#include "arena.h"

#include <metalcore.h>

#include <atomic>
#include <cstdint>
#include <memory>

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
