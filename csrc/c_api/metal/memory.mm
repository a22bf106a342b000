#import "memory.h"

#include "../context.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

struct Registered {
  id<MTLBuffer> object;
  size_t bytes;
};

// They are never destroyed: threads' own contexts may end after the program's objects.
std::shared_mutex& mutex() {
  static auto& made = *new std::shared_mutex;
  return made;
}
std::map<uintptr_t, Registered>& buffers() {  // by the address of their memory
  static auto& made = *new std::map<uintptr_t, Registered>;
  return made;
}

}  // namespace

void* new_buffer(id<MTLDevice> device, size_t bytes) {
  if (bytes > device.maxBufferLength) throw std::bad_alloc();  // Metal's validation would end the process
  id<MTLBuffer> object = nil;
  in_pool([&] { object = [device newBufferWithLength:bytes options:MTLResourceStorageModeShared]; });
  void* const memory = [object contents];
  if (!memory) {
    [object release];
    throw std::bad_alloc();
  }
  const std::unique_lock lock(mutex());
  buffers()[reinterpret_cast<uintptr_t>(memory)] = {object, bytes};
  return memory;
}

bool free_buffer(void* memory) {
  id<MTLBuffer> object = nil;
  {
    const std::unique_lock lock(mutex());
    const auto at = buffers().find(reinterpret_cast<uintptr_t>(memory));
    if (at == buffers().end()) return false;
    object = at->second.object;
    buffers().erase(at);
  }
  [object release];
  return true;
}

Buffer find_buffer(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  const std::shared_lock lock(mutex());
  auto at = buffers().upper_bound(wanted);
  if (at == buffers().begin()) return {};
  --at;
  if (wanted - at->first >= at->second.bytes) return {};
  return {at->second.object, at->first};
}

namespace {

// A copy begins as many bytes behind a multiple of this as the array: ops choose kernels by alignments up to it.
constexpr uintptr_t kAlignment = 16;

}  // namespace

void* MetalMemory::allocate(size_t bytes) { return new_buffer(commands_.device(), bytes); }

void MetalMemory::free(void* memory) noexcept { free_buffer(memory); }

// The CPU fills shared memory, behind the kernels that are encoded.
void MetalMemory::fill(void* memory, unsigned char number, size_t count) {
  if (count == 0) return;
  commands_.commit();
  std::memset(reached(memory), number, count);
}

void MetalMemory::fill(void* memory, float number, size_t count) {
  if (count == 0) return;
  commands_.commit();
  std::fill_n(reinterpret_cast<float*>(reached(memory)), count, number);
}

void MetalMemory::write(void* memory, const void* data, size_t bytes) { std::memcpy(memory, data, bytes); }

void MetalMemory::use_array(void* data, size_t bytes, Access access) {
  const bool read = access != Access::kWritten, written = access != Access::kRead;
  const auto same =
      std::find_if(arrays_.begin(), arrays_.end(), [data](const Array& array) { return array.data == data; });
  if (same == arrays_.end()) {
    arrays_.push_back({data, bytes, read, written, nullptr});
  } else {
    same->bytes = std::max(same->bytes, bytes);
    same->read |= read;
    same->written |= written;
  }
}

char* MetalMemory::reached(void* data) {
  if (find_buffer(data).object) return static_cast<char*>(data);
  for (Array& array : arrays_) {
    if (array.data != data) continue;
    if (!array.copy) {
      const uintptr_t offset = reinterpret_cast<uintptr_t>(data) % kAlignment;
      array.copy = static_cast<char*>(running().arena.take(array.bytes + offset)) + offset;
      if (array.read) std::memcpy(array.copy, data, array.bytes);
    }
    return static_cast<char*>(array.copy);
  }
  throw std::logic_error("metalcore: a tensor lies in no array of the call");
}

Place MetalMemory::place_of(void* data) {
  const char* const address = reached(data);
  const Buffer buffer = find_buffer(address);
  return {buffer.object, reinterpret_cast<uintptr_t>(address) - buffer.begin};
}

void MetalMemory::complete() {
  commands_.commit();
  for (const Array& array : arrays_)
    if (array.written && array.copy) std::memcpy(array.data, array.copy, array.bytes);
}

void MetalMemory::end_call() noexcept {
  commands_.drop();
  arrays_.clear();
}

}  // namespace metalcore::c_api
