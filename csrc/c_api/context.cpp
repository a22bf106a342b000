#include "context.h"

#include "error.h"
#include "host_memory.h"
#include "kernels_folder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <string>

namespace metalcore::c_api {
namespace {

thread_local metalcore_context* chosen = nullptr;
thread_local metalcore_context* in_call = nullptr;

metalcore_context* make(int device, int index, void* stream) {
  find_kernels();
  switch (device) {
    case METALCORE_CPU:
      if (index != 0 || stream) throw Error(METALCORE_INVALID_ARGUMENT, "index and stream must be 0 for METALCORE_CPU");
      return new metalcore_context(aoti_torch_device_type_mps(), 0, host_memory());
    case METALCORE_CUDA: throw Error(METALCORE_NO_DEVICE, "this version has no contexts for NVIDIA GPUs");
    case METALCORE_METAL: throw Error(METALCORE_NO_DEVICE, "this version has no contexts for Metal");
    default: throw Error(METALCORE_INVALID_ARGUMENT, "device is no metalcore_device: " + std::to_string(device));
  }
}

metalcore_context& own() {
  thread_local const std::unique_ptr<metalcore_context> made(make(METALCORE_CPU, 0, nullptr));
  return *made;
}

}  // namespace

metalcore_context& running() {
  if (!in_call) throw std::logic_error("metalcore: memory is wanted outside of a call");
  return *in_call;
}

Running::Running() : context_(chosen ? *chosen : own()) {
  if (context_.busy.exchange(true, std::memory_order_acquire))
    throw Error(METALCORE_BUSY, "another thread has a call in this context");
  in_call = &context_;
}

Running::~Running() {
  in_call = nullptr;
  try {
    context_.arena.reset();
  } catch (...) {  // without memory for one block there is none, and the next call tells
  }
  context_.busy.store(false, std::memory_order_release);
}

}  // namespace metalcore::c_api

using namespace metalcore::c_api;

int metalcore_context_create(metalcore_context** context, int device, int index, void* stream) {
  try {
    if (!context) throw Error(METALCORE_INVALID_ARGUMENT, "context is NULL");
    *context = nullptr;
    *context = make(device, index, stream);
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(__func__);
  }
}

int metalcore_context_destroy(metalcore_context* context) {
  try {
    if (!context) return METALCORE_OK;
    if (context->busy.exchange(true, std::memory_order_acquire))
      throw Error(METALCORE_BUSY, "another thread has a call in this context");
    if (chosen == context) chosen = nullptr;
    const std::unique_ptr<metalcore_context> destroyed(context);
    context->memory->wait();
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(__func__);
  }
}

int metalcore_context_use(metalcore_context* context) {
  chosen = context;
  return METALCORE_OK;
}
