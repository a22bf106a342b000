#include "context.h"

#include "../gpu/backend.h"
#include "../gpu/per_thread.h"
#include "error.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>

namespace metalcore::c_api {
namespace {

namespace fs = std::filesystem;

std::string folder() {
  if (const char* chosen = std::getenv("METALCORE_LIBRARY_DIR"); chosen && *chosen) return chosen;
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&kernels_folder), &info) || !info.dli_fname) return "";
  char* const real = realpath(info.dli_fname, nullptr);  // links may lead to it
  const fs::path library = real ? real : info.dli_fname;
  std::free(real);
  return library.parent_path().string();
}

}  // namespace

const std::string& kernels_folder() {
  static const std::string found = folder();
  return found;
}

void require_kernels() {
  static const bool found = [] {
    std::error_code error;
    if (!fs::exists(fs::path(kernels_folder()) / "index", error))
      throw Error(METALCORE_NO_KERNELS, "there are no kernels in '" + kernels_folder() +
                                            "'; METALCORE_LIBRARY_DIR can name the folder metalcore/lib");
    return true;
  }();
  static_cast<void>(found);
}

namespace {

constexpr size_t kAlignment = 256, kLeast = 64 * 1024;

}  // namespace

std::unique_ptr<gpu::Prepared> Memory::prepare(const gpu::Recording& recording, int32_t device_type, int32_t index,
                                               bool) {
  return gpu::find_backend(device_type)->prepare(index, recording);
}

Arena::~Arena() {
  for (const Block& block : blocks_) memory_.free(block.memory);
}

void* Arena::take(size_t bytes) {
  if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
  bytes = std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  const auto fits = [bytes](const Block& block) { return block.size - block.used >= bytes; };
  auto block = std::find_if(blocks_.begin(), blocks_.end(), fits);
  if (block == blocks_.end()) {
    blocks_.reserve(blocks_.size() + 1);
    const size_t size = std::max(bytes, kLeast);
    blocks_.push_back({memory_.allocate(size), size, 0});
    block = blocks_.end() - 1;
  }
  void* const taken = static_cast<char*>(block->memory) + block->used;
  block->used += bytes;
  return taken;
}

void Arena::reset() {
  size_t size = 0;
  for (const Block& block : blocks_) size += block.size;
  if (blocks_.size() > 1 && size <= memory_.largest()) {
    memory_.wait();  // kernels may still use what is freed here
    for (const Block& block : blocks_) memory_.free(block.memory);
    blocks_.clear();
    blocks_.push_back({memory_.allocate(size), size, 0});
  }
  for (Block& block : blocks_) block.used = 0;
}

namespace {

thread_local metalcore_context* chosen = nullptr;
thread_local metalcore_context* in_call = nullptr;

// The index is a metalcore_device.
std::array<ContextKind::Make, METALCORE_METAL + 1>& kinds() {
  static std::array<ContextKind::Make, METALCORE_METAL + 1> registered = {};
  return registered;
}

std::unique_ptr<metalcore_context> make(int device, int index, void* stream) {
  if (device < 0 || static_cast<size_t>(device) >= kinds().size())
    throw Error(METALCORE_INVALID_ARGUMENT, "device is no metalcore_device: " + std::to_string(device));
  const ContextKind::Make make_one = kinds()[static_cast<size_t>(device)];
  if (!make_one) {
    constexpr const char* kNames[] = {"METALCORE_CPU", "METALCORE_CUDA", "METALCORE_METAL"};
    throw Error(METALCORE_NO_DEVICE, std::string("this platform's library has no contexts for ") + kNames[device]);
  }
  require_kernels();
  return make_one(index, stream);
}

struct OwnContext {
  const std::unique_ptr<metalcore_context> made =
      make(kinds()[METALCORE_CPU] ? METALCORE_CPU : METALCORE_METAL, 0, nullptr);
};

metalcore_context& current() { return chosen ? *chosen : *gpu::per_thread<OwnContext>().made; }

}  // namespace

ContextKind::ContextKind(metalcore_device device, Make make) { kinds()[device] = make; }

metalcore_context& running() {
  if (!in_call) throw std::logic_error("metalcore: memory is wanted outside of a call");
  return *in_call;
}

Running::Running() : context_(current()) {
  if (context_.busy.exchange(true, std::memory_order_acquire))
    throw Error(METALCORE_BUSY, "another thread has a call in this context");
  in_call = &context_;
}

Running::~Running() {
  context_.memory->end_call();
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
    *context = make(device, index, stream).release();
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

int metalcore_memory_allocate(size_t bytes, void** memory) {
  try {
    if (!memory) throw Error(METALCORE_INVALID_ARGUMENT, "memory is NULL");
    *memory = nullptr;
    if (bytes > 0) *memory = current().memory->allocate(bytes);
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(__func__);
  }
}

int metalcore_memory_free(void* memory) {
  try {
    if (memory) current().memory->free(memory);
    return METALCORE_OK;
  } catch (...) {
    return status_of_exception(__func__);
  }
}
