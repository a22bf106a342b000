#import "buffers.h"

#include "pool.h"

#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

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

}  // namespace metalcore::c_api
